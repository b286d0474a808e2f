"""Saturating curve of held-out accuracy against compute: R(C) = R0 + (A − R0) / (1 + (C_mid/C)^B).

It is the curve of ScaleRL (Khatri et al. 2025, arXiv 2510.13786): R0 is the initial accuracy, A the asymptote, C_mid
the compute at half the gain, B > 0 the exponent. The paper leaves out the first 1,500 GPU hours of a run; here it is
the first tenth of the compute. A short run does not determine A, since curves with different A fit equally well. An
interval therefore consists of all values that a test over seeds does not reject, and A has a value only if its interval
is narrow. A bootstrap of three to five seeds gives intervals that are too narrow (docs/reports.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import least_squares

from bandpo_cli.errors import UserError, plural
from bandpo_cli.metric_names import Axis

Floats = NDArray[np.float64]

EARLY = 0.1
"""Share of the compute whose evaluations are left out: a warm-up follows another curve."""

MIN_EVALUATIONS = 9
"""Fewest evaluations in a fit: two thirds of them, on which the hold-out error is based, are twice the parameters."""

MAX_WIDTH = 0.1
"""Largest width of the interval of an asymptote that has a value."""

_LEVEL, _HALVINGS = 0.95, 10
_LIMITS = np.array([(0.0, 1.0), np.log((0.4, 6.0)), np.log((0.05, 30.0))])
"""Range that is searched: A, log B and log C_mid, with C_mid in units of the largest compute."""


@dataclass(frozen=True)
class FittedParameter:
    """A parameter with its 95% interval, whose ends are NaN (null in JSON) if it leaves the range searched."""

    value: float | None
    low: float
    high: float

    def text(self, pattern: str) -> str:
        """Return the value and its interval in a format, such as `0.601 (0.588 – 0.612)`."""
        if np.isnan(self.low):
            return f"{self.value:{pattern}}"
        return f"{self.value:{pattern}} ({self.low:{pattern}} – {self.high:{pattern}})"


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
        observed: compute and accuracy of all evaluations, means over the seeds.
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
    observed: Sequence[tuple[float, float]]

    HEADINGS: ClassVar = (
        "evaluations", "R0", "asymptote A", "exponent B", "midpoint C_mid", "RMSE, fit", "RMSE, holding",
        "error of the last, fit", "error of the last, holding",
    )  # fmt: skip
    """Headings of `cells` in tables."""

    @property
    def cells(self) -> list[str]:
        """The row of the fit in tables."""
        cells = [
            f"{self.evaluations}",
            f"{self.initial:.3f}",
            f"not identified: {self.unidentified}",
            "–",
            "–",
        ]
        if self.asymptote is not None and self.exponent is not None and self.midpoint is not None:
            cells[2:] = [self.asymptote.text(".3f"), self.exponent.text(".2f"), self.midpoint.text(".3g")]
        patterns = {"rmse": ".3f", "naive_rmse": ".3f", "final": "+z.3f", "naive_final": "+z.3f"}
        return cells + [
            f"{self.holdout[name]:{text}}" if self.holdout else "–" for name, text in patterns.items()
        ]


def fit_caption(axis: Axis) -> str:
    """Return the caption of the table of fits."""
    return (
        f"The curve R0 + (A − R0) / (1 + (C_mid/C)^B) (arXiv 2510.13786) of the compute C, in {axis.label}, was fitted "
        "by least squares to the held-out accuracies after the first tenth of C; R0 is the initial accuracy. Intervals "
        f"are 95% profile intervals over seeds, and A has a value if its interval is at most {MAX_WIDTH:g} wide. "
        "Hold-out errors: the last third of the evaluations, predicted from the first two thirds by the fit, and by "
        "holding the last accuracy"
    )


def fit_variants(
    accuracy: "pd.Series[float]", compute: "pd.Series[float]", names: Sequence[str]
) -> list[SaturatingFit]:
    """Return the fit of each variant, to the means over its seeds of accuracy and compute, by variant, seed and step.

    An evaluation counts if all seeds of the variant have it. Raises UserError if no variant has enough evaluations.
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
    """Return the fit of the mean over R runs; compute is counted from the first of S evaluations, which gives R0."""
    start, initial = float(compute_S[0]), float(accuracy_RS[:, 0].mean())
    largest = float(compute_S[-1]) - start
    fitted = (compute_S > start) & (compute_S - start >= EARLY * largest)
    mean_S, count = accuracy_RS.mean(axis=0), int(fitted.sum())
    observed = [*zip(compute_S.tolist(), mean_S.tolist(), strict=True)]
    fit = SaturatingFit(variant, len(accuracy_RS), count, initial, None, None, None, "", {}, (), observed)
    if count < MIN_EVALUATIONS:
        reason = f"{plural(count, 'evaluation')} after the first tenth, and the fit needs {MIN_EVALUATIONS}"
        return replace(fit, unidentified=reason)
    compute, mean = (compute_S[fitted] - start) / largest, mean_S[fitted]
    best, least = best_fit(compute, mean, initial)
    points, first = np.linspace(compute[0], 1.0, 50), 2 * count // 3
    curve = zip(start + largest * points, _curve_and_slopes(best, points, initial)[0], strict=True)
    fit = replace(fit, curve=[(float(x), float(y)) for x, y in curve])
    early, _ = best_fit(compute[:first], mean[:first], initial)
    predicted = _curve_and_slopes(early, compute[first:], initial)[0]
    for name, errors in (("", predicted - mean[first:]), ("naive_", mean[first - 1] - mean[first:])):
        fit.holdout[f"{name}rmse"] = float(np.sqrt(np.square(errors).mean()))
        fit.holdout[f"{name}final"] = float(errors[-1])
    if np.ptp(accuracy_RS, axis=0).max() < 1e-12:
        return replace(fit, unidentified="one seed, or seeds with equal values, give no interval")
    profile = _Profile(compute, accuracy_RS[:, fitted], accuracy_RS[:, 0], best, least)
    low, high = profile.interval(0)
    fit = replace(fit, asymptote=FittedParameter(None, low, high))
    if high - low > MAX_WIDTH:
        return replace(fit, unidentified=f"any A from {low:.2f} to {high:.2f} fits")
    if not profile.fits():
        return replace(fit, unidentified="the accuracies do not follow the curve")
    parameters = [FittedParameter(float(best[0]), low, high)]
    for place, unit in ((1, 1.0), (2, largest)):
        low, high = profile.interval(place)
        if low == _LIMITS[place, 0] or high == _LIMITS[place, 1]:
            low = high = np.nan
        parameters.append(FittedParameter(*(unit * float(np.exp(log)) for log in (best[place], low, high))))
    asymptote, exponent, midpoint = parameters
    return replace(fit, asymptote=asymptote, exponent=exponent, midpoint=midpoint)


