"""Figures of merit over problems, from the number of right completions of each."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of P(at least one of k is right): 1 − C(n−c, k)/C(n, k) (arXiv 2107.03374, eq. 1).

    Raises:
        ValueError: not 1 ≤ k ≤ n or not 0 ≤ correct ≤ n.
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@{k} of {correct} right in {n}: needs 1 <= k <= n and 0 <= correct <= n")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def mean_pass_at_k(correct_P: Sequence[int], n: int, k: int) -> float:
    """Return pass@k, the mean over problems."""
    return sum(pass_at_k(n, correct, k) for correct in correct_P) / len(correct_P)


def mean_at_n(correct_P: Sequence[int], n: int) -> float:
    """Return mean@n: the share of right completions, the mean over problems."""
    return sum(correct_P) / (n * len(correct_P))
