"""Countdown task: exactly the solvable problems, and a fixed split into training and held-out problems."""

import itertools
import math

import pytest

from bandpo_cli.config.task import CountdownTask
from bandpo_cli.errors import ConfigError
from bandpo_cli.grading.countdown import grade_countdown
from bandpo_cli.tasks.arithmetic import countdown

TASK = countdown(CountdownTask())
HELDOUT = TASK.heldout_sets()["countdown"]
ALL = [*TASK.train_problems(), *HELDOUT]


def solve_by_brute_force(config: CountdownTask) -> dict[str, str]:
    """Return an answer to each prompt, from all orders and operators."""
    answers = {}
    for order in itertools.product(range(1, config.max_number + 1), repeat=config.numbers):
        for signs in itertools.product("+-*", repeat=config.numbers - 1):
            text = "".join(f"{sign}{number}" for sign, number in zip(("", *signs), order, strict=True))
            terms = text.replace("-", "+-").split("+")
            value = sum(math.prod(map(int, term.split("*"))) for term in terms)
            if config.min_target <= value <= config.max_target:
                answers[f"{' '.join(map(str, sorted(order)))}={value}:"] = text
    return answers


@pytest.mark.parametrize("sizes", [(2, 10, 0, 50), (3, 5, 0, 30), (4, 4, 17, 99), (5, 2, 0, 20)])
def test_problems_are_exactly_the_solvable_ones_and_have_answers_that_the_grader_accepts(
    sizes: tuple[int, ...],
) -> None:
    names = ("numbers", "max_number", "min_target", "max_target")
    config = CountdownTask.model_validate(dict(zip(names, sizes, strict=True)))
    task = countdown(config)
    problems = [*task.train_problems(), *task.heldout_sets()["countdown"]]
    answers = solve_by_brute_force(config)
    assert sorted(problem.prompt for problem in problems) == sorted(answers)
    assert all(grade_countdown(problem, answers[str(problem.prompt)]).correct for problem in problems)


def test_training_and_heldout_problems_are_disjoint() -> None:
    ids = [problem.id for problem in ALL]
    assert len(set(ids)) == len(ids)
    assert len({(problem.extra["numbers"], problem.answer) for problem in ALL}) == len(ids)
    assert all(problem.prompt == f"{problem.extra['numbers']}={problem.answer}:" for problem in ALL)
    assert 0.08 < len(HELDOUT) / len(ids) < 0.12


@pytest.mark.slow
def test_split_does_not_depend_on_other_settings() -> None:
    heldout = {problem.id for problem in HELDOUT}
    smaller = countdown(CountdownTask(max_number=6, max_target=40, heldout_fraction=0.05))
    assert {problem.id for problem in smaller.heldout_sets()["countdown"]} < heldout
    fewer = countdown(CountdownTask(heldout_fraction=0.05)).heldout_sets()["countdown"]
    assert fewer == HELDOUT[: len(fewer)]


def test_order_is_fixed() -> None:
    # Literal ids: another hash would hold out problems that the bundled model was trained on.
    first = ["countdown/1 1 4 4=16", "countdown/1 2 2 5=2", "countdown/3 3 3 4=21"]
    assert [problem.id for problem in HELDOUT[:3]] == first
    assert (len(TASK.train_problems()), len(HELDOUT)) == (9548, 1077)


def test_settings_without_a_heldout_problem_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"max_number=2.*heldout_fraction=0\.001"):
        countdown(CountdownTask(numbers=2, max_number=2, max_target=3, heldout_fraction=0.001))
