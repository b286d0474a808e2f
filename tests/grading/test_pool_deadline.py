"""Deadline of an answer: it starts when work on the answer starts, independent of idle time and queued answers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.types import Problem

DEADLINE_S = 1.5


@pytest.fixture(autouse=True)
def _grader_that_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time\ndef judge(text, answer, extra):\n    time.sleep(float(text))\n    return True\n"
    (tmp_path / "sleeping_grader.py").write_text(code)
    monkeypatch.chdir(tmp_path)


def verdicts(pool: GraderPool, seconds: list[float]) -> list[str]:
    problems = [Problem("p", "", "", "t", "sleeping_grader:judge")] * len(seconds)
    return [grade.verdict for grade in pool.grade(problems, list(map(str, seconds)))]


def test_time_between_two_calls_does_not_count_toward_a_deadline() -> None:
    with GraderPool(GradingConfig(workers=1, deadline=DEADLINE_S)) as pool:
        assert verdicts(pool, [0]) == ["correct"]
        time.sleep(DEADLINE_S + 0.3)
        assert verdicts(pool, [0.1]) == ["correct"]
        assert not pool.errors


def test_queued_answers_do_not_extend_the_deadline_of_a_slow_one() -> None:
    with GraderPool(GradingConfig(workers=1, deadline=DEADLINE_S)) as pool:
        assert verdicts(pool, [1.8 * DEADLINE_S, 0, 0, 0]) == ["timeout", "correct", "correct", "correct"]