def _curve_and_slopes(parameters: Floats, compute_S: Floats, initial: float) -> tuple[Floats, Floats]:
    """Return the accuracies for A, log B and log C_mid, [S], and their derivatives, [S, 3]."""
    a, exponent, logs_S = parameters[0], np.exp(parameters[1]), parameters[2] - np.log(compute_S)
    share_S = 1 / (1 + np.exp(exponent * logs_S))
    slope_S = (initial - a) * share_S * (1 - share_S) * exponent
    return initial + (a - initial) * share_S, np.stack([share_S, slope_S * logs_S, slope_S], axis=1)


def best_fit(
    compute_S: Floats, mean_S: Floats, initial: float, fixed: int | None = None, value: float = 0.0
) -> tuple[Floats, float]:
    """Return A, log B and log C_mid of the best fit, and its sum of squared errors; one of them may be fixed.

    The search starts from the best point of a grid, with the best A for each B and C_mid.
    """
    logs = [np.linspace(low, high, count) for (low, high), count in zip(_LIMITS[1:], (9, 17), strict=True)]
    starts = np.array([(1.0, *point) for point in product(*logs)])
    if fixed is not None:
        starts[:, fixed] = value if fixed else 1.0
    shares_KS = np.array([_curve_and_slopes(start, compute_S, 0.0)[0] for start in starts])
    rises_K = shares_KS @ (mean_S - initial) / np.square(shares_KS).sum(axis=1)
    starts[:, 0] = value if fixed == 0 else np.clip(initial + rises_K, 0.0, 1.0)
    curves_KS = initial + (starts[:, :1] - initial) * shares_KS
    start = starts[np.square(curves_KS - mean_S).sum(axis=1).argmin()]
    free = [place for place in range(3) if place != fixed]

    def evaluate(part: Floats) -> tuple[Floats, Floats]:
        parameters = start.copy()
        parameters[free] = part
        return _curve_and_slopes(parameters, compute_S, initial)

    best = least_squares(
        lambda part: evaluate(part)[0] - mean_S,
        start[free],
        lambda part: evaluate(part)[1][:, free],
        bounds=_LIMITS[free].T,
    )
    start[free] = best.x
    return start, 2 * float(best.cost)


