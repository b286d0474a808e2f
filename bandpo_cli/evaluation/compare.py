"""Two evaluations side by side, problem by problem: the difference of what both were scored by, and how sure it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bandpo_cli.errors import UserError
from bandpo_cli.evaluation.intervals import Interval, mean_intervals

MEAN = "mean"
"""What mean@n is called here: it estimates the same for every n, so n need not be the same."""

_COMPARED = (MEAN, "pass_at_", "maj_at_", "answer_format", "truncation", "response_length")


@dataclass(frozen=True)
class Difference:
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
    figures: dict[str, Difference]
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
        UserError: they share no set, or no problem of one; or a record holds something else.
    """
    sets_a, sets_b = _sets(a, "A"), _sets(b, "B")
    labels = [label for label in sets_a if label in sets_b]
    if not labels:
        raise UserError(
            f"nothing to compare: A has {', '.join(sets_a) or 'no sets'}, B has {', '.join(sets_b) or 'no sets'}"
        )
    return {label: _compare_sets(label, sets_a[label], sets_b[label]) for label in labels}


def _compare_sets(
    label: str, a: Mapping[str, Mapping[str, float]], b: Mapping[str, Mapping[str, float]]
) -> Comparison:
    ids = [id_ for id_ in a if id_ in b]
    if not ids:
        raise UserError(f"nothing to compare: A and B share no problem of '{label}'")
    names = [name for name in a[ids[0]] if name in b[ids[0]] and name.startswith(_COMPARED)]
    changes = mean_intervals([[b[id_][name] - a[id_][name] for id_ in ids] for name in names])
    figures = {
        name: Difference(
            a=sum(a[id_][name] for id_ in ids) / len(ids),
            b=sum(b[id_][name] for id_ in ids) / len(ids),
            change=change,
        )
        for name, change in zip(names, changes, strict=True)
    }
    pairs = [(id_, a[id_][MEAN], b[id_][MEAN]) for id_ in ids]
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


def _sets(record: Mapping[str, Any], which: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return the values by set, problem and name, mean@n under `MEAN`."""
    found = {}
    for label, scores in record["sets"].items():
        try:
            found[label] = {
                id_: {
                    MEAN if name.startswith("mean_at_") else name: float(value)
                    for name, value in values.items()
                }
                for id_, values in scores["by_problem"].items()
            }
        except KeyError:
            raise UserError(
                f"{which} has no figures of '{label}' yet: its evaluation is not finished"
            ) from None
        except (AttributeError, TypeError, ValueError):
            raise UserError(
                f"{which} holds no figures by problem for '{label}'; is it an eval.json?"
            ) from None
        if any(MEAN not in values for values in found[label].values()):
            raise UserError(f"{which} holds a problem of '{label}' without a mean; is it an eval.json?")
    return found
