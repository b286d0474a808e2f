"""The statistics of a report: numbers in, numbers out. The unit that repeats is the seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit

LEVEL = 0.95
_ROUNDING = 1e-12  # means of the same numbers in another order differ by less, relatively


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its 95% interval.

    Attributes:
        n: seeds.
        mean: over them.
        low, high: Student's t; None for a single seed, and where all seeds have the same value: neither tells how
            far another seed could be.
    """

    n: int
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PairedTest:
    """How an arm differs from the baseline, by the seeds that both have.

    Attributes:
        change: arm − baseline, mean over the common seeds.
        p: of the paired t-test, two-sided; None where `change` has no interval.
        higher, lower: seeds in which the arm's value is greater, less.
    """

    change: Estimate
    p: float | None
    higher: int
    lower: int


def estimate(values: ArrayLike) -> Estimate | None:
    """Return the mean of `values` [n] with its t-interval; None for no values."""
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        return None
    mean = float(array.mean())
    error = _standard_error(array)
    if error is None:
        return Estimate(array.size, mean, None, None)
    half = float(stdtrit(array.size - 1, (1 + LEVEL) / 2)) * error
    return Estimate(array.size, mean, mean - half, mean + half)


def paired_test(arm: Mapping[int, float], baseline: Mapping[int, float]) -> PairedTest | None:
    """Compare two arms by their common seeds (values by seed); None when they have none in common.

    Pairing takes out what a seed does to both alike: the order of the problems, the evaluation before training.
    """
    changes = np.array([arm[seed] - baseline[seed] for seed in sorted(arm.keys() & baseline.keys())])
    change = estimate(changes)
    if change is None:
        return None
    error = _standard_error(changes)
    p = None if error is None else 2.0 * float(stdtr(change.n - 1, -abs(change.mean) / error))
    return PairedTest(change, p, int(np.sum(changes > 0)), int(np.sum(changes < 0)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for being several (Holm 1979): rejecting those below α errs once with at most α."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def area_under(steps: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the mean height of the curve: its area by the trapezoid rule, over the steps spanned; None for a point."""
    if len(steps) < 2:
        return None
    return float(np.trapezoid(values, steps) / (steps[-1] - steps[0]))


def interval_band(values_RS: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return the lower and upper edge over R runs at each of S steps: [S], [S].

    The 95% t-interval of the mean; of two runs their range, since t with one degree of freedom (12.7 standard errors)
    would fill the picture; of one run None.
    """
    runs = len(values_RS)
    if runs < 2:
        return None
    if runs == 2:
        return values_RS.min(axis=0), values_RS.max(axis=0)
    half = stdtrit(runs - 1, (1 + LEVEL) / 2) * values_RS.std(axis=0, ddof=1) / math.sqrt(runs)
    return values_RS.mean(axis=0) - half, values_RS.mean(axis=0) + half


def _standard_error(values: NDArray[np.float64]) -> float | None:
    """Return that of the mean; None where values do not vary, or there is one."""
    if values.size < 2 or np.ptp(values) <= _ROUNDING * np.abs(values).max():
        return None
    return float(values.std(ddof=1) / math.sqrt(values.size))
