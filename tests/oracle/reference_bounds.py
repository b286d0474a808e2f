"""Ratio bounds of the reference implementation: from their definitions, by bisection in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Settings = dict[str, Any]
"""The plain values of a configuration."""

GENERATORS: dict[str, Callable[[float], float]] = {
    "kl": lambda u: -math.log(u) + u - 1 if u > 0 else math.inf,
    "tv": lambda u: abs(u - 1) / 2,
    "js": lambda u: (0.5 * u * math.log(2 * u / (1 + u)) if u > 0 else 0.0) + 0.5 * math.log(2 / (1 + u)),
}


def ratio_bounds(bounds: Settings, old_logprob: float) -> tuple[float, float]:
    """Return the interval of ratios that a method's settings allow a token of this log-probability."""
    p = math.exp(old_logprob)
    method = bounds["method"]
    if method == "none":
        return 0.0, math.inf
    if method in ("clip", "clip-higher"):
        return 1 - bounds["eps_low"], 1 + bounds["eps_high"]
    cap = math.inf if bounds["max_ratio"] is None else bounds["max_ratio"]
    if method == "dcpo":
        lower = 0.5 + 0.5 * math.sqrt(max(1 - 4 * bounds["eps_low"] / p, 0))
        return lower, min(0.5 + 0.5 * math.sqrt(1 + 4 * bounds["eps_high"] / p), cap)
    assert method == "band"
    lower, upper = band(GENERATORS[bounds["divergence"]], old_logprob, bounds["delta"])
    upper = min(upper, cap)
    if bounds["relax"] is not None:
        lower = min(lower, 1 - bounds["relax"]["eps_low"])
        upper = max(upper, 1 + bounds["relax"]["eps_high"])
    return lower, upper


def radius(bounds: Settings, step: int, steps: int) -> float:
    """Return the radius at a step of a run, as BandPO's code defines it (decaying_clipbound.py)."""
    start, end = bounds["delta"], bounds["delta_end"]
    last = steps if bounds["delta_steps"] is None else bounds["delta_steps"]
    done = step / last if step < last else 1.0
    power = 2.0 if bounds["delta_power"] is None else bounds["delta_power"]
    value: float = {
        "linear": start + (end - start) * done,
        "cosine": end + (start - end) * (1 + math.cos(done * math.pi)) / 2,
        "polynomial": end + (start - end) * (1 - done) ** power,
    }[bounds["delta_schedule"]]
    return value


def band(f: Callable[[float], float], old_logprob: float, delta: float) -> tuple[float, float]:
    """Return the roots of p·f(r) + (1−p)·f((1−rp)/(1−p)) = δ in [0, 1] and [1, 1/p]; an end within δ instead of one."""
    p, rest = math.exp(old_logprob), -math.expm1(old_logprob)

    def divergence(r: float) -> float:
        return p * f(r) + rest * f(max(0.0, 1 - p * (r - 1) / rest))

    def bisect(inside: float, outside: float) -> float:
        if divergence(outside) <= delta:
            return outside
        for _ in range(100):
            middle = 0.5 * (inside + outside)
            inside, outside = (middle, outside) if divergence(middle) <= delta else (inside, middle)
        return inside

    return bisect(1.0, 0.0), bisect(1.0, 1 / p)
