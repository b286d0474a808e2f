"""The comparisons with TRL in `make gpu-check`, with small shapes on a CPU and TRL's built-in sampler."""

import pytest

from scripts.gpu_check import race
from scripts.gpu_check.race import STEPS, RaceWork, check_trl, run_trl
from scripts.gpu_check.work import Work
from tests.scripts.race_lane import RecordingLane

pytest.importorskip("trl")
pytestmark = pytest.mark.usefixtures("one_thread", "no_vllm")


@pytest.fixture
def no_vllm(monkeypatch):
    """Let both samplers be the built-in ones, also in an environment that has vLLM."""
    monkeypatch.setattr(race, "is_missing", "vllm".__eq__)


def test_a_batch_of_trl_on_the_same_work_is_timed(tmp_path):
    measured = check_trl(Work("cpu", True, tmp_path))
    values = measured.values
    assert values["time_over_trl"] == pytest.approx(values["bandpo_s"] / values["trl_s"])
    assert values["trl_s"] > 0
    assert measured.shortfalls == []


def test_trl_trains_the_blocks_of_the_race(tmp_path):
    lane = RecordingLane()
    run_trl(RaceWork("cpu", True, tmp_path), "0.5b", lane, blocks=1)
    assert lane.waits == [None, "ready"]
    assert len(lane.phases) == STEPS
