"""The checks of sampling in `make gpu-check`, with small shapes on a CPU."""

import pytest

pytest.importorskip("vllm")

from scripts.gpu_check import engines
from scripts.gpu_check.grader import GRADER
from scripts.gpu_check.race import PHASES, STEPS, RaceWork, run_bandpo
from scripts.gpu_check.throughput import TINY_SEQUENCES
from scripts.gpu_check.work import Work
from tests.scripts.race_lane import RecordingLane

pytestmark = pytest.mark.vllm


def test_syncs_and_decoding_steps_of_one_engine_are_measured(tmp_path):
    work = Work("cpu", True, tmp_path)
    measured = engines.check_vllm(work)
    assert measured.shortfalls == []
    assert measured.values["syncs"] == engines.SYNCS == 5
    assert 0 < measured.values["sync_gap_max"] < 0.05
    assert measured.values["cudagraph_mode"] == "NONE", "there are none on a CPU"
    decoding = engines.check_decode(work).values
    for count in TINY_SEQUENCES:
        in_python = 1e-3 * count * decoding[f"python_us_per_sequence_{count}"]
        assert 0 < in_python < decoding[f"ms_per_step_{count}"], "the model has its part of a step"


def test_bandpo_trains_the_blocks_of_the_race(tmp_path):
    lane = RecordingLane()
    run_bandpo(RaceWork("cpu", True, tmp_path), "0.5b", lane, blocks=2)
    assert lane.waits == [None, "ready"]
    assert len(lane.phases) == 2 * STEPS
    assert all(phases.keys() == set(PHASES["bandpo"]) for phases in lane.phases)


def test_rewards_of_both_orders_of_grading_are_compared(tmp_path, monkeypatch):
    """With the engine that starts at once; test_training_run.py grades while vLLM samples."""
    monkeypatch.setattr(engines, "_vllm_settings", lambda work: {"engine": "transformers"})
    monkeypatch.setattr(engines, "SLOW_GRADER", GRADER)
    measured = engines.check_early_grades(Work("cpu", True, tmp_path))
    assert measured.shortfalls == []
    assert measured.values["rewards_equal"]
