"""Scores of an evaluation set: the definition of each metric, for `bandpo eval` and for training alike."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import comb, fsum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, stdtrit

from bandpo_cli.errors import ConfigError, excerpt
from bandpo_cli.storage.tables import EvalRow
from bandpo_cli.types import UNGRADED_VERDICTS

FloatArray = NDArray[np.float64]

LEVEL = 0.95
"""Coverage of the intervals."""
RESAMPLES = 10_000
"""Bootstrap resamples per interval."""
_BATCH_VALUES = 4_000_000  # float64 values that a bootstrap holds in memory at a time, beside its input
_ROUNDING = 1e-12  # relative; sums of the same numbers in another order differ by less


class Interval(NamedTuple):
    """A mean and the ends of its interval; the ends are NaN where no interval can be computed."""

    value: float
    low: float
    high: float


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return pass@k, the unbiased estimate 1 − C(n−c, k)/C(n, k) of P(at least one of k is correct).

    Source: arXiv 2107.03374, eq. 1.

    Args:
        n: completions of the problem.
        correct: correct completions, c.
    """
    return 1.0 - comb(n - correct, k) / comb(n, k)


def maj_at_k(votes: Sequence[str | None], correct: Sequence[float], k: int) -> float:
    """Return maj@k: the probability that a majority vote among k of n completions is correct.

    The k completions are sampled without replacement. The most frequent answer wins (arXiv 2203.11171); of equally
    frequent answers each wins with the same probability. A completion without an answer (None) does not vote; if no
    completion votes, the result is not correct. The value is exact up to rounding, not a Monte Carlo estimate.

    Args:
        votes: [n], the answer of each completion; equal answers have equal text.
        correct: [n], 1 for a correct completion, 0 for a wrong one. An answer that was graded differently in different
            completions counts by the mean of its grades.
    """
    n = len(votes)
    sizes, rights = Counter(vote for vote in votes if vote is not None), defaultdict[str, float](float)
    for vote, right in zip(votes, correct, strict=True):
        if vote is not None:
            rights[vote] += right
    abstentions = n - sizes.total()
    terms = []
    for vote, size in sizes.items():
        if rights[vote]:
            others = sorted(other_size for other, other_size in sizes.items() if other != vote)
            terms.append(rights[vote] / size * _win_probability(size, tuple(others), abstentions, k))
    return min(fsum(terms), 1.0)  # not `sum`: its rounding depends on the order of the completions


