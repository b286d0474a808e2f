"""Saturating curve of held-out accuracy against compute: R(C) = R0 + (A − R0) / (1 + (C_mid/C)^B).

It is the curve of ScaleRL (Khatri et al. 2025, arXiv 2510.13786): R0 is the initial accuracy, A the asymptote, C_mid
the compute at half the gain, B > 0 the exponent. The paper leaves out the first 1,500 GPU hours of a run; here it is
the first tenth of the compute. A short run does not determine A, since curves with different A fit equally well. The
interval of A therefore consists of all values that a test does not reject, and A has a value only if it is narrow.

Suffixes of arrays: R runs, S evaluations, K curves of a grid, B bootstrap replicates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from bandpo_cli.errors import UserError, plural

Floats = NDArray[np.float64]

EARLY = 0.1
"""Share of the compute whose evaluations are left out: a warm-up follows another curve."""

MIN_EVALUATIONS = 9
"""Fewest evaluations in a fit: two thirds of them, on which the hold-out error is based, are twice the parameters."""

MAX_WIDTH = 0.1
"""Largest width of the interval of an asymptote that has a value."""

_LEVEL, _REPLICATES, _HALVINGS = 0.95, 200, 8
_MIDPOINTS, _EXPONENTS = (
    (0.05, 30.0),
    (0.4, 6.0),
)  # ranges that are searched; midpoints in units of the compute


@dataclass(frozen=True)
class FittedParameter:
    """A parameter with its 95% interval; `low` and `high` are None if the interval leaves the range searched."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class SaturatingFit:
    """Fit of the mean over the seeds of a variant. The fields are keys of `report.json`.

    Attributes:
        evaluations: number of evaluations in the fit.
        initial: R0.
        asymptote, exponent, midpoint: A, B and C_mid. Where the data do not identify A, it has no value and B and C_mid
            are None; A is None where it has no interval.
        unidentified: why A has no value; "" if it has one.
        holdout: errors of predicting the last third of the evaluations from the others: `rmse`, and `final`, prediction
            − observation at the last evaluation; `naive_rmse` and `naive_final` are those of holding the last accuracy.
            Empty for too few evaluations, as is `curve`.
        curve: compute and accuracy on the fitted curve, over the compute of the evaluations in the fit.
    """

    variant: str
    seeds: int
    evaluations: int
    initial: float
    asymptote: FittedParameter | None
    exponent: FittedParameter | None
    midpoint: FittedParameter | None
    unidentified: str
    holdout: dict[str, float]
    curve: Sequence[tuple[float, float]]


def saturating_curve(compute: Floats, initial: float, a: float, b: float, c_mid: float) -> Floats:
    """Return the accuracy after `compute`, which is positive."""
    curve: Floats = initial + (a - initial) / (1 + (c_mid / compute) ** b)
    return curve


