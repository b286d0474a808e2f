"""A user's own f, named `module:function`: found, checked once, and then solved like any other."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bandpo_cli.bounds.arrays import Array, namespace
from bandpo_cli.bounds.generators import Generator
from bandpo_cli.errors import ConfigError, nearest

_TINY, _HUGE = 2.0**-1000, 2.0**1000  # stand for 0 and ∞, where an f such as u·log u is not a number
_PATH_LOCK = threading.Lock()


@lru_cache(maxsize=64)
def generator(name: str) -> Generator:
    """Load and check `module:function`.

    The function takes u = π/π_old as an array (numpy, or torch when the log-probabilities are tensors) and
    returns f(u) of the same shape; f is convex with f(1) = 0. Raises ConfigError naming the function otherwise.
    """
    function = _load(name)
    _check(name, function)

    def f(u: Array, x: Array) -> Array:
        return function(namespace(u).clip(u, _TINY, _HUGE))

    return f


def _load(name: str) -> Callable[[Array], Array]:
    module_name, _, function_name = name.partition(":")
    module = _import(name, module_name)
    function = getattr(module, function_name, None)
    if function is None:
        raise ConfigError(
            f"divergence '{name}': module '{module_name}' has no '{function_name}'{nearest(function_name, dir(module))}"
        )
    if not callable(function):
        raise ConfigError(
            f"divergence '{name}': '{function_name}' is no function but a {type(function).__name__}"
        )
    return function  # type: ignore[no-any-return]


def _import(name: str, module_name: str) -> Any:
    """Import with the current folder searched first, as `python -m` would."""
    here = str(Path.cwd())
    with _PATH_LOCK:
        sys.path.insert(0, here)
        try:
            return importlib.import_module(module_name)
        except Exception as error:
            raise ConfigError(
                f"divergence '{name}': importing '{module_name}' failed: {type(error).__name__}: {error} "
                f"(searched the current folder {here} and the Python path)"
            ) from error
        finally:
            sys.path.remove(here)


def _check(name: str, function: Callable[[Array], Array]) -> None:
    """Refuse what is not finite, not zero at 1 or not convex on a grid of u from 1e-4 to 1e4."""
    u = np.concatenate([np.logspace(-4, 4, 161), np.linspace(0.5, 1.5, 41)])
    u = np.unique(u)
    with np.errstate(all="ignore"):
        try:
            values, at_one = np.asarray(function(u), np.float64), float(function(np.ones(1))[0])
        except Exception as error:
            raise ConfigError(
                f"divergence '{name}': calling it with a numpy array of ratios failed: {type(error).__name__}: "
                f"{error}; it must take an array u and return f(u) of the same shape"
            ) from error
    if values.shape != u.shape:
        raise ConfigError(f"divergence '{name}': f(u) has shape {values.shape} for u of shape {u.shape}")
    if not np.isfinite(values).all():
        raise ConfigError(f"divergence '{name}': f(u) is not finite at u = {u[~np.isfinite(values)][0]:g}")
    if abs(at_one) > 1e-9:
        raise ConfigError(f"divergence '{name}': f(1) must be 0 and is {at_one:g}")
    _check_convex(name, u, values)


def _check_convex(name: str, u: np.ndarray, values: np.ndarray) -> None:
    chord = values[:-2] + (values[2:] - values[:-2]) * (u[1:-1] - u[:-2]) / (u[2:] - u[:-2])
    above = values[1:-1] - chord
    scale = np.abs(values[:-2]) + np.abs(values[2:]) + 1e-3
    if (above > 1e-9 * scale).any():
        raise ConfigError(
            f"divergence '{name}': f is not convex: it bends down at u = {u[1:-1][above.argmax()]:g}"
        )
