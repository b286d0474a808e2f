"""How sure a mean over problems is: 95% intervals by the bootstrap over problems."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, stdtrit
from scipy.stats import bootstrap

LEVEL = 0.95
RESAMPLES = 10_000
_VALUES_AT_ONCE = 4_000_000  # of 8 bytes: what a bootstrap holds in memory beside its input
_ROUNDING = 1e-12  # sums of the same numbers in another order differ by less, relatively


class Interval(NamedTuple):
    """A mean and the ends of its interval; the ends are NaN where there is nothing to tell them by."""

    value: float
    low: float
    high: float


def mean_intervals(values_FP: ArrayLike, seed: int = 0, resamples: int = RESAMPLES) -> list[Interval]:
    """Return the mean over P problems of each of F figures with its 95% interval.

    Bias-corrected and accelerated bootstrap (Efron 1987; scipy.stats.bootstrap) over problems, widened for few problems
    (`_nominal_level`): it says how far the figure could move with other problems of the same kind and other draws,
    since both vary from problem to problem. All figures are resampled alike. A single problem, and a figure that is the
    same for every problem, have no interval: no resample of them says anything.

    Measured on success rates p ~ Beta(½, ½) and Beta(0.3, 1.5), 30 and 128 problems, 8 and 16 completions: the interval
    holds the truth in 94% to 97% of the draws. Where few of few problems are ever solved it is too narrow: 91% for
    mean@n and 80% for maj@4 with 30 problems, p ~ Beta(0.1, 2); with 128 it is 95% again.

    Args:
        values_FP: [F, P], finite.
        seed: of the resampling, so that the same completions give the same interval.
    """
    values = np.asarray(values_FP, dtype=np.float64)
    means = values.mean(axis=1)
    smallest, largest = values.min(axis=1), values.max(axis=1)
    low, high = np.full(len(values), np.nan), np.full(len(values), np.nan)
    varied = largest - smallest > _ROUNDING * np.abs(values).max(axis=1)
    if varied.any():
        centre, spread = means[varied], (largest - smallest)[varied]
        result = bootstrap(
            ((values[varied] - centre[:, None]) / spread[:, None],),
            _mean,
            axis=1,
            vectorized=True,
            n_resamples=resamples,
            confidence_level=_nominal_level(values.shape[1]),
            method="BCa",
            batch=max(1, _VALUES_AT_ONCE // values[varied].size),
            rng=np.random.default_rng(seed),
        )
        ends = centre + spread * np.stack(result.confidence_interval)
        low[varied], high[varied] = np.clip(ends, smallest[varied], largest[varied])
    return [Interval(*map(float, row)) for row in zip(means, low, high, strict=True)]


def _nominal_level(problems: int) -> float:
    """Return the level to ask the bootstrap for so that it holds the truth at `LEVEL`.

    Resamples of P values vary less than the values by √((P−1)/P), and their quantiles are a normal's, not a t's: what
    is asked for makes up for both (Hesterberg 2015, arXiv 1411.5279, "expanded percentile interval"). 0.962 for 30
    problems, 0.953 for 128.
    """
    quantile = stdtrit(problems - 1, (1 + LEVEL) / 2) * math.sqrt(problems / (problems - 1))
    level = float(1 - 2 * ndtr(-quantile))
    return min(level, 1 - _ROUNDING)  # for two problems it would round to 1, whose quantile is infinite


def _mean(values: NDArray[np.float64], axis: int) -> Any:
    """Return the mean, exactly 0 where it is 0 but for rounding.

    BCa counts the resamples that lie below the sample's mean, those equal to it by halves; of shares like 3/16 many
    are equal, and without this it would be chance on which side they are counted.
    """
    means = np.mean(values, axis=axis)
    return np.where(np.abs(means) < _ROUNDING, 0.0, means)
