"""Verdicts on a paired difference: better or worse, equivalent within a margin, or undecided; with its power.

One observation is the difference in one seed (`bandpo report`) or on one problem (`bandpo eval compare`).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import nctdtrinc, stdtrit

from bandpo_cli.errors import ConfigError, plural

ALPHA = 0.05
"""Level of all tests. An interval of 95% excludes 0 where the two-sided test rejects at this level."""
POWER = 0.8
"""Probability with which a test of the planned size shows the difference that it was planned for."""
MARGIN = 0.02
"""Default margin of equivalence, in units of accuracy."""

_MAX_OBSERVATIONS = 10**9


@dataclass(frozen=True)
class Conclusion:
    """The conclusion that a paired difference allows.

    Attributes:
        verdict: `better`, `worse`, `higher` or `lower`, with `by less than m` if the difference is also within the
            margin; `equivalent within ±m`; `undecided: n more seeds`; or why there is no test.
        detectable: the smallest difference that a test of this size shows with a probability of 80%, from the observed
            spread; None without a test.
        p_equivalent: p-value of the two one-sided tests against ±margin; None without a margin or without a test.
        further: number of further seeds or problems that would decide; only for an undecided difference with a margin.
    """

    verdict: str
    detectable: float | None = None
    p_equivalent: float | None = None
    further: int | None = None


def check_margin(margin: float) -> None:
    """Raise ConfigError if a margin of equivalence is not between 0 and 1."""
    if not 0 < margin < 1:
        example = f"a difference of accuracies above 0 and below 1, as in {MARGIN}"
        raise ConfigError(f"--margin {margin:g}: {example}")


def conclude(
    changes: NDArray[np.float64],
    p: float | None,
    margin: float | None = MARGIN,
    *,
    words: tuple[str, str] = ("better", "worse"),
    unit: str = "seed",
    family: int = 1,
) -> Conclusion:
    """Return the conclusion on the mean of paired differences.

    A significant difference comes first: it is `better` or `worse` also if it is within the margin, and the verdict
    then says both. Only a difference that is not significant can be `equivalent`. It is if both one-sided t-tests
    reject at 5%, so that the 90% t-interval is within the margin (Schuirmann 1987).

    Args:
        changes: [n], finite, one difference per seed or problem.
        p: two-sided p-value of the paired t-test, adjusted for the size of the family; None without a test.
        margin: margin of equivalence; None for a metric that is not in units of accuracy.
        words: the directions of a positive and of a negative difference.
        unit: the observation, `seed` or `problem`.
        family: number of comparisons over which `p` is adjusted. The power is computed at the level of Holm's first
            step, 5% divided by this number.
    """
    if p is None:
        few = (
            f"one {unit}: no test"
            if changes.size < 2
            else f"the same difference in every {unit}: no interval"
            if changes.any()
            else f"equal in every {unit}"
        )
        return Conclusion(few)
    n, mean, spread, alpha = len(changes), float(changes.mean()), float(changes.std(ddof=1)), ALPHA / family
    direction, detectable = words[int(mean < 0)], spread * smallest_effect(n, alpha)
    if margin is None:
        return Conclusion(direction if p <= ALPHA else "undecided", detectable)
    from statsmodels.stats.weightstats import DescrStatsW  # 1.5 s to import, as everything of statsmodels

    p_equivalent = float(DescrStatsW(changes).ttost_mean(-margin, margin)[0])
    if p <= ALPHA:
        verdict = direction + (f" by less than {margin:g}" if p_equivalent <= ALPHA else "")
    elif p_equivalent <= ALPHA:
        verdict = f"equivalent within ±{margin:g}"
    else:
        further = max(1, observations_to_decide(n, mean, spread, margin, alpha) - n)
        verdict = f"undecided: {plural(further, f'more {unit}')}"
        return Conclusion(verdict, detectable, p_equivalent, further)
    return Conclusion(verdict, detectable, p_equivalent)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted by Holm's method (1979).

    Rejecting the hypotheses whose adjusted p-value is at most α makes at least one false rejection with probability
    at most α. (`multipletests` of statsmodels collects the garbage of the process at each call: 0.1 s.)
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return [float(value) for value in adjusted]


def smallest_effect(n: int, alpha: float = ALPHA, power: float = POWER, sides: int = 2) -> float:
    """Return the effect, in standard deviations, that a t-test of n observations shows with probability `power`.

    This inverse of the noncentral t distribution also has values where `TTestPower` of statsmodels has NaN (n = 2). The
    other side of a two-sided test is ignored, less than 10⁻⁵ of the power.
    """
    critical = stdtrit(n - 1, 1 - alpha / sides)
    return float(nctdtrinc(n - 1, 1 - power, critical) / math.sqrt(n))


def observations(effect: float, alpha: float = ALPHA, power: float = POWER, sides: int = 2) -> int:
    """Return the smallest number of observations whose t-test shows `effect` with probability `power`."""
    sizes = range(2, _MAX_OBSERVATIONS)
    return sizes[0] + bisect_left(
        sizes, True, key=lambda n: smallest_effect(n, alpha, power, sides) <= abs(effect)
    )


def observations_to_decide(n: int, mean: float, spread: float, margin: float, alpha: float = ALPHA) -> int:
    """Return the number of observations that decide an undecided difference with a probability of 80%.

    With this number, a true difference as large as the margin is significant, and a true difference of 0 is shown to be
    equivalent. This does not depend on the observed mean, which is the least certain number here. If there are as many
    observations already, the true difference is probably between 0 and the margin: the result is then the number that
    decides in one of the two ways if the observed mean is the true one.

    Args:
        n: number of observations so far.
        mean, spread: mean and standard deviation of the observed differences.
        alpha: level of the two-sided test.
    """
    both_ends = (1 + POWER) / 2  # at 0 each of the two one-sided tests fails in half of the cases
    decided = max(observations(margin / spread, alpha), observations(margin / spread, ALPHA, both_ends, 1))
    if decided > n:
        return decided
    inside = max(margin - abs(mean), 0.0) / spread
    return min(observations(mean / spread, alpha), observations(inside, ALPHA, sides=1))
