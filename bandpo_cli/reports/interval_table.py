"""Ratio intervals of single probabilities as rows, and the rows as JSON or CSV. Needs numpy, not torch."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields

import numpy as np

from bandpo_cli.bounds import band_bounds
from bandpo_cli.bounds.band import saturation
from bandpo_cli.bounds.divergences import find_divergence
from bandpo_cli.methods.settings import CustomSettings, MethodSettings, TrustRegionSettings, bounded_methods

PEERS = bounded_methods()
"""Methods that a Band can be compared with, at their published settings."""


@dataclass(frozen=True)
class IntervalRow:
    """Interval of one token under one method. The fields are the keys of `bandpo bounds --format json`.

    Attributes:
        prob: probability of the token under π_old.
        divergence: divergence of the trust region, or the name of a method in `PEERS` (`peer_name`).
        delta: radius of the trust region; None for a method without one.
        lower: smallest allowed ratio.
        upper: largest allowed ratio.
        prob_lower: smallest allowed new probability.
        prob_upper: largest allowed new probability, at most 1.
        lower_saturated: whether the new probability may be 0.
        upper_saturated: whether the new probability may be 1: the simplex, not the trust region, is the limit.
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
    """Return one row per probability in (0, 1], in the given order. Errors are those of `band_bounds`.

    Args:
        name: name of the divergence.
        delta: radius of the trust region.
        max_ratio: cap on the upper bounds; None for no cap.
    """
    divergence, bounds = find_divergence(name), band_bounds(np.log(probs), name, delta, max_ratio)
    rows = []
    for prob, low, high in zip(probs, *(end.tolist() for end in bounds), strict=True):
        vanishes, certain = saturation(divergence, prob, delta)
        certain &= not (max_ratio is not None and high == max_ratio and high * prob < 1.0)
        # Saturation starts at an exact probability, which exp of its rounded logarithm may miss.
        low, high = 0.0 if vanishes else low, 1.0 / prob if certain else high
        ends = low, high, prob * low, min(prob * high, 1.0)
        rows.append(IntervalRow(prob, name, delta, *ends, vanishes, certain))
    return rows


def method_rows(probs: Sequence[float], name: str) -> list[IntervalRow]:
    """Return one row per probability for a method with an interval, which may be a custom one."""
    settings = PEERS.get(name) or CustomSettings(method=name)
    label, delta = peer_name(settings), settings.delta if isinstance(settings, TrustRegionSettings) else None
    rows = []
    for prob, low, high in zip(
        probs, *map(np.ndarray.tolist, settings.ratio_bounds()(np.log(probs))), strict=True
    ):
        ends = low, high, prob * low, min(prob * high, 1.0)
        rows.append(IntervalRow(prob, label, delta, *ends, low <= 0.0, high * prob >= 1.0))
    return rows


def peer_name(settings: MethodSettings) -> str:
    """Return the name of a method, with its divergence where it has one: `clip`, `dppo kl`."""
    return settings.region() if isinstance(settings, TrustRegionSettings) else settings.method


def as_json(rows: Sequence[IntervalRow]) -> str:
    """Return a JSON list of objects with the keys of `IntervalRow`, in full precision; infinity is null."""
    plain = [{key: None if value == np.inf else value for key, value in asdict(row).items()} for row in rows]
    return json.dumps(plain, indent=1, allow_nan=False)


def as_csv(rows: Sequence[IntervalRow]) -> str:
    """Return the rows as CSV with a header line; a missing delta is an empty cell."""
    out = io.StringIO()
    names = [field.name for field in fields(IntervalRow)]
    csv.writer(out, lineterminator="\n").writerows([names, *map(astuple, rows)])
    return out.getvalue().rstrip("\n")
