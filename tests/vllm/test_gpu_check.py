"""The check of vLLM in `make gpu-check`, with small shapes on a CPU."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from scripts.gpu_check.engines import SYNCS, check_early_grades, check_vllm
from scripts.gpu_check.work import Work

pytestmark = pytest.mark.vllm


def test_five_syncs_are_measured_and_their_gaps_are_small(tmp_path: Path) -> None:
    measured = check_vllm(Work("cpu", True, tmp_path))
    assert measured.shortfalls == []
    assert measured.values["syncs"] == SYNCS == 5
    assert 0 < measured.values["sync_gap_max"] < 0.05
    assert measured.values["cudagraph_mode"] == "NONE", "there are none on a CPU"


def test_grading_while_sampling_gives_the_same_rewards(tmp_path: Path) -> None:
    measured = check_early_grades(Work("cpu", True, tmp_path))
    assert measured.shortfalls == []
    assert measured.values["rewards_equal"]