class _Profile:
    """Tests of values of a parameter against the best fit, over R seeds.

    Fixing a parameter at its true value increases the sum of squared errors by the square of the mean error along one
    direction: the derivative by the parameter, less what the other parameters can explain. Each seed has an error along
    it, and the limit is that of Student's t for their mean. The errors along a run may be correlated.
    """

    def __init__(
        self, compute_S: Floats, accuracy_RS: Floats, initial_R: Floats, best: Floats, least: float
    ) -> None:
        self._compute_S, self._accuracy_RS, self._initial_R = compute_S, accuracy_RS, initial_R
        self._mean_S, self._initial = accuracy_RS.mean(axis=0), float(initial_R.mean())
        self._best, self._least = best, least
        self._squared_t = stats.t.ppf((1 + _LEVEL) / 2, len(accuracy_RS) - 1) ** 2 / len(accuracy_RS)

    def _directions(self, parameters: Floats, last: int = 2) -> tuple[Floats, Floats]:
        """Return directions that span the derivatives, that of parameter `last` in the last column, and errors."""
        slopes_S3 = _curve_and_slopes(parameters, self._compute_S, self._initial)[1]
        slopes = slopes_S3[:, [*(place for place in range(3) if place != last), last]]
        directions = np.linalg.qr(slopes / np.maximum(np.linalg.norm(slopes, axis=0), 1e-200))[0]
        return directions, self._accuracy_RS - np.outer(self._initial_R, 1 - slopes_S3[:, 0])

    def _accepts(self, place: int, value: float) -> bool:
        parameters, error = best_fit(self._compute_S, self._mean_S, self._initial, place, value)
        directions, accuracy_RS = self._directions(parameters, place)
        return bool(error - self._least <= self._squared_t * (accuracy_RS @ directions[:, -1]).var(ddof=1))

    def interval(self, place: int) -> tuple[float, float]:
        """Return the smallest and largest value of a parameter, within the range searched, that is not rejected."""
        ends = []
        for end in _LIMITS[place]:
            accepted, rejected = self._best[place], end
            for _ in range(0 if self._accepts(place, end) else _HALVINGS):
                middle = (accepted + rejected) / 2
                if self._accepts(place, middle):
                    accepted = middle
                else:
                    rejected = middle
            ends.append(float(rejected))
        return ends[0], ends[1]

    def fits(self) -> bool:
        """Return whether the errors of the best fit are within the variation of the seeds, along all directions."""
        directions, accuracy_RS = self._directions(self._best)
        others_RS = accuracy_RS - accuracy_RS @ directions @ directions.T
        return bool(self._least <= self._squared_t * others_RS.var(axis=0, ddof=1).sum())
