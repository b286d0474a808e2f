"""The checks of sampling in `make gpu-check`, with small shapes on a CPU."""

import pytest

pytest.importorskip("vllm")

from scripts.gpu_check import engines
from scripts.gpu_check.grader import GRADER
from scripts.gpu_check.work import Work

pytestmark = pytest.mark.vllm


def test_five_syncs_are_measured_and_their_gaps_are_small(tmp_path):
    measured = engines.check_vllm(Work("cpu", True, tmp_path))
    assert measured.shortfalls == []
    assert measured.values["syncs"] == engines.SYNCS == 5
    assert 0 < measured.values["sync_gap_max"] < 0.05
    assert measured.values["cudagraph_mode"] == "NONE", "there are none on a CPU"


def test_rewards_of_both_orders_of_grading_are_compared(tmp_path, monkeypatch):
    """With the engine that starts at once; test_training_run.py grades while vLLM samples."""
    monkeypatch.setattr(engines, "_vllm_settings", lambda work: {"engine": "transformers"})
    monkeypatch.setattr(engines, "SLOW_GRADER", GRADER)
    measured = engines.check_early_grades(Work("cpu", True, tmp_path))
    assert measured.shortfalls == []
    assert measured.values["rewards_equal"]
