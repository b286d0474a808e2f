"""Ratio intervals of single probabilities as rows, and the rows as JSON or CSV. Needs numpy, not torch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np

from bandpo_cli.bounds import band_bounds, ratio_bounds
from bandpo_cli.bounds.band import saturation
from bandpo_cli.bounds.divergences import find_divergence
from bandpo_cli.config.methods import (
    ClipHigherSettings,
    ClipSettings,
    DcpoSettings,
    MethodSettings,
    NoClipSettings,
)

PEERS: dict[str, MethodSettings] = {
    "clip": ClipSettings(),
    "clip-higher": ClipHigherSettings(),
    "dcpo": DcpoSettings(),
    "none": NoClipSettings(),
}
"""Methods without a divergence that an interval can be compared with, at their papers' settings."""


@dataclass(frozen=True)
class IntervalRow:
    """What one method allows a token. The fields are the keys of `--format json`.

    Attributes:
        prob: the token's probability under π_old.
        divergence: the trust region, or a peer's name.
        delta: its radius; None for a peer.
        lower: least ratio.
        upper: greatest ratio.
        prob_lower: least new probability.
        prob_upper: greatest new probability, at most 1.
        lower_saturated: the token may vanish.
        upper_saturated: the token may become certain: the simplex, not the region, is the limit.
    """

    prob: float
    divergence: str
    delta: float | None
    lower: float
    upper: float
    prob_lower: float
    prob_upper: float
    lower_saturated: bool
    upper_saturated: bool


def band_rows(probs: Sequence[float], name: str, delta: float, max_ratio: float | None) -> list[IntervalRow]:
    """One row a probability, in the order given. Raises ConfigError as `band_bounds` does."""
    divergence, (lower, upper) = find_divergence(name), band_bounds(_logs(probs), name, delta, max_ratio)
    rows = []
    for prob, low, high in zip(probs, lower.tolist(), upper.tolist(), strict=True):
        vanishes, certain = saturation(divergence, prob, delta)
        capped = max_ratio is not None and high == max_ratio and high * prob < 1.0
        # A probability given as such saturates at an exact number, which its rounded logarithm may just miss.
        low, high = 0.0 if vanishes else low, 1.0 / prob if certain and not capped else high
        rows.append(_row(prob, name, delta, low, high, vanishes, certain and not capped))
    return rows


def method_rows(probs: Sequence[float], name: str) -> list[IntervalRow]:
    """One row a probability for a method of `PEERS`."""
    lower, upper = ratio_bounds(PEERS[name])(_logs(probs))
    return [
        _row(prob, name, None, low, high, low <= 0.0, high * prob >= 1.0)
        for prob, low, high in zip(probs, lower.tolist(), upper.tolist(), strict=True)
    ]


def _row(
    prob: float, name: str, delta: float | None, low: float, high: float, vanishes: bool, certain: bool
) -> IntervalRow:
    return IntervalRow(prob, name, delta, low, high, prob * low, min(prob * high, 1.0), vanishes, certain)


def _logs(probs: Sequence[float]) -> np.ndarray:
    return np.log(np.asarray(probs, dtype=np.float64))


def as_json(rows: Sequence[IntervalRow]) -> str:
    """A list of objects with the keys of `IntervalRow`, numbers to full precision; infinity as null."""
    plain = [{key: None if value == np.inf else value for key, value in asdict(row).items()} for row in rows]
    return json.dumps(plain, indent=1, allow_nan=False)


def as_csv(rows: Sequence[IntervalRow]) -> str:
    """The same with a header line; no delta is an empty cell."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(IntervalRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return out.getvalue().rstrip("\n")