class _Grid:
    """Curves with the exponents and midpoints of a grid at S evaluations. The best A of each has a closed form."""

    def __init__(self, compute_S: Floats, finer: int = 1) -> None:
        exponents = np.geomspace(*_EXPONENTS, 16 * finer)
        midpoints = np.geomspace(*_MIDPOINTS, 40 * finer) * compute_S[-1]
        self.shape_K2, self._compute_S = (
            np.array([*map(np.ravel, np.meshgrid(exponents, midpoints))]).T,
            compute_S,
        )
        self.curves_KS = saturating_curve(compute_S, 0.0, 1.0, *self.shape_K2.T[:, :, None])
        self._squares_K1 = np.square(self.curves_KS).sum(axis=1, keepdims=True)

    def fit(
        self, accuracy_SB: Floats, initial_B: Floats, a: float | None = None
    ) -> tuple[Floats, NDArray[np.intp], Floats]:
        """Return A, or `a`, with the index of the curve and the sum of squared errors of the best fits."""
        gain_SB, columns = accuracy_SB - initial_B, np.arange(len(initial_B))
        products_KB = self.curves_KS @ gain_SB
        rise_KB = np.clip(products_KB / self._squares_K1, -initial_B, 1 - initial_B)  # A is within 0 and 1
        if a is not None:
            rise_KB = np.broadcast_to(a - initial_B, products_KB.shape)
        errors_KB = rise_KB * (rise_KB * self._squares_K1 - 2 * products_KB)
        best_B = errors_KB.argmin(axis=0)
        errors_B = errors_KB[best_B, columns] + np.square(gain_SB).sum(axis=0)
        return initial_B + rise_KB[best_B, columns], best_B, errors_B

    def refine(self, accuracy_S: Floats, initial: float) -> list[float]:
        """Return A, B and C_mid of the least-squares fit, starting from the best of the grid."""
        (a,), (best,), _ = self.fit(accuracy_S[:, None], np.array([initial]))

        def errors(parameters: Floats) -> Floats:
            a, *shape = parameters
            return saturating_curve(self._compute_S, initial, a, *np.exp(shape)) - accuracy_S

        low, high = (
            [limit, *np.log(shape)] for limit, shape in zip((0.0, 1.0), self.shape_K2[[0, -1]], strict=True)
        )
        start = np.clip([a, *np.log(self.shape_K2[best])], low, high)
        a, *shape = least_squares(errors, start, bounds=(low, high)).x
        return [float(a), *map(float, np.exp(shape))]


def fit_variants(
    accuracy: "pd.Series[float]", compute: "pd.Series[float]", names: Sequence[str]
) -> list[SaturatingFit]:
    """Return the fit of each variant, to the means over its seeds of accuracy and compute.

    Args:
        accuracy, compute: by variant, seed and step; an evaluation counts if all seeds of the variant have it.

    Raises:
        UserError: no variant has enough evaluations.
    """
    fits = []
    for name in names:
        table = accuracy.xs(name, level="variant").unstack("seed").dropna().sort_index()
        of_seeds = compute.xs(name, level="variant").unstack("seed").loc[table.index]
        fits.append(fit_curve(name, of_seeds.mean(axis=1).to_numpy(float), table.to_numpy(float).T))
    if not any(fit.curve for fit in fits):
        reason = f"{fits[0].variant} has {fits[0].unidentified}"
        raise UserError(f"--fit: {reason}; evaluate more often (evaluation.every)")
    return fits


def fit_curve(variant: str, compute_S: Floats, accuracy_RS: Floats) -> SaturatingFit:
    """Return the fit of the mean over R runs; compute is counted from the first evaluation, whose accuracy is R0."""
    start, mean_S, initial = compute_S[0], accuracy_RS.mean(axis=0), float(accuracy_RS[:, 0].mean())
    fitted = (compute_S > start) & (compute_S - start >= EARLY * (compute_S[-1] - start))
    compute, mean, count = (compute_S - start)[fitted], mean_S[fitted], int(fitted.sum())
    about = (variant, len(accuracy_RS), count, initial)
    if count < MIN_EVALUATIONS:
        reason = f"{plural(count, 'evaluation')} after the first tenth, and the fit needs {MIN_EVALUATIONS}"
        return SaturatingFit(*about, None, None, None, reason, {}, ())
    grid, points, first = _Grid(compute), np.linspace(compute[0], compute[-1], 50), 2 * count // 3
    best = grid.refine(mean, initial)
    curve = tuple(
        zip((points + start).tolist(), saturating_curve(points, initial, *best).tolist(), strict=True)
    )
    early = _Grid(compute[:first]).refine(mean[:first], initial)
    errors = saturating_curve(compute[first:], initial, *early) - mean[first:], mean[first - 1] - mean[first:]
    holdout = {
        f"{which}{name}": float(value)
        for which, of in zip(("", "naive_"), errors, strict=True)
        for name, value in (("rmse", np.sqrt(np.square(of).mean())), ("final", of[-1]))
    }
    noise_SB, reason = _noise(accuracy_RS), "one seed, or seeds with equal values, give no interval"
    if noise_SB is None:
        return SaturatingFit(*about, None, None, None, reason, holdout, curve)
    initial_B = np.clip(initial + noise_SB[0], 0.0, 1.0)
    low, high, replicates_SB = _asymptote_interval(grid, mean, initial, noise_SB[fitted], initial_B)
    wide, errors_B = high - low > MAX_WIDTH, grid.fit(replicates_SB, initial_B)[2]
    if wide or grid.fit(mean[:, None], np.array([initial]))[2] > np.quantile(errors_B, _LEVEL):
        reason = (
            f"any A from {low:.2f} to {high:.2f} fits" if wide else "the accuracies do not follow the curve"
        )
        return SaturatingFit(*about, FittedParameter(None, low, high), None, None, reason, holdout, curve)
    finer = _Grid(compute, finer=3)
    shapes_B2 = finer.shape_K2[finer.fit(replicates_SB, initial_B)[1]]
    tails = np.quantile(shapes_B2, ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2), axis=0)
    inside = (tails[0] > finer.shape_K2[0]) & (tails[1] < finer.shape_K2[-1])
    ends = [
        (low, high),
        *(pair if known else (None, None) for pair, known in zip(tails.T.tolist(), inside, strict=True)),
    ]
    parameters = (FittedParameter(value, *pair) for value, pair in zip(best, ends, strict=True))
    return SaturatingFit(*about, *parameters, "", holdout, curve)