def mean_intervals(values_FP: ArrayLike, seed: int = 0, resamples: int = RESAMPLES) -> list[Interval]:
    """Return the mean over P problems of each of F metrics with its 95% interval.

    The interval is the bias-corrected and accelerated bootstrap (Efron 1987; scipy.stats.bootstrap) over problems,
    widened for few problems (`_nominal_level`). It estimates how far the metric could change with other problems of
    the same kind and other completions, since both vary from problem to problem. All metrics use the same resamples. A
    single problem, and a metric with the same value for every problem, have no interval (NaN): all their resamples are
    equal.

    Measured coverage with success rates p ~ Beta(½, ½) and Beta(0.3, 1.5), 30 and 128 problems, 8 and 16 completions:
    94% to 97% of the simulated evaluations. With few problems that are rarely solved, it is too narrow: 91% for mean@n
    and 80% for maj@4 with 30 problems and p ~ Beta(0.1, 2); with 128 problems it is 95% again.

    Args:
        values_FP: [F, P], finite.
        seed: seed of the resampling; the same completions give the same interval.
        resamples: number of bootstrap resamples.
    """
    values = np.asarray(values_FP, dtype=np.float64)
    means = values.mean(axis=1)
    smallest, largest = values.min(axis=1), values.max(axis=1)
    low, high = np.full((2, len(values)), np.nan)
    varied = largest - smallest > _ROUNDING * np.abs(values).max(axis=1)
    if varied.any():
        centre, spread = means[varied], (largest - smallest)[varied]
        from scipy.stats import bootstrap  # 0.6 s to import, and not needed where all values are equal

        result = bootstrap(
            ((values[varied] - centre[:, None]) / spread[:, None],),
            _mean,
            axis=1,
            vectorized=True,
            n_resamples=resamples,
            confidence_level=_nominal_level(values.shape[1]),
            method="BCa",
            batch=max(1, _BATCH_VALUES // values[varied].size),
            rng=np.random.default_rng(seed),
        )
        ends = centre + spread * np.stack(result.confidence_interval)
        low[varied], high[varied] = np.clip(ends, smallest[varied], largest[varied])
    return [Interval(*map(float, row)) for row in zip(means, low, high, strict=True)]


def _nominal_level(problems: int) -> float:
    """Return the confidence level to pass to the bootstrap so that its coverage is `LEVEL`.

    The standard deviation of resamples of P values is too small by √((P−1)/P), and their quantiles are those of a
    normal distribution instead of Student's t; the level corrects for both (Hesterberg 2015, arXiv 1411.5279,
    "expanded percentile interval"). It is 0.962 for 30 problems and 0.953 for 128.
    """
    quantile = stdtrit(problems - 1, (1 + LEVEL) / 2) * math.sqrt(problems / (problems - 1))
    level = float(1 - 2 * ndtr(-quantile))
    return min(level, 1 - _ROUNDING)  # with two problems it would round to 1, whose quantile is infinite


def _mean(values: NDArray[np.float64], axis: int) -> Any:
    """Return the mean, exactly 0 where it differs from 0 by rounding alone.

    BCa counts the resamples below the sample's mean, and those equal to it by halves. With shares like 3/16 many are
    equal; without this, rounding would decide on which side they are counted.
    """
    means = np.mean(values, axis=axis)
    return np.where(np.abs(means) < _ROUNDING, 0.0, means)


@lru_cache(maxsize=4096)
def _win_probability(size: int, others: tuple[int, ...], abstentions: int, k: int) -> float:
    """Return the probability that an answer given by `size` completions wins the vote among k.

    `others` are the numbers of completions of each other answer, sorted; `abstentions` have no answer. If the answer
    has m votes, every other answer has x < m votes, or m votes and ties with it; of t + 1 tied answers each wins with
    the probability 1/(1+t). `ways` counts the ways to choose the k − m other completions, by the number of ties and of
    completions chosen; the number of votes of each rival is added in turn.
    """
    n = size + sum(others) + abstentions
    # Binomial weights with p = k/n instead of binomial coefficients: they do not overflow, and the factors cancel.
    weights = {s: _binomial(s, k / n) for s in {size, *others}}
    total = 0.0
    for m in range(1, min(size, k) + 1):
        rivals, left = [s for s in others if s >= m], k - m
        ways = np.zeros((left // m + 1, left + 1))  # [ties, other completions]
        free = _binomial(n - size - sum(rivals), k / n)[: left + 1]
        ways[0, : len(free)] = free
        for rival in rivals:
            before, ways = ways, np.zeros_like(ways)
            for x in range(min(m, left + 1)):
                ways[:, x:] += weights[rival][x] * before[:, : left + 1 - x]
            if m <= left:
                ways[1:, m:] += weights[rival][m] * before[:-1, : left + 1 - m]
        total += float(weights[size][m] * (ways[:, left] / np.arange(1, len(ways) + 1)).sum())
    return total / float(_binomial(n, k / n)[k])


@lru_cache(maxsize=4096)
def _binomial(n: int, p: float) -> FloatArray:
    """Return the binomial probabilities of 0 … n successes, [n + 1]."""
    from scipy.stats import binom

    return np.asarray(binom.pmf(np.arange(n + 1), n, p), dtype=np.float64)


MAX_BINS = 15
"""Largest number of bins of `success_histogram` between never and always."""

_MIN_BINS, _USUAL_BINS = 5, 10


@dataclass(frozen=True)
class Scores:
    """The scores of one evaluation set.

    Attributes:
        fewest, most: number of completions per problem; they can differ for stored completions.
        metrics: mean over problems with its interval, by name (`mean_at_16`, `pass_at_4`, ...).
        by_problem: the value of each problem, by problem id and metric name.
        verdicts: number of completions per verdict, most frequent first.
        questions: the beginning of each question, by problem id.
    """

    fewest: int
    most: int
    metrics: dict[str, Interval]
    by_problem: dict[str, dict[str, float]]
    verdicts: dict[str, int]
    questions: dict[str, str] = field(default_factory=dict)

    @property
    def completions(self) -> int:
        """Return the number of completions of all problems."""
        return sum(self.verdicts.values())

    @property
    def graded(self) -> bool:
        """Return whether any completion was graded."""
        return not UNGRADED_VERDICTS.issuperset(self.verdicts)

    @property
    def nonbinary_rewards(self) -> bool:
        """Return whether there are other rewards than 1 for a correct answer and 0 for any other."""
        mean, *others = self.metrics
        return "reward" in others and any(row["reward"] != row[mean] for row in self.by_problem.values())

    def as_json(self) -> dict[str, Any]:
        """Return the scores as stored in `eval.json`."""
        return {
            "problems": len(self.by_problem),
            "completions": self.completions,
            "completions_per_problem": [self.fewest, self.most],
            "metrics": {name: interval._asdict() for name, interval in self.metrics.items()},
            "verdicts": self.verdicts,
            "questions": self.questions,
            "by_problem": self.by_problem,
        }


def score(label: str, rows: Iterable[EvalRow], k: Sequence[int]) -> Scores:
    """Return the scores of the graded completions of one evaluation set, in any order.

    A metric that needs a column (length, finish reason) is left out if any completion lacks it, the mean reward if no
    completion has a reward.

    Args:
        label: name of the set, for error messages.
        k: values of k for pass@k and maj@k.

    Raises:
        ConfigError: there are no completions, or a problem has fewer completions than the largest k.
    """
    problems: dict[str, list[EvalRow]] = {}
    for row in rows:
        problems.setdefault(row["problem_id"], []).append(row)
    if not problems:
        raise ConfigError(f"'{label}' has no completions to score")
    sizes = [len(completions) for completions in problems.values()]
    fewest, most = min(sizes), max(sizes)
    if max(k, default=1) > fewest:
        short = next(id_ for id_, completions in problems.items() if len(completions) == fewest)
        raise ConfigError(
            f"--k {max(k)}: every problem needs at least as many completions, and {short} of '{label}' has {fewest}; "
            f"use k of at most {fewest}"
        )
    n = str(fewest) if fewest == most else "n"
    every_row = [*itertools.chain.from_iterable(problems.values())]
    columns = "length", "finish_reason"
    known = {column for column in columns if all(row.get(column) is not None for row in every_row)}
    known |= {"reward"} if any(row.get("reward") is not None for row in every_row) else set()
    by_problem = {id_: _problem_metrics(rows_G, n, k, known) for id_, rows_G in problems.items()}
    names = list(next(iter(by_problem.values())))
    intervals = mean_intervals([[values[name] for values in by_problem.values()] for name in names])
    verdicts = dict(Counter(row["verdict"] for row in every_row).most_common())
    questions = {id_: excerpt(rows_G[0]["question"] or "", 120) for id_, rows_G in problems.items()}
    return Scores(fewest, most, dict(zip(names, intervals, strict=True)), by_problem, verdicts, questions)


def metric_record(scores: Mapping[str, Scores], with_intervals: bool = False) -> dict[str, float]:
    """Return the metrics under their names in metrics.jsonl (`eval/<set>/mean_at_16`).

    With intervals, the ends of each are `<name>_low` and `<name>_high`.
    """
    record = {}
    for label, set_scores in scores.items():
        for name, (value, low, high) in set_scores.metrics.items():
            key = f"eval/{label}/{name}"
            record[key] = value
            if with_intervals:
                record |= {f"{key}_low": low, f"{key}_high": high}
    return record


def success_histogram(shares: Iterable[float], n: int | None) -> list[tuple[str, int]]:
    """Return the number of problems per bin of the number of correct completions, with the name of each bin.

    The first and the last bin are the problems that were never and always solved, on which pass@k depends most. Between
    them each number of correct completions has a bin of its own, up to n = 16; beyond, bins have several numbers.

    Args:
        shares: the share of correct completions of each problem.
        n: completions per problem. None where problems differ: the bins between never and always are then ten ranges of
            the share, which include their lower edge (3 of 10 is in 0.3 – 0.4).
    """
    values = [*shares]
    if n is None:
        between = {
            f"{tenth / 10:.1f} – {(tenth + 1) / 10:.1f}": range(tenth, tenth + 1) for tenth in range(10)
        }
        counts = Counter(int(share * 10) for share in values if share not in (0, 1))
    else:
        total = n - 1
        # Bins of equal length where their count has a suitable divisor.
        divisors = (bins for bins in range(MAX_BINS, _MIN_BINS - 1, -1) if total % bins == 0)
        bins = total if total <= MAX_BINS else next(divisors, _USUAL_BINS)
        edges = [1 + total * bin_ // bins for bin_ in range(bins + 1)] if bins else []
        between = {
            str(low) if high == low + 1 else f"{low} – {high - 1}": range(low, high)
            for low, high in itertools.pairwise(edges)
        }
        counts = Counter(round(share * n) for share in values)
    first, last = ("wrong", "correct") if n == 1 else ("never", "always")
    bins_between = [(name, sum(counts[number] for number in numbers)) for name, numbers in between.items()]
    return [(first, values.count(0)), *bins_between, (last, values.count(1))]


def success_axis(n: int | None) -> str:
    """Return what the bins of `success_histogram` are, for a heading or an axis."""
    if n == 1:
        return "result of the only completion"
    return "share of correct completions" if n is None else f"number of correct completions, of {n}"


def _problem_metrics(
    rows_G: Sequence[EvalRow], n: str, k: Sequence[int], known: Container[str]
) -> dict[str, float]:
    """Return the metrics of one problem, which docs/evaluation.md defines; `n` is for the name of mean@n."""
    size, accuracies = len(rows_G), [row["accuracy"] for row in rows_G]
    correct, votes = accuracies.count(1), [row["answer"] for row in rows_G]
    verdicts = Counter(row["verdict"] for row in rows_G)
    metrics = {f"mean_at_{n}": correct / size}
    if "reward" in known:
        metrics["reward"] = sum(row["reward"] or 0.0 for row in rows_G) / size
    metrics |= {f"pass_at_{size_k}": pass_at_k(size, correct, size_k) for size_k in k}
    metrics |= {f"maj_at_{size_k}": maj_at_k(votes, accuracies, size_k) for size_k in k}
    metrics["answer_format_rate"] = (size - verdicts["malformed"]) / size
    if "finish_reason" in known:
        metrics["truncation_rate"] = sum(row["finish_reason"] == "length" for row in rows_G) / size
    if "length" in known:
        metrics["response_length"] = sum(row["length"] or 0 for row in rows_G) / size
    metrics["timeout_rate"] = verdicts["timeout"] / size
    metrics["grader_error_rate"] = verdicts["grader-error"] / size
    metrics["not_applicable_rate"] = verdicts["not-applicable"] / size
    return metrics
