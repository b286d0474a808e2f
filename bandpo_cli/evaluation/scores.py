"""How many problems were solved how often."""

# MERGED: From graded completions to figures: the one definition of each, for `bandpo eval` and for training alike.
from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bandpo_cli.errors import ConfigError
from bandpo_cli.evaluation.metrics import Interval, legacy_best_at_k, maj_at_k, mean_intervals, pass_at_k
from bandpo_cli.storage.tables import EvalRow

BINS = 10


def success_histogram(shares: Iterable[float]) -> list[tuple[str, int]]:
    """Count problems by the share of their completions that is right, each bin under its name.

    Those that were never and always solved stand apart at the two ends: they are what pass@k turns on. Between them lie
    ten bins of a tenth each, with their lower ends (3 of 10 is in 0.3 – 0.4).
    """
    counts = [0] * (BINS + 2)
    for share in shares:
        if share in (0, 1):
            counts[0 if share == 0 else -1] += 1
        else:
            counts[1 + min(int(share * BINS), BINS - 1)] += 1
    between = [f"{bin_ / BINS:.1f} – {(bin_ + 1) / BINS:.1f}" for bin_ in range(BINS)]
    return list(zip(["never", *between, "always"], counts, strict=True))


@dataclass(frozen=True)
class Scores:
    """What an evaluation set came to.

    Attributes:
        fewest, most: completions a problem; the same number but for completions from elsewhere.
        figures: mean over problems with its interval, by name (`mean_at_16`, `pass_at_4`, ...).
        by_problem: the values behind them, by problem id, then by name.
        verdicts: how often each verdict was given.
    """

    fewest: int
    most: int
    figures: dict[str, Interval]
    by_problem: dict[str, dict[str, float]]
    verdicts: dict[str, int]

    @property
    def completions(self) -> int:
        """All completions of all problems."""
        return sum(self.verdicts.values())

    def as_json(self) -> dict[str, Any]:
        """Return what `eval.json` holds of it."""
        return {
            "problems": len(self.by_problem),
            "completions": self.completions,
            "completions_per_problem": [self.fewest, self.most],
            "figures": {name: figure._asdict() for name, figure in self.figures.items()},
            "verdicts": self.verdicts,
            "by_problem": self.by_problem,
        }


def score(label: str, rows: Iterable[EvalRow], k: Sequence[int], legacy: bool = False) -> Scores:
    """Score the completions of one evaluation set.

    Args:
        k: of pass@k and maj@k.
        legacy: add best@k as resampling with replacement gives it.

    Raises:
        ConfigError: there is no completion, or a problem has fewer of them than a k.
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
            f"--k {max(k)}: needs as many completions of every problem, and {short} of '{label}' has {fewest}; "
            f"ask for k of at most {fewest}"
        )
    n = str(fewest) if fewest == most else "n"
    known = {
        column
        for column in ("length", "finish_reason")
        if all(row.get(column) is not None for rows_G in problems.values() for row in rows_G)
    }
    by_problem = {id_: _problem_metrics(rows_G, n, k, legacy, known) for id_, rows_G in problems.items()}
    names = list(next(iter(by_problem.values())))
    intervals = mean_intervals([[values[name] for values in by_problem.values()] for name in names])
    return Scores(
        fewest=fewest,
        most=most,
        figures=dict(zip(names, intervals, strict=True)),
        by_problem=by_problem,
        verdicts=dict(
            Counter(row["verdict"] for rows_G in problems.values() for row in rows_G).most_common()
        ),
    )


def metric_record(scores: Mapping[str, Scores], ends: bool = False) -> dict[str, float]:
    """Return the figures under their names in metrics.jsonl (`eval/<set>/mean_at_16`); `ends` adds `_low`, `_high`."""
    found = {}
    for label, each in scores.items():
        for name, figure in each.figures.items():
            found[f"eval/{label}/{name}"] = figure.value
            if ends:
                found |= {f"eval/{label}/{name}_low": figure.low, f"eval/{label}/{name}_high": figure.high}
    return found


def _problem_metrics(
    rows_G: Sequence[EvalRow], n: str, k: Sequence[int], legacy: bool, known: Container[str]
) -> dict[str, float]:
    """Return one problem's figures, less those of columns not `known`; see docs/evaluation.md for what each means."""
    size = len(rows_G)
    rights = [row["accuracy"] for row in rows_G]
    correct = sum(right == 1 for right in rights)
    votes = [row["answer"] for row in rows_G]

    def share(count: int) -> float:
        return count / size

    figures = {f"mean_at_{n}": share(correct)}
    figures |= {f"pass_at_{each}": pass_at_k(size, correct, each) for each in k}
    figures |= {f"maj_at_{each}": maj_at_k(votes, rights, each) for each in k}
    if legacy:
        figures |= {f"legacy_best_at_{each}": legacy_best_at_k(size, correct, each) for each in k}
    figures["answer_format_rate"] = share(sum(row["verdict"] != "malformed" for row in rows_G))
    if "finish_reason" in known:
        figures["truncation_rate"] = share(sum(row["finish_reason"] == "length" for row in rows_G))
    if "length" in known:
        figures["response_length"] = sum(row["length"] or 0 for row in rows_G) / size
    figures["timeout_rate"] = share(sum(row["verdict"] == "timeout" for row in rows_G))
    figures["grader_error_rate"] = share(sum(row["verdict"] == "grader-error" for row in rows_G))
    return figures
