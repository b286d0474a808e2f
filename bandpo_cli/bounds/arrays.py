"""The little that numpy and torch do differently, so that the mathematics is written once for both.

Torch is never imported here: a tensor can only come from someone who has imported it.
"""

# MERGED: What the solvers are given and what they return.
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

Array = Any
"""A `numpy.ndarray` or a `torch.Tensor`."""

CPU_BLOCK = 2**20
"""Elements worked on at a time on a CPU, so that a batch of any size needs some 100 MB of temporaries at most."""


def is_tensor(x: Array) -> bool:
    """Whether `x` is a torch tensor (without importing torch to ask)."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def as_array(x: Array) -> Array:
    """`x` itself if it is a tensor, else a numpy array of it (numbers and lists too)."""
    return x if is_tensor(x) else np.asarray(x)


def namespace(x: Array) -> Any:
    """The module whose functions take `x`: `torch` for a tensor, `numpy` for an array."""
    return sys.modules["torch"] if is_tensor(x) else np


def device_of(x: Array) -> Any:
    """Where new arrays that meet `x` must be made: a `torch.device`, or None for numpy."""
    return x.device if is_tensor(x) else None


def arange(count: int, xp: Any, device: Any) -> Array:
    """The int64 numbers 0 … count−1, made on the device itself."""
    return (
        np.arange(count, dtype=np.int64)
        if device is None
        else xp.arange(count, dtype=xp.int64, device=device)
    )


def is_on_host(x: Array) -> bool:
    """Whether a value may be looked at without making the host wait for an accelerator."""
    return not is_tensor(x) or x.device.type == "cpu"


def no_grad_no_warnings(x: Array) -> AbstractContextManager[Any]:
    """No gradient is recorded, and numpy does not warn of the infinities that the limits p→0 and p→1 pass by.

    It holds for one thread; tensors made in torch's inference mode may only be written in that mode.
    """
    if not is_tensor(x):
        return np.errstate(all="ignore")
    torch = namespace(x)
    context: AbstractContextManager[Any] = torch.inference_mode() if x.is_inference() else torch.no_grad()
    return context


def output_dtype(x: Array) -> Any:
    """float64 for float64 and whole numbers, float32 for every shorter float (half precisions included)."""
    xp = namespace(x)
    floating = x.dtype.is_floating_point if is_tensor(x) else np.issubdtype(x.dtype, np.floating)
    return xp.float32 if floating and x.dtype.itemsize < 8 else xp.float64


def take(table: Array, index: Array) -> Array:
    """`table[index]` in one dimension, by the faster way that torch has for it."""
    return table.index_select(0, index) if is_tensor(table) else table[index]


def false_like(x: Array) -> Array:
    """Booleans of the shape of `x`, all False."""
    xp = namespace(x)
    return xp.zeros_like(x, dtype=xp.bool if is_tensor(x) else np.bool_)


def empty_like(x: Array, dtype: Any) -> Array:
    """An array of the shape and place of `x`, of another type."""
    return namespace(x).empty_like(x, dtype=dtype)


def to_float64(x: Array) -> Array:
    """`x` in the type that everything is computed in."""
    return x.double() if is_tensor(x) else np.asarray(x, dtype=np.float64)


def cast(x: Array, dtype: Any) -> Array:
    """`x` in another type of its own library, truncating towards 0."""
    return x.to(dtype) if is_tensor(x) else x.astype(dtype)


def blocks(x: Array) -> Iterator[slice]:
    """Equal slices that cover the one-dimensional `x`: of bounded size on a CPU, one on an accelerator."""
    count = -(-len(x) // CPU_BLOCK) if is_on_host(x) else 1
    size = max(-(-len(x) // max(count, 1)), 1)
    for begin in range(0, len(x), size):
        yield slice(begin, begin + size)


Generator = Callable[[Array, Array], Array]
"""`f(u, x)` with x = u−1."""


class RatioBounds(NamedTuple):
    """The interval of ratios π/π_old that each token is allowed: 0 ≤ lower ≤ 1 ≤ upper.

    Attributes:
        lower: shape of the log-probabilities that it was computed from.
        upper: the same shape.
    """

    lower: Array
    upper: Array


@dataclass(frozen=True)
class TokenProbs:
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
