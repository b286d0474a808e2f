"""What the solvers are given and what they return."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True)
class Tokens:
    """Probabilities of the sampled tokens under π_old, in float64, accurate at both ends.

    Attributes:
        logp: log p ≤ 0, never NaN. Shape (T,).
    """

    logp: Array

    @cached_property
    def p(self) -> Array:
        """The probability, shape (T,)."""
        return namespace(self.logp).exp(self.logp)

    @cached_property
    def m(self) -> Array:
        """1−p, from log p and so accurate where p rounds to 1. Shape (T,)."""
        return -namespace(self.logp).expm1(self.logp)
