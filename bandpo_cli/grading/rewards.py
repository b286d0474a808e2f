"""Weighted rewards: the sum of several graders' rewards, and the error of a grader that grades nothing."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from bandpo_cli.config.task import RewardComponent
from bandpo_cli.errors import GraderFailedError
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.types import GRADER_ERROR, NOT_APPLICABLE, Grade, Grader, Problem, is_ungraded

MAX_FAILED_BATCHES = 10
"""Batches in a row in which every call of an asynchronous function may fail before the run ends."""


class ErrorReportingGrader(Protocol):
    """The part of `GraderPool` that is used here: the grades [N] of texts [N], and the first error of each grader."""

    @property
    def errors(self) -> Mapping[str, str]: ...

    @property
    def asynchronous(self) -> frozenset[str]: ...

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]: ...


def training_grader(
    pool: ErrorReportingGrader,
    components: Sequence[RewardComponent] | None,
    ranks: Ranks = SINGLE,
    failures: Counter[str] | None = None,
    grade: Grader | None = None,
) -> Grader:
    """Return the grader of the completions of training.

    Without components (`task.rewards`) it is the grader of the pool. Each of several ranks grades a part of the
    completions; all of them must call the grader together.

    It raises GraderFailedError if every verdict of a component, on all ranks, is `grader-error`. Of asynchronous
    functions it does so after `MAX_FAILED_BATCHES` such batches in a row, since a server may be away for some minutes.

    Args:
        pool: the pool that grades.
        components: `task.rewards`.
        ranks: the processes that grade a share of the completions.
        failures: the numbers of such batches in a row by names of graders, which this function updates; None for none.
        grade: returns the grades in place of `pool.grade`.
    """

    def checked_grades(problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
        grades = (grade or pool.grade)(problems, texts)
        verdicts = ranks.gather_all([item.verdict for item in grades])
        graders = ranks.gather_all([problem.grader for problem in problems])
        key, count = " ".join(sorted({*graders})), Counter() if failures is None else failures
        count[key] = count[key] + 1 if have_all_calls_failed(pool, verdicts, graders, ranks) else 0
        if not 0 < count[key] < MAX_FAILED_BATCHES:
            check_not_all_failed(verdicts, graders, lambda: first_errors(pool, ranks))
        return grades

    return partial(grade_components, checked_grades, components)


def grade_components(
    grade: Grader,
    components: Sequence[RewardComponent] | None,
    problems: Sequence[Problem],
    texts: Sequence[str],
) -> list[Grade]:
    """Return the grades [N] of texts [N]: with components, each grades every text, and `weighted_grade` adds them."""
    if not components:
        return grade(problems, texts)
    by_component = [grade(graded_by(component, problems), texts) for component in components]
    return [weighted_grade(components, grades) for grades in zip(*by_component, strict=True)]


def graded_by(component: RewardComponent | None, problems: Sequence[Problem]) -> Sequence[Problem]:
    """Return the problems with the grader of the component; unchanged if the component names none."""
    grader = None if component is None else component.grader
    return problems if grader is None else [replace(problem, grader=grader) for problem in problems]


def first_errors(pool: ErrorReportingGrader, ranks: Ranks) -> Mapping[str, str]:
    """Return the first error of each grader that failed on any rank, by name; all ranks must call this together."""
    return {
        name: error for errors in reversed(ranks.gather(dict(pool.errors))) for name, error in errors.items()
    }


def have_all_calls_failed(
    pool: ErrorReportingGrader, verdicts: Collection[str], graders: Iterable[str], ranks: Ranks
) -> bool:
    """Return whether all verdicts are `grader-error`, and all graders asynchronous; all ranks must call this together.

    `verdicts` and `graders` are those of the answers of all ranks.
    """
    if {*verdicts} != {GRADER_ERROR.verdict}:
        return False
    return {*graders} <= {*ranks.gather_all([*pool.asynchronous])}


def weighted_grade(components: Sequence[RewardComponent], grades: Sequence[Grade]) -> Grade:
    """Return the grade of a completion from the grades of its components, in their order.

    The reward is the sum of weight times value over the components that apply. The first component decides the verdict
    and whether the completion is correct. If a component failed, the completion has no reward: the sum of the other
    rewards cannot be compared with the rewards of the group.
    """
    failed = [grade for grade in grades if is_ungraded(grade)]
    first = failed[0] if failed and grades[0].verdict == NOT_APPLICABLE.verdict else grades[0]
    pairs = list(zip(components, grades, strict=True))
    rewards = [component.weight * grade.reward for component, grade in pairs if grade.has_reward]
    return replace(
        first,
        reward=sum(rewards),
        has_reward=bool(rewards) and not failed,
        components={item.label: grade.reward if grade.has_reward else None for item, grade in pairs},
    )


def check_not_all_failed(
    verdicts: Collection[str], graders: Iterable[str], errors: Callable[[], Mapping[str, str]]
) -> None:
    """Raise GraderFailedError if all verdicts of a step or evaluation, if any, are `grader-error`.

    `errors` returns the first error of each of the graders, by name.
    """
    if not verdicts or set(verdicts) != {GRADER_ERROR.verdict}:
        return
    first_errors = errors()
    causes = "; ".join(
        f"grader '{name}': {first_errors.get(name, 'no message')}" for name in dict.fromkeys(graders)
    )
    raise GraderFailedError(
        f"all {len(verdicts):,} answers are grader errors, so there is no reward to learn from or to report: {causes}; "
        "once it works (a run folder has a copy of its file), --resume continues; another grader needs a new run"
    )
