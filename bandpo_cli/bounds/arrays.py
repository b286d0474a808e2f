"""Functions that hide the differences between numpy and torch, and the types of the solvers.

Torch is not imported here: a caller that passes a tensor has imported it.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

Array = Any  # A `numpy.ndarray` or a `torch.Tensor`

CPU_BLOCK = 2**20
"""Elements per block on a CPU, which limits the temporaries of a batch of any size to some 100 MB."""

Generator = Callable[[Array, Array], Array]
"""The f of an f-divergence, called as `f(u, u−1)`: arrays of one shape in, f(u) of that shape out."""


class RatioBounds(NamedTuple):
    """The allowed interval of the ratio π/π_old of each token: 0 ≤ lower ≤ 1 ≤ upper."""

    lower: Array  # of the shape of the log-probabilities from which it was computed
    upper: Array


class TokenProbs:
    """Probabilities of T sampled tokens under π_old, in float64, accurate at both ends; shapes (T,)."""

    def __init__(self, logp: Array) -> None:
        self.xp = xp = namespace(logp)
        self.logp, self.p = logp, xp.exp(logp)  # log p ≤ 0, never NaN
        self.m = -xp.expm1(logp)  # 1−p, accurate where p rounds to 1


def is_tensor(x: Array) -> bool:
    """Return whether `x` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def as_array(x: Array) -> Array:
    """Return `x` itself if it is a tensor, else a numpy array of it; numbers and lists are accepted."""
    return x if is_tensor(x) else np.asarray(x)


def namespace(x: Array) -> Any:
    """Return the module whose functions take `x`: `torch` for a tensor, `numpy` for an array."""
    return sys.modules["torch"] if is_tensor(x) else np


def is_on_host(x: Array) -> bool:
    """Return whether the host can read a value of `x` without synchronizing with an accelerator."""
    return not is_tensor(x) or x.device.type == "cpu"


def no_grad_no_warnings(x: Array) -> Any:
    """Return a context that records no gradient and disables numpy's warnings of the infinities at p→0 and p→1."""
    return namespace(x).no_grad() if is_tensor(x) else np.errstate(all="ignore")


def output_dtype(x: Array) -> Any:
    """Return float64 for float64 and integers, float32 for all shorter floats (half precision included)."""
    floating = x.dtype.is_floating_point if is_tensor(x) else x.dtype.kind == "f"
    xp = namespace(x)
    return xp.float32 if floating and x.dtype.itemsize < 8 else xp.float64


def take(table: Array, index: Array) -> Array:
    """Return `table[index]` in one dimension, by torch's faster function for it."""
    return table.index_select(0, index) if is_tensor(table) else table[index]


def cast(x: Array, dtype: Any) -> Array:
    """Return `x` in another type of its own library, truncated towards 0."""
    return x.to(dtype) if is_tensor(x) else x.astype(dtype, copy=False)


def blocks(x: Array) -> Iterator[slice]:
    """Yield equal slices that cover the one-dimensional `x`: of limited size on a CPU, one on an accelerator."""
    count = -(-len(x) // CPU_BLOCK) if is_on_host(x) else 1
    size = max(-(-len(x) // max(count, 1)), 1)
    for begin in range(0, len(x), size):
        yield slice(begin, begin + size)