def _asymptote_interval(
    grid: _Grid, mean_S: Floats, initial: float, noise_SB: Floats, initial_B: Floats
) -> tuple[float, float, Floats]:
    """Return the smallest and largest A within 0 and 1 that the data do not reject, and replicates of the best fit.

    An A is rejected if fixing it increases the sum of squared errors by more than in 95% of the replicates of the best
    curve with this A.
    """
    observed_S1, initial_1 = mean_S[:, None], np.array([initial])
    (best_a,), _, (least,) = grid.fit(observed_S1, initial_1)

    def replicates(a: float) -> Floats:
        _, (best,), _ = grid.fit(observed_S1, initial_1, a)
        return (initial + (a - initial) * grid.curves_KS[best])[:, None] + noise_SB

    def is_accepted(a: float) -> bool:
        samples_SB, (error,) = replicates(a), grid.fit(observed_S1, initial_1, a)[2]
        excess_B = grid.fit(samples_SB, initial_B, a)[2] - grid.fit(samples_SB, initial_B)[2]
        return bool(error - least <= np.quantile(excess_B, _LEVEL))

    ends = []
    for end in (0.0, 1.0):
        accepted, rejected = float(best_a), end
        for _ in range(0 if is_accepted(end) else _HALVINGS):
            middle = (accepted + rejected) / 2
            accepted, rejected = (middle, rejected) if is_accepted(middle) else (accepted, middle)
        ends.append(rejected)
    return ends[0], ends[1], replicates(best_a)


def _noise(accuracy_RS: Floats) -> Floats | None:
    """Return errors of the mean over R runs, [S, B]; None for a single run, or equal runs.

    An error is a random combination of the deviations of the runs from their mean, so that the errors along a run stay
    correlated. The scale is that of Student's t: for a mean, the interval is the t-interval, also for few seeds.
    """
    runs, deviations_RS = len(accuracy_RS), accuracy_RS - accuracy_RS.mean(axis=0)
    if runs < 2 or np.abs(deviations_RS).max() < 1e-12:
        return None
    rng = np.random.default_rng(0)
    scales_B = np.sqrt((runs - 1) / rng.chisquare(runs - 1, _REPLICATES))
    weights_RB = rng.standard_normal((runs, _REPLICATES)) * scales_B
    noise_SB: Floats = deviations_RS.T @ weights_RB / np.sqrt(runs * (runs - 1))
    return noise_SB
