"""Two evaluations side by side, problem by problem: the difference of what both were scored by, and how sure it is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bandpo_cli.errors import UserError
from bandpo_cli.evaluation.metrics import Interval, mean_intervals

MEAN = "mean"
"""What mean@n is called here: it estimates the same for every n, so n need not be the same."""

_COMPARED = ("pass_at_", "maj_at_", "answer_format", "truncation", "response_length")

_Problems = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class MetricDifference:
    """A figure of both, over the problems that both have; `change` is B − A."""

    a: float
    b: float
    change: Interval


@dataclass(frozen=True)
class Comparison:
    """One evaluation set in A and in B.

    Attributes:
        shared, only_a, only_b: problems.
        n_a, n_b: completions a problem, as their names say.
        figures: by name; those alone that both have.
        wins, losses, ties: problems with a higher, lower and equal share of right completions in B.
        moved: (problem id, share in A, share in B), the largest changes first, unchanged ones left out.
    """

    shared: int
    only_a: int
    only_b: int
    figures: dict[str, MetricDifference]
    wins: int
    losses: int
    ties: int
    moved: list[tuple[str, float, float]]

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "problems": {"shared": self.shared, "only_a": self.only_a, "only_b": self.only_b},
            "figures": {
                name: {"a": each.a, "b": each.b, **each.change._asdict()}
                for name, each in self.figures.items()
            },
            "wins": self.wins,
            "losses": self.losses,
            "ties": self.ties,
            "moved": [{"problem": id_, "a": a, "b": b} for id_, a, b in self.moved],
        }


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Comparison]:
    """Compare the sets that two records (`eval.json`) share.

    The interval is a bootstrap over the problems of the differences: what a problem's difficulty does to both alike
    cancels.

    Raises:
        UserError: they share no set, or no problem of one; or a shared set holds something else than figures.
    """
    sets_a, sets_b = _sets(a, "A"), _sets(b, "B")
    labels = [label for label in sets_a if label in sets_b]
    if not labels:
        raise UserError(
            f"nothing to compare: A has {', '.join(sets_a) or 'no sets'}, B has {', '.join(sets_b) or 'no sets'}"
        )
    return {
        label: _compare_sets(
            label, _problems(sets_a[label], label, "A"), _problems(sets_b[label], label, "B")
        )
        for label in labels
    }


def _compare_sets(label: str, a: _Problems, b: _Problems) -> Comparison:
    ids = [id_ for id_ in a if id_ in b]
    if not ids:
        raise UserError(f"nothing to compare: A and B share no problem of '{label}'")
    names = [MEAN, *(name for name in a[ids[0]] if name in b[ids[0]] and name.startswith(_COMPARED))]
    values_a = {name: [_number(a, id_, name, label, "A") for id_ in ids] for name in names}
    values_b = {name: [_number(b, id_, name, label, "B") for id_ in ids] for name in names}
    changes_FP = [[y - x for x, y in zip(values_a[name], values_b[name], strict=True)] for name in names]
    figures = {
        name: MetricDifference(
            a=sum(values_a[name]) / len(ids), b=sum(values_b[name]) / len(ids), change=change
        )
        for name, change in zip(names, mean_intervals(changes_FP), strict=True)
    }
    pairs = list(zip(ids, values_a[MEAN], values_b[MEAN], strict=True))
    wins, losses = sum(y > x for _, x, y in pairs), sum(y < x for _, x, y in pairs)
    moved = sorted((pair for pair in pairs if pair[1] != pair[2]), key=lambda pair: -abs(pair[2] - pair[1]))
    return Comparison(
        shared=len(ids),
        only_a=len(a) - len(ids),
        only_b=len(b) - len(ids),
        figures=figures,
        wins=wins,
        losses=losses,
        ties=len(ids) - wins - losses,
        moved=moved,
    )


def _sets(record: Mapping[str, Any], which: str) -> Mapping[str, Any]:
    sets = record.get("sets")
    if not isinstance(sets, Mapping):
        raise UserError(f"{which} holds no evaluation sets; is it an eval.json?")
    return sets


def _problems(scores: Any, label: str, which: str) -> _Problems:
    """Return what stands there by problem and name, mean@n under `MEAN`."""
    if isinstance(scores, Mapping) and "by_problem" not in scores:
        raise UserError(f"{which} has no figures of '{label}' yet: its evaluation is not finished")
    by_problem = scores["by_problem"] if isinstance(scores, Mapping) else None
    if not isinstance(by_problem, Mapping) or not all(
        isinstance(each, Mapping) for each in by_problem.values()
    ):
        raise UserError(f"{which} holds no figures by problem for '{label}'; is it an eval.json?")
    return {
        id_: {MEAN if name.startswith("mean_at_") else name: value for name, value in values.items()}
        for id_, values in by_problem.items()
    }


def _number(problems: _Problems, id_: str, name: str, label: str, which: str) -> float:
    """Return a figure of a problem. Raises UserError where it is missing, null or no number."""
    value = problems[id_].get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    raise UserError(
        f"{which} holds {_shown(value)} as '{name}' of problem {id_!r:.80} of '{label}'; if it is an evaluation's, "
        "bandpo eval --resume NAME writes its figures anew"
    )


def _shown(value: object) -> str:
    return "no number" if value is None else f"{value!r:.40}"
