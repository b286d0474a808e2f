"""Deadline of an answer: it starts when work on the answer starts, independent of idle time and queued answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import pytest

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.types import Problem

DEADLINE_S = 1.5
PROBLEM = Problem("p", "", "", "t", "sleeping_grader:judge")


@pytest.fixture(autouse=True)
def _grader_that_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time\ndef judge(text, answer, extra):\n    time.sleep(float(text))\n    return True\n"
    (tmp_path / "sleeping_grader.py").write_text(code)
    monkeypatch.chdir(tmp_path)


def verdicts(pool: GraderPool, seconds: list[float]) -> list[str]:
    return [grade.verdict for grade in pool.grade([PROBLEM] * len(seconds), list(map(str, seconds)))]


def test_time_between_two_calls_does_not_count_toward_a_deadline() -> None:
    with GraderPool(GradingConfig(workers=1, deadline=DEADLINE_S)) as pool:
        assert verdicts(pool, [0]) == ["correct"]
        time.sleep(DEADLINE_S + 0.3)
        assert verdicts(pool, [0.1]) == ["correct"]
        assert not pool.errors


@pytest.mark.parametrize(("setting", "has_reward"), [("none", False), ("wrong", True)])
def test_a_timeout_has_the_reward_of_the_setting(setting: Literal["none", "wrong"], has_reward: bool) -> None:
    with GraderPool(GradingConfig(workers=1, deadline=DEADLINE_S, timeout_reward=setting)) as pool:
        slow, quick = pool.grade([PROBLEM] * 2, [str(1.8 * DEADLINE_S), "0"])
    assert (slow.reward, slow.correct, slow.has_reward) == (0.0, False, has_reward)
    assert quick.has_reward


def test_queued_answers_do_not_extend_the_deadline_of_a_slow_one() -> None:
    with GraderPool(GradingConfig(workers=1, deadline=DEADLINE_S)) as pool:
        assert verdicts(pool, [1.8 * DEADLINE_S, 0, 0, 0]) == ["timeout", "correct", "correct", "correct"]
