"""Error rates of the verdicts of `bandpo report` and `bandpo eval compare`, by simulation with known truth.

    python benchmarks/verdicts.py [--simulations 1000]

Seeds: a variant and its baseline have seed effects with a standard deviation of 0.01/√2 each, so that a difference has
0.01. They are normal; or skewed (gamma of shape 4, skewness −1: some seeds end low); or only the variant's vary, by an
exponential distribution (skewness −2: in one variant single seeds collapse). Problems: success rates come from a Beta
distribution; the second model has new rates on a fifth of the problems, and is raised to the true difference by solving
a share of the problems always.

| column | |
|---|---|
| mean, difference | coverage of the 95% interval of a variant's mean, and of a paired difference |
| false better/worse | without a true difference: share of `better` or `worse`; of five variants at once: any of them |
| false equivalent | a true difference of the margin: share of `equivalent` or `by less than` |
| power | a true difference of the detectable size: share of `better` |
| estimate | median of the estimated over the true detectable size, and the middle 80% of the estimates |
| decided | of the undecided: share that the stated number of further seeds decides, without a difference and with a
  difference of the margin; with more than 2,000 further seeds it is not tried |
| second look | without a true difference: share of `better` or `worse` if the undecided get their further seeds |
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import ttest_1samp
from shared import command_line

from bandpo_cli.evaluation.verdicts import ALPHA, MARGIN, Conclusion, conclude, holm, smallest_effect
from bandpo_cli.experiments.eval_comparison import compare_records
from bandpo_cli.reports.compare_variants import estimate, paired_test

Floats = NDArray[np.float64]
Rng = np.random.Generator

SPREAD = 0.01
"""Standard deviation between seeds of the difference of two variants."""
MAX_FURTHER = 2000


def normal(rng: Rng, *shape: int) -> Floats:
    """Return standard normal seed effects."""
    return rng.standard_normal(shape)


def skewed(rng: Rng, *shape: int) -> Floats:
    """Return seed effects with mean 0, variance 1 and skewness −1."""
    return (4 - rng.gamma(4, size=shape)) / 2


def collapsing(rng: Rng, *shape: int) -> Floats:
    """Return seed effects with mean 0, variance 1 and skewness −2."""
    return 1 - rng.exponential(size=shape)


SHAPES: dict[str, tuple[Callable[..., Floats], bool]] = {
    "normal": (normal, True), "skewed": (skewed, True), "one variant skewed": (collapsing, False),
}  # fmt: skip
"""Distributions of the seed effects, and whether both variants have them."""


def differences(shape: str, rng: Rng, count: int, seeds: int, truth: float) -> Floats:
    """Return [count, seeds] differences of a variant from its baseline with this true mean."""
    effects, both = SHAPES[shape]
    first, second = effects(rng, count, seeds), effects(rng, count, seeds)
    return truth + SPREAD * ((first - second) / math.sqrt(2) if both else first)


def verdict_of(changes: Floats) -> Conclusion:
    """Return the verdict of a report on one variant."""
    test = paired_test(changes)
    assert test is not None
    return conclude(changes, test.p)


def is_direction(conclusion: Conclusion) -> bool:
    """Return whether a verdict is `better` or `worse`."""
    return conclusion.verdict.startswith(("better", "worse"))


def is_equivalent(conclusion: Conclusion) -> bool:
    """Return whether a verdict says that the difference is within the margin."""
    return conclusion.verdict.startswith("equivalent") or "by less than" in conclusion.verdict


def covers(interval: tuple[float | None, float | None], truth: float) -> bool:
    """Return whether an interval contains the truth."""
    low, high = interval
    return low is not None and high is not None and low <= truth <= high


def simulate_seeds(shape: str, seeds: int, count: int, rng: Rng) -> dict[str, float]:
    """Return the error rates over `count` sweeps with this number of seeds."""
    effects = SHAPES[shape][0](rng, count, seeds)
    means = [estimate(0.5 + SPREAD / math.sqrt(2) * row, (0, 1)) for row in effects]
    detectable = SPREAD * smallest_effect(seeds)
    rows = {truth: differences(shape, rng, count, seeds, truth) for truth in (0.0, MARGIN, detectable)}
    verdicts = {truth: [verdict_of(row) for row in changes] for truth, changes in rows.items()}
    second = {truth: second_looks(shape, rng, rows[truth], verdicts[truth], truth) for truth in (0.0, MARGIN)}
    decided = {
        truth: np.mean(
            [not conclusion.verdict.startswith("undecided") for conclusion in found.values()] or [math.nan]
        )
        for truth, found in second.items()
    }
    tests = [paired_test(row) for row in rows[0.0]]
    estimates = [(conclusion.detectable or math.nan) / detectable for conclusion in verdicts[detectable]]
    return {
        "mean": np.mean([covers((mean.low, mean.high), 0.5) for mean in means if mean is not None]),
        "difference": np.mean([covers((t.change.low, t.change.high), 0.0) for t in tests if t is not None]),
        "false better/worse": np.mean([is_direction(conclusion) for conclusion in verdicts[0.0]]),
        "of five": np.mean([any_of_five(shape, rng, seeds) for _ in range(count)]),
        "false equivalent": np.mean([is_equivalent(conclusion) for conclusion in verdicts[MARGIN]]),
        "power": np.mean([conclusion.verdict.startswith("better") for conclusion in verdicts[detectable]]),
        **dict(zip(("estimate", "10%", "90%"), np.quantile(estimates, [0.5, 0.1, 0.9]), strict=True)),
        "decided, 0": decided[0.0],
        "decided, margin": decided[MARGIN],
        "second look": np.mean(
            [
                is_direction(second[0.0].get(index, conclusion))
                for index, conclusion in enumerate(verdicts[0.0])
            ]
        ),
    }


def second_looks(
    shape: str, rng: Rng, rows: Floats, verdicts: Sequence[Conclusion], truth: float
) -> dict[int, Conclusion]:
    """Return the verdicts on the undecided rows with the further seeds that each asks for, by index."""
    second = {}
    for index, (row, conclusion) in enumerate(zip(rows, verdicts, strict=True)):
        if conclusion.further is not None and conclusion.further <= MAX_FURTHER:
            second[index] = verdict_of(np.append(row, differences(shape, rng, 1, conclusion.further, truth)))
    return second


def any_of_five(shape: str, rng: Rng, seeds: int) -> bool:
    """Return whether a sweep of five variants as good as their baseline finds one better or worse, after Holm."""
    effects, both = SHAPES[shape]
    values = effects(rng, 6, seeds)
    rows = values[1:] - (values[0] if both else 0.0)
    return min(holm(ttest_1samp(rows, 0.0, axis=1).pvalue.tolist())) <= ALPHA


def simulate_problems(
    beta: tuple[float, float], problems: int, n: int, count: int, rng: Rng
) -> dict[str, float]:
    """Return the error rates over `count` comparisons of two evaluations with n completions per problem."""
    detectable = 0.0
    for _ in range(6):  # a larger difference has a larger spread
        a, b = evaluations(beta, 200_000, n, detectable, rng)
        detectable = float((b - a).std()) * smallest_effect(problems)
    results = {
        truth: [_compare(*evaluations(beta, problems, n, truth, rng)) for _ in range(count)]
        for truth in (0.0, MARGIN, detectable)
    }
    null = results[0.0]
    intervals = [(change.low, change.high) for change, _ in null]
    return {
        "difference": np.mean([covers(interval, 0.0) for interval in intervals]),
        "false better/worse": np.mean([is_direction(conclusion) for _, conclusion in null]),
        "false equivalent": np.mean([is_equivalent(conclusion) for _, conclusion in results[MARGIN]]),
        "detectable": detectable,
        "power": np.mean([conclusion.verdict.startswith("better") for _, conclusion in results[detectable]]),
    }


def evaluations(
    beta: tuple[float, float], problems: int, n: int, truth: float, rng: Rng
) -> tuple[Floats, Floats]:
    """Return the shares of correct completions of two models on the same problems; B is better by `truth`."""
    a = rng.beta(*beta, problems)
    b = np.where(rng.random(problems) < 0.2, rng.beta(*beta, problems), a)
    share = truth * sum(beta) / beta[1]  # of the problems; each gains 1 − p, whose mean is b/(a+b)
    b = np.where(rng.random(problems) < share, 1.0, b)
    return rng.binomial(n, a) / n, rng.binomial(n, b) / n


def _compare(a: Floats, b: Floats) -> tuple[tuple[float, float, float], Conclusion]:
    """Return the difference of mean@n with its interval, and the conclusion, of `bandpo eval compare`."""
    records = (
        {"sets": {"s": {"by_problem": {str(i): {"mean_at_1": float(x)} for i, x in enumerate(values)}}}}
        for values in (a, b)
    )
    metric = compare_records(*records)["s"].metrics["mean"]
    return metric.change, metric.conclusion


def print_table(first: str, rows: dict[str, dict[str, float]]) -> None:
    """Print rows of numbers as a Markdown table."""
    columns = [*next(iter(rows.values()))]
    print(f"| {first} | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in row.values())} |")
    print(flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = command_line(__doc__)
    parser.add_argument("--simulations", type=int, default=1000)
    count = parser.parse_args(arguments).simulations
    rng = np.random.default_rng(0)
    print_table(
        "seed effects, seeds",
        {
            f"{shape}, {seeds}": simulate_seeds(shape, seeds, count, rng)
            for shape in SHAPES
            for seeds in (3, 5, 8)
        },
    )
    rng = np.random.default_rng(1)
    cases = [
        (beta, *size) for beta in ((0.5, 0.5), (0.1, 2)) for size in ((30, 16), (128, 8), (500, 4), (2000, 4))
    ]
    print_table(
        "Beta, problems × n",
        {f"{beta}, {size} × {n}": simulate_problems(beta, size, n, count, rng) for beta, size, n in cases},
    )


if __name__ == "__main__":
    main()
