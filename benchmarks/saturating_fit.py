"""Error rates of `bandpo report --fit` on simulated runs with a known asymptote.

A row is a number of seeds and the share of the gain A − R0 that the mean curve reaches by the end of the runs. The
columns are shares of the simulated sweeps: those whose interval of A contains the true A, those whose A is reported
("identified"), and the false reports: the interval does not contain A, or the value is off by more than 0.05. The next
column is the share of the 95% intervals of a bootstrap (A of 100 resamples of the seeds) that contain the true A, in a
fourth of the sweeps. The last columns are root mean squares of the error of the last accuracy, predicted from the first
two thirds of the evaluations, by the fit and by holding the last value.

Two rows have curves that the formula does not describe: `logarithm`, which grows forever, and `rise and fall`, a
collapse. Any asymptote that is reported for them is false.

    python -m benchmarks.saturating_fit --sweeps 200
"""

import argparse
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from bandpo_cli.reports.saturating_fit import EARLY, SaturatingFit, best_fit, fit_curve

Floats = NDArray[np.float64]

INITIAL, ASYMPTOTE, EXPONENT = 0.25, 0.6, 1.7
PROBLEMS, SAMPLES = 128, 16
SPREAD_OF_ASYMPTOTES, SPREAD_OF_MIDPOINTS = (
    0.015,
    0.1,
)  # standard deviations over seeds, of A and of log C_mid
TOLERANCE = 0.05


def saturating_curve(compute: Floats, initial: float, a: float, b: float, c_mid: float) -> Floats:
    """Return the accuracy after `compute`, which is positive."""
    return initial + (a - initial) / (1 + (c_mid / compute) ** b)


def midpoint_for(reached: float) -> float:
    """Return the midpoint of the curve that reaches this share of its gain at compute 1."""
    return float(((1 - reached) / reached) ** (1 / EXPONENT))


def sample_scores(means: Floats, difficulty: Floats, rng: np.random.Generator) -> Floats:
    """Return measured accuracies: SAMPLES binomial answers per problem, of problems that differ in difficulty.

    The logits of the problems are shifted together until their mean probability is the mean accuracy.
    """
    low, high = np.full(len(means), -20.0), np.full(len(means), 20.0)
    for _ in range(40):
        middle = (low + high) / 2
        too_low = (1 / (1 + np.exp(-(difficulty + middle[:, None])))).mean(axis=1) < means
        low, high = np.where(too_low, middle, low), np.where(too_low, high, middle)
    chances = 1 / (1 + np.exp(-(difficulty + middle[:, None])))
    return rng.binomial(SAMPLES, chances).mean(axis=1) / SAMPLES


def simulate(curve: Callable[[float, float], Floats], seeds: int, rng: np.random.Generator) -> Floats:
    """Return the accuracies of a variant, [seeds, evaluations], the initial one first.

    `curve` returns the expected accuracies from normal deviates of the asymptote and of the midpoint.
    """
    chances = np.clip(rng.beta(INITIAL, 1 - INITIAL, PROBLEMS), 1e-4, 1 - 1e-4)
    difficulty = np.log(chances / (1 - chances))
    deviates = rng.standard_normal((seeds, 2))
    means = [np.r_[INITIAL, curve(float(of_a), float(of_midpoint))] for of_a, of_midpoint in deviates]
    return np.array([sample_scores(of_seed, difficulty, rng) for of_seed in means])


def curves(compute: Floats) -> dict[str, tuple[Callable[[float, float], Floats], float | None]]:
    """Return the rows of the table: expected accuracies at `compute` from the deviates of a seed, and the true A."""

    def saturating(reached: float) -> Callable[[float, float], Floats]:
        def curve(of_asymptote: float, of_midpoint: float) -> Floats:
            asymptote = ASYMPTOTE + SPREAD_OF_ASYMPTOTES * of_asymptote
            midpoint = midpoint_for(reached) * np.exp(SPREAD_OF_MIDPOINTS * of_midpoint)
            return saturating_curve(compute, INITIAL, asymptote, EXPONENT, midpoint)

        return curve

    def logarithm(of_gain: float, _: float) -> Floats:
        return INITIAL + (0.1 + 0.005 * of_gain) * np.log1p(20 * compute)

    def collapse(of_gain: float, _: float) -> Floats:
        return INITIAL + (1.2 + 0.05 * of_gain) * compute * (1 - 0.8 * compute)

    shares = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
    known = {f"{100 * share:.0f}%": (saturating(share), ASYMPTOTE) for share in shares}
    return {**known, "logarithm": (logarithm, None), "rise and fall": (collapse, None)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweeps", type=int, default=200, help="simulated sweeps per row")
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 5])
    parser.add_argument(
        "--evaluations", type=int, default=20, help="evaluations per run, without the initial one"
    )
    arguments = parser.parse_args()
    compute = np.arange(1, arguments.evaluations + 1) / arguments.evaluations
    headings = (
        "seeds", "gain reached", "interval contains A", "identified", "interval misses A", "off by > 0.05",
        "bootstrap contains A", "error of the last value, fit", "holding",
    )  # fmt: skip
    print(f"| {' | '.join(headings)} |")
    print("| --- " * len(headings) + "|")
    for seeds in arguments.seeds:
        for name, (curve, asymptote) in curves(compute).items():
            rng = np.random.default_rng(0)
            sweeps = [simulate(curve, seeds, rng) for _ in range(arguments.sweeps)]
            fits = [fit_curve(name, np.r_[0.0, compute], accuracies) for accuracies in sweeps]
            intervals = [bootstrap(compute, accuracies, rng) for accuracies in sweeps[::4] if asymptote]
            print(f"| {seeds} | {name} | {row(fits, intervals, asymptote)} |", flush=True)


def bootstrap(compute: Floats, accuracies: Floats, rng: np.random.Generator) -> Floats:
    """Return the 95% percentile interval of A over resamples of the seeds."""
    fitted, asymptotes = compute >= EARLY, []
    for _ in range(100):
        mean = accuracies[rng.integers(len(accuracies), size=len(accuracies))].mean(axis=0)
        asymptotes.append(best_fit(compute[fitted], mean[1:][fitted], mean[0])[0][0])
    return np.quantile(asymptotes, (0.025, 0.975))


def row(fits: Sequence[SaturatingFit], bootstraps: Sequence[Floats], asymptote: float | None) -> str:
    """Return the cells of a row; `asymptote` is the true one, None if the curve has none."""
    intervals = np.array([(fit.asymptote.low, fit.asymptote.high) for fit in fits])
    values = np.array([np.nan if fit.asymptote.value is None else fit.asymptote.value for fit in fits])
    identified = ~np.isnan(values)
    last = [(fit.holdout["final"], fit.holdout["naive_final"]) for fit in fits]
    errors = [f"{error:.3f}" for error in np.sqrt(np.square(last).mean(axis=0))]
    if asymptote is None:
        return " | ".join(["–", *[percent(identified)] * 3, "–", *errors])
    contains = (intervals[:, 0] <= asymptote) & (asymptote <= intervals[:, 1])
    far = np.nan_to_num(np.abs(values - asymptote)) > TOLERANCE
    of_bootstrap = np.array([low <= asymptote <= high for low, high in bootstraps])
    shares = [contains, identified, identified & ~contains, far, of_bootstrap]
    return " | ".join([*map(percent, shares), *errors])


def percent(hits: NDArray[np.bool_]) -> str:
    """Return the share of true values."""
    return f"{100 * hits.mean():.1f}%"


if __name__ == "__main__":
    main()
