"""How sure a mean over problems is: 95% intervals by the bootstrap over problems."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import bootstrap

LEVEL = 0.95
RESAMPLES = 10_000
_VALUES_AT_ONCE = 4_000_000  # of 8 bytes: what a bootstrap holds in memory beside its input


class Interval(NamedTuple):
    """A mean and the ends of its interval; the ends are NaN where there is nothing to tell them by."""

    value: float
    low: float
    high: float


def mean_intervals(values_FP: ArrayLike, seed: int = 0, resamples: int = RESAMPLES) -> list[Interval]:
    """Return the mean over P problems of each of F figures with its 95% interval.

    Bias-corrected and accelerated bootstrap (Efron 1987; scipy.stats.bootstrap) over problems: it says how far the
    figure could move with other problems of the same kind and other draws, since both vary from problem to problem. All
    figures are resampled alike. A single problem, and a figure that is the same for every problem, have no interval:
    no resample of them says anything.

    Args:
        values_FP: [F, P], finite.
        seed: of the resampling, so that the same completions give the same interval.
    """
    values = np.asarray(values_FP, dtype=np.float64)
    means = values.mean(axis=1)
    low, high = np.full(len(values), np.nan), np.full(len(values), np.nan)
    varied = np.ptp(values, axis=1) > 0
    if varied.any():
        result = bootstrap(
            (values[varied],),
            np.mean,
            axis=1,
            vectorized=True,
            n_resamples=resamples,
            confidence_level=LEVEL,
            method="BCa",
            batch=max(1, _VALUES_AT_ONCE // values[varied].size),
            rng=np.random.default_rng(seed),
        )
        low[varied], high[varied] = result.confidence_interval
    return [Interval(*map(float, row)) for row in zip(means, low, high, strict=True)]
