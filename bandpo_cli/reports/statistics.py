"""Statistics of a report: t-intervals, paired tests and adjusted p-values. One observation is one seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

LEVEL = 0.95

Limits = tuple[float, float]
"""Smallest and largest value that a metric can have."""

_NO_LIMITS: Limits = (-math.inf, math.inf)
_ROUNDING = 1e-12  # relative; the order of summation changes a mean by less


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95% interval. The fields are keys of `bandpo report --format json`.

    Attributes:
        n: number of seeds.
        mean: mean over the seeds.
        low, high: ends of Student's t-interval within the limits of the metric; None for a single seed, and where all
            seeds have the same value: neither shows how far the value of another seed may be.
    """

    n: int
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PairedTest:
    """Difference between a variant and the baseline over their common seeds.

    The fields are keys of `bandpo report --format json`.

    Attributes:
        change: variant − baseline, mean over the common seeds.
        p: two-sided p-value of the paired t-test; None where `change` has no interval.
        higher, lower: number of seeds in which the variant's value is greater or smaller than the baseline's.
    """

    change: Estimate
    p: float | None
    higher: int
    lower: int


def estimate(values: ArrayLike, limits: Limits = _NO_LIMITS) -> Estimate | None:
    """Return the mean of `values` with its t-interval; None for no values.

    The interval is the part of Student's t-interval within `limits`. The mean that it estimates is within them too, so
    the coverage stays the same. An interval on the logit scale would be for another mean, and undefined where a seed
    has the value 0 or 1.

    Args:
        values: [n], one value per seed; NaN for a seed without a value.
        limits: smallest and largest value that the metric can have, such as 0 and 1 for a share.
    """
    known = _known(values)
    if not known.size:
        return None
    mean = float(known.mean())
    if not _varies(known):
        return Estimate(known.size, mean, None, None)
    half = float(stats.t.ppf((1 + LEVEL) / 2, known.size - 1) * stats.sem(known))
    return Estimate(known.size, mean, max(mean - half, limits[0]), min(mean + half, limits[1]))


def paired_test(changes: ArrayLike, limits: Limits = _NO_LIMITS) -> PairedTest | None:
    """Return the paired comparison of a variant with the baseline; None without a common seed.

    Pairing removes what a seed changes in both variants alike, such as the order of the problems.

    Args:
        changes: [n], variant − baseline, one value per seed; NaN for a seed that one of them does not have.
        limits: limits of the metric; those of its differences follow from them.
    """
    known, widest = _known(changes), limits[1] - limits[0]
    if (change := estimate(known, (-widest, widest))) is None:
        return None
    p = float(stats.ttest_1samp(known, 0.0).pvalue) if _varies(known) else None
    return PairedTest(change, p, int(np.sum(known > 0)), int(np.sum(known < 0)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted by Holm's method (1979).

    Rejecting the hypotheses whose adjusted p-value is at most α makes at least one false rejection with probability
    at most α.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return [float(value) for value in adjusted]


def interval_band(values_RS: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return the lower and upper edge of the band over R runs at each of S steps, two arrays of shape [S].

    The band is the 95% t-interval of the mean. Two runs have their range instead, since the interval with one degree
    of freedom (12.7 standard errors) would fill the plot. A single run has none: None.
    """
    runs = len(values_RS)
    if runs < 2:
        return None
    if runs == 2:
        return values_RS.min(axis=0), values_RS.max(axis=0)
    half = stats.t.ppf((1 + LEVEL) / 2, runs - 1) * stats.sem(values_RS)
    return values_RS.mean(axis=0) - half, values_RS.mean(axis=0) + half


def p_text(p: float) -> str:
    """Return a p-value with two or three digits; `< 0.001` below that."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def _known(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    return array[~np.isnan(array)]


def _varies(values: NDArray[np.float64]) -> bool:
    """Return whether there are two values that differ by more than rounding: only then is there an interval."""
    return values.size > 1 and bool(np.ptp(values) > _ROUNDING * np.abs(values).max())
