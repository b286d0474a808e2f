"""maj@k: how often the most frequent of k answers is right, exactly."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from math import fsum

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

FloatArray = NDArray[np.float64]


def maj_at_k(votes: Sequence[str | None], correct: Sequence[float], k: int) -> float:
    """Return the chance that a majority vote among k of n completions, drawn without replacement, is right.

    The most frequent answer wins (arXiv 2203.11171); of answers that are equally frequent each wins with the same
    chance. A completion without an answer (None) does not vote, and where nobody votes nothing is right. The value
    is exact up to rounding: no drawing is done.

    Args:
        votes: [n] the answer of each completion, the same text for answers that are the same.
        correct: [n] 1 for a right completion, 0 for a wrong one. An answer that was judged differently in different
            completions counts as the mean of its verdicts.

    Raises:
        ValueError: not 1 ≤ k ≤ n, or different lengths.
    """
    n = len(votes)
    if not 1 <= k <= n:
        raise ValueError(f"maj@{k} of {n} completions: needs 1 <= k <= n")
    verdicts: dict[str, list[float]] = defaultdict(list)
    for vote, right in zip(votes, correct, strict=True):
        if vote is not None:
            verdicts[vote].append(right)
    sizes = Counter({vote: len(rights) for vote, rights in verdicts.items()})
    silent = n - sizes.total()
    shares = []
    for vote, rights in verdicts.items():
        if any(rights):
            others = sorted(size for other, size in sizes.items() if other != vote)
            shares.append(sum(rights) / len(rights) * _chance_to_win(sizes[vote], tuple(others), silent, k))
    return min(fsum(shares), 1.0)  # not `sum`: the order of the completions must not show in the last digit


@lru_cache(maxsize=4096)
def _chance_to_win(size: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """Return the chance that an answer which `size` completions gave wins the vote among k.

    With m votes for it, every other answer may have x < m votes, or m and then share the victory. Products of the
    generating functions Σ_x P(x) z^x of the other answers count the ways to draw the k − m others; each tie carries a
    factor u, and ∫₀¹ uᵗ du = 1/(1+t) is the chance of winning a tie with t others.
    """
    n = size + sum(others) + silent
    # Binomial weights with p = k/n instead of binomial coefficients: they do not overflow, and cancel in the end.
    weights = {s: _binomial(s, k / n) for s in {size, *others}}
    total = 0.0
    for m in range(1, min(size, k) + 1):
        rivals = [s for s in others if s >= m]
        harmless = n - size - sum(rivals)
        u, share = _unit_quadrature(len(rivals) // 2 + 1)  # exact for polynomials in u of this degree
        ways = np.zeros((len(u), k - m + 1))
        free = _binomial(harmless, k / n)[: k - m + 1]
        ways[:, : len(free)] = free
        for rival in rivals:
            ways = _times(ways, weights[rival], m, u)
        total += float(weights[size][m] * (share @ ways[:, k - m]))
    return total / float(_binomial(n, k / n)[k])


def _times(ways: FloatArray, weights: FloatArray, most: int, u: FloatArray) -> FloatArray:
    """Multiply polynomials in z, one a row, by Σ_{x<most} weights[x] z^x + u·weights[most] z^most."""
    product = np.zeros_like(ways)
    for x in range(min(most, ways.shape[1] - 1) + 1):
        term = weights[x] * ways[:, : ways.shape[1] - x]
        product[:, x:] += term * u[:, None] if x == most else term
    return product


@lru_cache(maxsize=4096)
def _binomial(n: int, p: float) -> FloatArray:
    """Return the binomial probabilities of 0 … n successes."""
    return np.asarray(binom.pmf(np.arange(n + 1), n, p), dtype=np.float64)


@lru_cache(maxsize=256)
def _unit_quadrature(nodes: int) -> tuple[FloatArray, FloatArray]:
    """Return the points and weights of Gauss and Legendre on [0, 1]."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    return (points + 1) / 2, weights / 2
