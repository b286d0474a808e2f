"""Figures of merit of one problem, from the number of right completions among those drawn."""

from __future__ import annotations

from math import comb


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of P(at least one of k is right): 1 − C(n−c, k)/C(n, k) (arXiv 2107.03374, eq. 1).

    Raises:
        ValueError: not 1 ≤ k ≤ n or not 0 ≤ correct ≤ n.
    """
    _check(n, correct, k, "pass")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def legacy_best_at_k(n: int, correct: int, k: int) -> float:
    """Return best@k as resampling with replacement gives it, 1 − (1 − c/n)^k, without its noise.

    It is biased, the more the nearer k is to n: with 1 right completion of 32 it says 0.64 for k = 32, where one draw
    of 32 held one right answer. For comparison with tables that were made so (verl's `best@k`), and nothing else.

    Raises:
        ValueError: not 1 ≤ k ≤ n or not 0 ≤ correct ≤ n.
    """
    _check(n, correct, k, "best")
    return float(1.0 - (1.0 - correct / n) ** k)


def _check(n: int, correct: int, k: int, name: str) -> None:
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"{name}@{k} of {correct} right in {n}: needs 1 <= k <= n and 0 <= correct <= n")
