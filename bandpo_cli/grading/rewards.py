"""Weighted rewards: the sum of several graders' rewards, and the error of a grader that grades nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from bandpo_cli.config.task import RewardComponent
from bandpo_cli.errors import GraderFailedError
from bandpo_cli.ranks import SINGLE, Ranks
from bandpo_cli.types import GRADER_ERROR, NOT_APPLICABLE, Grade, Grader, Problem, is_ungraded


class ErrorReportingGrader(Protocol):
    """The part of `GraderPool` that is used here."""

    @property
    def errors(self) -> Mapping[str, str]:
        """The first error of each grader that failed, by name."""

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
        """Return the grades [N] of texts [N], each as an answer to its problem [N]."""


def training_grader(
    pool: ErrorReportingGrader, components: Sequence[RewardComponent] | None, ranks: Ranks = SINGLE
) -> Grader:
    """Return the grader of the completions of training.

    Without components it is that of the pool. With components, each of them grades every completion. The reward is the
    sum of weight times value over the components that apply; see `weighted_grade`. Verdict and correctness are those
    of the first component.

    Args:
        pool: grades completions, each with the grader of its problem.
        components: `task.rewards`.
        ranks: the processes that grade a part of the completions each; all of them must call the grader together.

    Raises:
        GraderFailedError: when it is called: every verdict of a component, on all ranks, is `grader-error`.
    """

    def grade_component(
        component: RewardComponent | None, problems: Sequence[Problem], texts: Sequence[str]
    ) -> list[Grade]:
        named = graded_by(component, problems)
        grades = pool.grade(named, texts)
        check_not_all_failed(
            ranks.gather_all([each.verdict for each in grades]),
            ranks.gather_all([each.grader for each in named]),
            lambda: first_errors(pool, ranks),
        )
        return grades

    def grade(problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
        if not components:
            return grade_component(None, problems, texts)
        grades_by_component = [grade_component(component, problems, texts) for component in components]
        return [weighted_grade(components, grades) for grades in zip(*grades_by_component, strict=True)]

    return grade


def graded_by(component: RewardComponent | None, problems: Sequence[Problem]) -> Sequence[Problem]:
    """Return problems whose grader is that of the component; the problems themselves where it names none."""
    grader = None if component is None else component.grader
    return problems if grader is None else [replace(problem, grader=grader) for problem in problems]


def first_errors(pool: ErrorReportingGrader, ranks: Ranks) -> Mapping[str, str]:
    """Return the first error of each grader that failed on any rank, by name; all ranks must call this together."""
    return {
        name: error for errors in reversed(ranks.gather(dict(pool.errors))) for name, error in errors.items()
    }


def weighted_grade(components: Sequence[RewardComponent], grades: Sequence[Grade]) -> Grade:
    """Return the grade of a completion from those of its components, in their order.

    A component that does not apply adds nothing. Where one failed, the completion has no reward: the sum of the others
    cannot be compared with the rewards of the group.
    """
    values = [each.reward if each.has_reward else None for each in grades]
    failed = [each for each in grades if is_ungraded(each)]
    first = failed[0] if failed and grades[0].verdict == NOT_APPLICABLE.verdict else grades[0]
    return replace(
        first,
        reward=sum(
            each.weight * value for each, value in zip(components, values, strict=True) if value is not None
        ),
        has_reward=not failed and any(each.has_reward for each in grades),
        components={each.label: value for each, value in zip(components, values, strict=True)},
    )


def check_not_all_failed(
    verdicts: Collection[str], graders: Iterable[str], errors: Callable[[], Mapping[str, str]]
) -> None:
    """Raise GraderFailedError if there are verdicts and all are `grader-error`.

    Args:
        verdicts: the verdicts of one step or evaluation.
        graders: the names of the graders that gave them.
        errors: returns the first error of each grader, by name.
    """
    if not verdicts or Counter(verdicts)[GRADER_ERROR.verdict] < len(verdicts):
        return
    first_errors = errors()
    causes = "; ".join(
        f"grader '{name}': {first_errors.get(name, 'no message')}" for name in dict.fromkeys(graders)
    )
    raise GraderFailedError(
        f"all {len(verdicts):,} answers are grader errors, so there is no reward to learn from or to report: {causes}; "
        "repair the grader, then continue with --resume"
    )
