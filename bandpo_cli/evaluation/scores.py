"""Scores of an evaluation set: the definition of each metric, for `bandpo eval` and for training alike."""

import itertools
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bandpo_cli.errors import ConfigError
from bandpo_cli.evaluation.metrics import Interval, maj_at_k, mean_intervals, pass_at_k
from bandpo_cli.storage.tables import EvalRow
from bandpo_cli.types import UNGRADED_VERDICTS

MAX_BINS = 15
"""Largest number of bins of `success_histogram` between never and always."""

_MIN_BINS, _USUAL_BINS = 5, 10


@dataclass(frozen=True)
class Scores:
    """The scores of one evaluation set.

    Attributes:
        fewest, most: smallest and largest number of completions per problem; they can differ for stored completions.
        metrics: mean over problems with its interval, by name (`mean_at_16`, `pass_at_4`, ...).
        by_problem: the value of each problem, by problem id and metric name.
        verdicts: number of completions per verdict, most frequent first.
    """

    fewest: int
    most: int
    metrics: dict[str, Interval]
    by_problem: dict[str, dict[str, float]]
    verdicts: dict[str, int]

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
    return Scores(fewest, most, dict(zip(names, intervals, strict=True)), by_problem, verdicts)


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
