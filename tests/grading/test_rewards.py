"""Weighted rewards: the sum by hand, components without a value, and graders that fail on every answer."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bandpo_cli.config.batch_and_sampling import RewardComponent
from bandpo_cli.errors import GraderFailedError, RunError
from bandpo_cli.grading.pool import GraderUse, check_not_all_failed, training_grader, weighted_grade
from bandpo_cli.types import (
    CORRECT,
    GRADER_ERROR,
    NOT_APPLICABLE,
    TIMEOUT,
    WRONG,
    Grade,
    Problem,
    is_ungraded,
)

MATH = RewardComponent(grader="math")
FORMAT = RewardComponent(grader="trl:mine:in_tags", weight=0.25)
LENGTH = RewardComponent(grader="mine:length", weight=-0.5, name="long")
WRONG_TIMEOUT = replace(TIMEOUT, has_reward=True)
PROBLEM = Problem("p", "?", "2", "s", "number")


class Grades:
    """A pool whose graders give stored grades to every text."""

    def __init__(self, **by_grader: Sequence[Grade]) -> None:
        self.by_grader = {name.replace("_", ":"): grades for name, grades in by_grader.items()}
        self.uses = {"mine:length": GraderUse(error="KeyError: 'x'")}

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
        assert len(problems) == len(texts)
        return [self.by_grader[problem.grader][index] for index, problem in enumerate(problems)]


def partial(reward: float) -> Grade:
    return Grade(reward, False, "wrong")


SUMS = [
    ((CORRECT, partial(0.5), partial(3.0)), 1 + 0.125 - 1.5, (1.0, 0.5, 3.0)),
    ((WRONG, CORRECT, partial(-2.0)), 0 + 0.25 + 1.0, (0.0, 1.0, -2.0)),
    ((WRONG_TIMEOUT, CORRECT, partial(0.0)), 0.25, (0.0, 1.0, 0.0)),
    ((NOT_APPLICABLE, CORRECT, NOT_APPLICABLE), 0.25, (None, 1.0, None)),
]


def test_the_reward_is_the_weighted_sum_and_the_verdict_that_of_the_first():
    for grades, reward, values in SUMS:
        grade = weighted_grade([MATH, FORMAT, LENGTH], grades)
        assert (grade.reward, grade.has_reward) == (reward, True)
        assert (grade.correct, grade.verdict) == (grades[0].correct, grades[0].verdict)
        assert grade.components == dict(zip(("math", "in_tags", "long"), values, strict=True))


def test_a_completion_has_no_reward_where_nothing_applies_or_a_component_failed():
    """Without the failed component the sum is not comparable with the rewards of the group."""
    failed = [(CORRECT, TIMEOUT), (GRADER_ERROR, CORRECT), (NOT_APPLICABLE, GRADER_ERROR)]
    for grades in [(NOT_APPLICABLE, NOT_APPLICABLE), *failed]:
        grade = weighted_grade([FORMAT, LENGTH], grades)
        assert (grade.has_reward, is_ungraded(grade)) == (False, grades in failed)
        assert grade.correct == grades[0].correct
    recorded = RewardComponent(grader="math", weight=0)
    grade = weighted_grade([recorded, LENGTH], (CORRECT, NOT_APPLICABLE))
    assert (grade.has_reward, is_ungraded(grade)) == (False, False)
    assert (grade.correct, grade.verdict) == (True, "correct")


def test_each_component_grades_every_completion_and_the_first_may_be_the_problems_own():
    pool = Grades(number=[CORRECT, WRONG], mine_length=[partial(0.5), partial(1.0)])
    own = RewardComponent()
    grades = training_grader(pool, [own, LENGTH])([PROBLEM, PROBLEM], ["a", "b"])
    assert [grade.reward for grade in grades] == [0.75, -0.5]
    assert [grade.correct for grade in grades] == [True, False]
    assert [*grades[0].components] == ["answer", "long"]
    assert training_grader(pool, None)([PROBLEM, PROBLEM], ["a", "b"]) == [CORRECT, WRONG]


def test_a_component_that_fails_on_every_answer_stops_the_run():
    pool = Grades(number=[CORRECT, WRONG], mine_length=[GRADER_ERROR, GRADER_ERROR])
    grade = training_grader(pool, [RewardComponent(), LENGTH])
    message = r"all 2 answers .*grader 'mine:length': KeyError: 'x'; once it works .*, --resume continues"
    with pytest.raises(GraderFailedError, match=message) as error:
        grade([PROBLEM, PROBLEM], ["a", "b"])
    assert isinstance(error.value, RunError)
    assert "'number'" not in str(error.value)


def test_some_errors_or_timeouts_do_not_stop_the_run():
    verdicts = [[], ["timeout"], ["grader-error", "timeout"], ["grader-error", "wrong"], ["not-applicable"]]
    for step in verdicts:
        check_not_all_failed(step, ["a:b"] * len(step), [])
