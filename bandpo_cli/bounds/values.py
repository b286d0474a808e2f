"""What the solvers are given and what they return."""

from __future__ import annotations

from typing import NamedTuple

from bandpo_cli.bounds.arrays import Array, namespace


class RatioBounds(NamedTuple):
    """The interval of ratios π/π_old that each token is allowed: 0 ≤ lower ≤ 1 ≤ upper.

    Attributes:
        lower: shape of the log-probabilities that it was computed from.
        upper: the same shape.
    """

    lower: Array
    upper: Array


class Tokens(NamedTuple):
    """Probabilities of the sampled tokens under π_old, in float64, accurate at both ends.

    Attributes:
        logp: log p ≤ 0, never NaN. Shape (T,).
        p: the probability, shape (T,).
        m: 1−p, computed from log p and so accurate where p rounds to 1. Shape (T,).
    """

    logp: Array
    p: Array
    m: Array


def tokens_of(logp: Array) -> Tokens:
    """Both p and 1−p from float64 log-probabilities."""
    xp = namespace(logp)
    return Tokens(logp, xp.exp(logp), -xp.expm1(logp))
