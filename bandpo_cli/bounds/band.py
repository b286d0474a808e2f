"""The Band operator: ratio bounds from log-probabilities of any shape and type."""

import math
from typing import Any

import numpy as np

from bandpo_cli.bounds.arrays import (
    Array,
    RatioBounds,
    TokenProbs,
    as_array,
    blocks,
    cast,
    is_on_host,
    is_tensor,
    namespace,
    no_grad_no_warnings,
    output_dtype,
)
from bandpo_cli.bounds.divergences_and_closed_forms import MIN_TOKENS_FOR_TABLE, Divergence, find_divergence
from bandpo_cli.bounds.solver import RootFinder
from bandpo_cli.errors import ConfigError

ROUNDING, ROUNDING_HALF = 1e-3, 1.0
"""Largest log-probability above 0 that rounding explains, in float32 and float64, and in float16 and bfloat16.

log_softmax gives none above 0. Where the logit of the token and the normalizer come from separate matrix products, 5e-5
was measured in float32, 0.06 in float16 and 0.5 in bfloat16, with logits of about 100.
"""


def band_bounds(
    old_logprobs: Array, divergence: str = "kl", delta: float = 0.05, max_ratio: float | None = None
) -> RatioBounds:
    """Return the interval of ratios π/π_old that D_f(π‖π_old) ≤ delta allows each token (arXiv 2603.04918).

    Args:
        old_logprobs: log π_old(token) in nats, any shape: a torch tensor on any device, a numpy array or numbers.
        divergence: a name in `registries.DIVERGENCES`, or `module:function` for a custom f.
        delta: radius of the trust region, > 0; in nats for kl, reverse-kl and js.
        max_ratio: cap on the upper bound, > 1; None for none.

    Returns:
        `RatioBounds(lower, upper)`, each of the shape and on the device of `old_logprobs`, with
        0 ≤ lower ≤ 1 ≤ upper ≤ 1/p; float64 for float64 and integers, else float32. No gradient is recorded.

    Raises:
        ConfigError: an argument is not valid, or `old_logprobs` is not made of real numbers, or, where the host can
            read its values, a log-probability is above 0 by more than rounding (`ROUNDING`), or all are, as
            probabilities are.

    A log-probability that is above 0 by rounding counts as 0, −inf is the limit p → 0, and NaN has the interval [1, 1].
    The computation is in float64, since in float32 exp(−δ/p) alone loses 5 of 7 digits; kl for many float32 tokens has
    a method without that loss. The host never waits for an accelerator: there, every value above 0 counts as 0. Tensors
    on devices without float64 (mps) are computed on the CPU.
    """
    if not isinstance(divergence, str):
        raise ConfigError(f"divergence must be a name or module:function, not {divergence!r}")
    find_divergence(divergence)
    radius, cap = _as_float(delta), None if max_ratio is None else _as_float(max_ratio)
    if not (radius > 0.0 and math.isfinite(radius)):
        raise ConfigError(f"delta must be a finite number > 0, not {delta!r}")
    if cap is not None and not cap > 1.0:
        raise ConfigError(f"max_ratio must be a number > 1 or None, not {max_ratio!r}")
    x = _as_real_array(old_logprobs)
    if is_on_host(x):
        _check_logprobs(x)
    return logprob_bounds(x, divergence, radius, cap)


def _as_float(value: Any) -> float:
    """Return a number as a float, NaN for anything else: texts and booleans too."""
    if isinstance(value, (str, bytes, bool)):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises RuntimeError for several values
        return math.nan


def _as_real_array(value: Any) -> Array:
    """Return a tensor itself, and numbers and lists as a numpy array. Raise ConfigError for other types."""
    try:
        x = as_array(value)
        what = f"values of the type {x.dtype}"
        if str(x.dtype).removeprefix("torch.").startswith(("float", "bfloat", "int", "uint")):
            return x
    except (TypeError, ValueError):  # lists of unequal lengths, or of tensors
        what = "lists of unequal lengths"
    raise ConfigError(f"old_logprobs must be an array of real numbers, not {what}")


def _check_logprobs(x: Array) -> None:
    """Raise ConfigError for values above 0 that no rounding explains. NaN counts as neither above nor below 0."""
    if not bool((x > ROUNDING).any()):  # one pass over the values in the usual case
        return
    largest = float(x[x > 0].max())
    allowed = ROUNDING_HALF if x.dtype.itemsize == 2 else ROUNDING
    if largest > allowed or not bool((x <= 0).any()):
        advice = "a log-probability is at most 0; pass log π_old(token), not probabilities or logits"
        raise ConfigError(f"old_logprobs: the largest value is {largest:.4g}, and {advice}")


def logprob_bounds(logprobs: Array, divergence: str, delta: float, max_ratio: float | None) -> RatioBounds:
    """Return the bounds of `band_bounds` for valid arguments; every log-probability above 0 counts as 0.

    The trainer calls this function: its settings are checked when they are read, and the log-probs are its own.
    """
    x = as_array(logprobs)
    if is_tensor(x) and x.device.type == "mps":
        on_cpu = logprob_bounds(x.cpu(), divergence, delta, max_ratio)
        return RatioBounds(*(bound.to(x.device) for bound in on_cpu))
    entry, xp, flat, dtype = find_divergence(divergence), namespace(x), x.reshape(-1), output_dtype(x)
    lower, upper = xp.empty_like(flat, dtype=dtype), xp.empty_like(flat, dtype=dtype)
    in_float32 = entry.solve_float32 if dtype == xp.float32 and len(flat) >= MIN_TOKENS_FOR_TABLE else None
    with no_grad_no_warnings(x):
        for part in blocks(flat):
            if in_float32:
                logp = xp.clip(cast(flat[part], dtype), None, 0.0)
                roots = in_float32(logp, delta)
            else:
                logp = xp.clip(cast(flat[part], xp.float64), None, 0.0)
                roots = entry.solve(TokenProbs(xp.nan_to_num(logp, nan=0.0, neginf=-math.inf)), delta)
            limits = xp.clip(roots.lower, 0.0, 1.0), xp.clip(roots.upper, 1.0, max_ratio)
            for result, bound in zip((lower, upper), limits, strict=True):
                # maximum propagates a NaN of either argument; otherwise log p ≤ 0 never exceeds a bound.
                xp.maximum(bound, logp, out=bound)
                result[part] = xp.nan_to_num(bound, nan=1.0, posinf=math.inf)
    return RatioBounds(lower.reshape(x.shape), upper.reshape(x.shape))


def saturation(divergence: Divergence, prob: float, delta: float) -> tuple[bool, bool]:
    """Return whether the region contains ratio 0, and whether it contains ratio 1/p (the simplex), for p in (0, 1]."""
    is_common = prob > 0.5
    s, finder = np.float64(max(1.0 - prob, 1e-300) if is_common else prob), RootFinder(divergence.f)
    with np.errstate(all="ignore"):
        without_rare, only_rare = (bool(finder.limit(s, side) <= delta) for side in (-1, +1))
    return (only_rare, without_rare or prob == 1.0) if is_common else (without_rare, only_rare)
