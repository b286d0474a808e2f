"""The Band operator, the f-divergences that it bounds, their closed forms, and custom f named `module:function`.

D_f(π‖π_old) = Σ π_old f(π/π_old) with f convex and f(1) = 0. A new divergence needs a `Divergence` at the end of this
file and an entry in `registries.DIVERGENCES`; without a closed form the generic solver computes its Band.

The generators take u ≥ 0 and x = u−1 separately, so that neither end loses its digits. The closed forms are written as
ratios, so that no small p cancels (docs/bounds.md). They return the roots of g(p, r) = δ, the upper at most 1/p. A
lower root below 0 means that the region extends beyond the simplex there: `band_bounds` clamps it.

The paper's Band, KL(π_old‖π) ≤ δ, is solved by Newton's method in the natural parameter. With s = min(p, 1−p) and
t = logit q − logit s the constraint is F(t) = log1p(s·expm1(t)) − s·t = δ, smooth and convex with F' = q−s. Its two
roots are the bounds of the rarer side, and exchanged those of the other side. At a root, log r = (1−s)·t − δ for the
rarer side and −s·t − δ for the other one. Many tokens need fewer steps: in float64 two from the generic solver's table
of starts; in float32 (`kl_bounds_float32`) none. There log r is interpolated as a function of y = −log p, with a
relative error of about 2e-7. The piece is read from the bits of y, without a logarithm; on its relative half-width of
2⁻¹¹ a parabola has an error of 1e-8. float32 cannot represent an exponent of 87 with 7 decimals, so the ratio at the
middle of each piece is tabulated, and only the small change of log r within it is computed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from bandpo_cli.bounds.arrays import (
    Array,
    Generator,
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
    take,
)
from bandpo_cli.bounds.solver import SMALLEST, RootFinder, initial_guess, solve_generic
from bandpo_cli.custom_code import load_setting
from bandpo_cli.errors import ConfigError, user_code
from bandpo_cli.registries import DIVERGENCES, load_attribute

ROUNDING, ROUNDING_HALF = 1e-3, 1.0
"""Largest log-probability above 0 that rounding explains, in float32 and float64, and in float16 and bfloat16.

log_softmax gives none above 0. Where the logit of the token and the normalizer come from separate matrix products, 5e-5
was measured in float32, 0.06 in float16 and 0.5 in bfloat16, with logits of about 100.
"""

# Replace 0 and ∞ in the argument of a custom f, where an expression such as u·log u is not a number.
_NEAR_ZERO, _NEAR_INFINITY = 2.0**-1000, 2.0**1000

# Sufficient from the outer starts: 30 and 48 steps agree to 6e-14 in t for log p in [−80, −1e-9], δ in [1e-4, 2].
_NEWTON_STEPS = 40
_STEPS_FROM_TABLE = 2  # Sufficient from the table, whose error of 3e-5 each step squares
MIN_TOKENS_FOR_TABLE = 4096
"""Smallest number of tokens for tables, which are reused, since δ is the same in each step of training."""
# Range of y of the float32 tables: from 2⁻³⁶, where results equal the limit p→1, to 128, where 1/p overflows.
_FIRST_OCTAVE, _LAST_OCTAVE = -36, 7

_F32_BITS = 10
_F32_SHIFT = 23 - _F32_BITS
_HALF = 0.5 * 2.0**-_F32_BITS
_F32_ONE = 127 << 23
_F32_FIRST = (127 + _FIRST_OCTAVE) << _F32_BITS
_F32_PIECES = (_LAST_OCTAVE - _FIRST_OCTAVE) << _F32_BITS
_NODE = _HALF * math.sqrt(0.75)  # Distance of the outer Chebyshev nodes of a parabola from its middle
_LOG_RATIO_FLOOR = -120.0  # exp of this is 0 in float32; below it log r is too steep for a parabola per piece

Float32Table = tuple[Array, ...]
"""One bound: its ratio at the middle of each piece, slope and curvature of log r there; float32, shapes (pieces,)."""


@dataclass(frozen=True)
class Divergence:
    """An f-divergence D_f(π‖π_old)."""

    f: Generator  # called as f(u, u−1)
    # The Band, the ratios r with g(p, r) = δ, [T]: the upper at most 1/p, the lower not yet clamped at 0. None for the
    # generic solver. The other one computes it in float32 for many tokens.
    closed_form: Callable[[TokenProbs, float], RatioBounds] | None = None
    solve_float32: Callable[[Array, float], RatioBounds] | None = None


def find_divergence(name: str) -> Divergence:
    """Return the divergence of that name, or of a custom f, `module:function`; raise ConfigError if there is none."""
    if name in DIVERGENCES:
        divergence: Divergence = load_attribute(DIVERGENCES[name].divergence)
        return divergence
    if ":" in name:
        return Divergence(custom_generator(name))
    raise ConfigError(f"divergence '{name}' is not known{DIVERGENCES.suggestion(name)}")


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


def logprob_bounds(x: Array, divergence: str, delta: float, max_ratio: float | None) -> RatioBounds:
    """Return the bounds of `band_bounds` for valid arguments and an array; every log-probability above 0 counts as 0.

    The trainer calls this function: its settings are checked when they are read, and the log-probs are its own.
    """
    if is_tensor(x) and x.device.type == "mps":
        on_cpu = logprob_bounds(x.cpu(), divergence, delta, max_ratio)
        return RatioBounds(*(bound.to(x.device) for bound in on_cpu))
    entry, xp, flat, dtype = find_divergence(divergence), namespace(x), x.reshape(-1), output_dtype(x)
    lower, upper = xp.empty_like(flat, dtype=dtype), xp.empty_like(flat, dtype=dtype)
    solve = entry.closed_form or partial(solve_generic, entry.f)
    in_float32 = entry.solve_float32 if dtype == xp.float32 and len(flat) >= MIN_TOKENS_FOR_TABLE else None
    with no_grad_no_warnings(x):
        for part in blocks(flat):
            if in_float32:
                logp = xp.clip(cast(flat[part], dtype), None, 0.0)
                roots = in_float32(logp, delta)
            else:
                logp = xp.clip(cast(flat[part], xp.float64), None, 0.0)
                roots = solve(TokenProbs(xp.nan_to_num(logp, nan=0.0, neginf=-math.inf)), delta)
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


def total_variation_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """Return the roots of |q−p| = δ."""
    step = delta / tokens.p
    return _cap_at_simplex(tokens, 1.0 - step, 1.0 + step)


def chi2_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """Return the roots of (q−p)² = δ p(1−p)."""
    step = tokens.xp.sqrt(delta * (tokens.m / tokens.p))
    return _cap_at_simplex(tokens, 1.0 - step, 1.0 + step)


def neyman_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """Return the roots of (q−p)² = δ q(1−q), Wilson's score interval; the lower one from the product of both."""
    xp, p = tokens.xp, tokens.p
    upper = (2.0 * p + delta + xp.sqrt(delta * delta + 4.0 * delta * p * tokens.m)) / (2.0 * (1.0 + delta))
    return _cap_at_simplex(tokens, p / ((1.0 + delta) * upper), upper / p)


def hellinger_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """Return the ratios of √q = sin(asin√p ± φ) with cos φ = 1−δ/2, by the addition theorem; δ > 2 counts as 2."""
    xp = tokens.xp
    delta = min(delta, 2.0)
    cosine, sine = 1.0 - delta / 2.0, math.sqrt(delta * (1.0 - delta / 4.0))
    spread = xp.sqrt(tokens.m / tokens.p) * sine
    lower, upper = xp.clip(cosine - spread, 0.0, None), cosine + spread
    beyond_corner = tokens.m * cosine**2 <= tokens.p * sine**2
    return _cap_at_simplex(tokens, lower * lower, xp.where(beyond_corner, 1.0 / tokens.p, upper * upper))


def le_cam_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """Return the roots of (2+δ)q² − 2Bq + 2p² − δp(2−p) with B = δ(1−p) + 2p; the lower one from the product."""
    xp, p = tokens.xp, tokens.p
    sum_ = delta * tokens.m + 2.0 * p + xp.sqrt(delta * delta + 8.0 * delta * p * tokens.m)
    return _cap_at_simplex(tokens, (2.0 * p - delta * (1.0 + tokens.m)) / sum_, sum_ / ((2.0 + delta) * p))


def kl_bounds(tokens: TokenProbs, delta: float) -> RatioBounds:
    """Return the interval of ratios. The lower bound is about exp(−δ/p) for rare tokens and finally underflows to 0."""
    xp = tokens.xp
    log_lower, log_upper = _log_ratios(tokens, delta, from_table=len(tokens.logp) >= MIN_TOKENS_FOR_TABLE)
    # The limit of the simplex, r ≤ 1/p, is applied to the logarithm: after exp it would need a second exponential.
    return RatioBounds(xp.exp(log_lower), xp.exp(xp.minimum(log_upper, -tokens.logp)))


def _log_ratios(tokens: TokenProbs, delta: float, from_table: bool) -> tuple[Array, Array]:
    """Return the logarithms of both bounds, each of shape (T,)."""
    xp = tokens.xp
    common = tokens.p > 0.5
    s = xp.clip(xp.minimum(tokens.p, tokens.m), SMALLEST, None)
    fall, rise = _newton(s, delta, -1, from_table), _newton(s, delta, +1, from_table)
    weight = xp.where(common, -s, 1.0 - s)
    beyond = xp.where(common, 0.0, xp.log(s) - tokens.logp)
    lower = weight * xp.where(common, rise, fall) - delta
    return lower, weight * xp.where(common, fall, rise) - delta + xp.clip(beyond, 0.0, None)


def _newton(s: Array, delta: float, side: int, from_table: bool = False) -> Array:
    """Return the root by Newton's method.

    The start is the table of the generic solver, or outside of the root, where the steps converge monotonically without
    a bracket.
    """
    xp = namespace(s)
    if from_table:
        t = initial_guess(_newton, s, delta, side)
    else:
        t = (delta - xp.log(s)) / (1.0 - s) if side > 0 else (xp.log1p(-s) - delta) / s
    for _ in range(_STEPS_FROM_TABLE if from_table else _NEWTON_STEPS):
        w = s * xp.expm1(t)
        t = t - (xp.log1p(w) - s * t - delta) / ((s + w) / (1.0 + w) - s)
    return t


def kl_bounds_float32(logp: Array, delta: float) -> RatioBounds:
    """Return the interval of ratios for many float32 log-probs, shape (T,), computed in float32; undefined for NaN."""
    xp = namespace(logp)
    lower, upper = _float32_tables(delta, type(logp).__qualname__, xp, logp.device)
    y = -logp
    bits = xp.clip(y, 2.0**_FIRST_OCTAVE, None).view(xp.int32)
    piece = bits >> _F32_SHIFT
    piece -= _F32_FIRST
    xp.clip(piece, 0, _F32_PIECES - 1, out=piece)
    # The bits below those of the piece, with the exponent of 1, are a number in [1, 1 + 2⁻¹⁰); minus its middle.
    bits &= (1 << _F32_SHIFT) - 1
    bits |= _F32_ONE
    x = bits.view(xp.float32)
    x -= 1.0 + _HALF
    low, high = _evaluate(lower, piece, x), _evaluate(upper, piece, x)
    return RatioBounds(low, xp.minimum(high, xp.exp(y, out=y), out=high))


def _evaluate(table: Float32Table, piece: Array, x: Array) -> Array:
    """Return the ratios of one bound. All operations are in place: new memory would cost more than the arithmetic."""
    ratio, slope, curvature = (take(column, piece) for column in table)
    curvature *= x
    curvature += slope
    curvature *= x
    namespace(x).exp(curvature, out=curvature)
    curvature *= ratio
    return curvature


@lru_cache(maxsize=32)
def _float32_tables(delta: float, kind: str, xp: Any, device: Any) -> tuple[Float32Table, Float32Table]:
    """Return the tables of both bounds on the device. `kind` separates those of traced and real tensors."""
    number = xp.arange(_F32_PIECES, dtype=xp.int64, device=device)
    octave = cast(number >> _F32_BITS, xp.float64) + _FIRST_OCTAVE
    center = 1.0 + _HALF + cast(number & ((1 << _F32_BITS) - 1), xp.float64) * 2.0**-_F32_BITS
    nodes = (TokenProbs(-xp.exp2(octave) * (center + node)) for node in (-_NODE, 0.0, _NODE))
    at_nodes = [_log_ratios(tokens, delta, from_table=False) for tokens in nodes]
    tables = []
    # A parabola through log r at the Chebyshev nodes of each piece.
    for values in zip(*at_nodes, strict=True):
        left, middle, right = (xp.clip(value, _LOG_RATIO_FLOOR, None) for value in values)
        slope = (right - left) / (2.0 * _NODE)
        curvature = (right + left - 2.0 * middle) / (2.0 * _NODE**2)
        tables.append(tuple(cast(column, xp.float32) for column in (xp.exp(middle), slope, curvature)))
    return tables[0], tables[1]


@lru_cache(maxsize=64)
def custom_generator(name: str) -> Generator:
    """Load `module:function`; raise ConfigError unless it is finite, 0 at 1 and convex for u from 1e-4 to 1e4.

    The function takes u = π/π_old as an array (numpy, or torch when the log-probabilities are tensors) and returns f(u)
    of the same shape.
    """
    u = np.unique(np.concatenate([np.logspace(-4, 4, 161), np.linspace(0.5, 1.5, 41)]))
    function: Callable[[Array], Array] = load_setting("divergence", name)
    with user_code(f"divergence '{name}'", function), np.errstate(all="ignore"):
        values = np.asarray(function(u), np.float64)
        if values.shape != u.shape:
            raise ValueError(f"f(u) has shape {values.shape} for u of shape {u.shape}")
        if not np.isfinite(values).all():
            raise ValueError(f"f(u) is not finite at u = {u[~np.isfinite(values)][0]:g}")
        if abs(at_one := float(function(np.ones(1))[0])) > 1e-9:
            raise ValueError(f"f(1) must be 0 and is {at_one:g}")
        # convex: each value lies on or below the chord of its two neighbours
        left, middle, right = values[:-2], values[1:-1], values[2:]
        above = middle - (left + (right - left) * (u[1:-1] - u[:-2]) / (u[2:] - u[:-2]))
        if (above > 1e-9 * (np.abs(left) + np.abs(right) + 1e-3)).any():
            raise ValueError(f"f is not convex: it bends down at u = {u[1:-1][above.argmax()]:g}")
    return lambda u, x: function(namespace(u).clip(u, _NEAR_ZERO, _NEAR_INFINITY))


def _u_log_u(u: Array, x: Array) -> Array:
    """Return u log u, which is 0 at u = 0 although the logarithm is not finite there."""
    xp = namespace(u)
    return u * xp.log1p(xp.clip(x, -1.0 + 2.0**-53, None))


def _cap_at_simplex(tokens: TokenProbs, lower: Array, upper: Array) -> RatioBounds:
    """Return the bounds with the upper one at most 1/p."""
    return RatioBounds(lower, namespace(upper).minimum(upper, 1.0 / tokens.p))


def _log(u: Array, x: Array) -> Array:
    """Return log u."""
    xp = namespace(u)
    return xp.where(x < -0.5, xp.log(u), xp.log1p(x))


def _hellinger_root(u: Array, x: Array) -> Array:
    """Return √u − 1."""
    return x / (1.0 + namespace(u).sqrt(u))


def _f_js(u: Array, x: Array) -> Array:
    return 0.5 * (_u_log_u(u, x) - (1.0 + u) * namespace(u).log1p(0.5 * x))


KL = Divergence(lambda u, x: x - _log(u, x), kl_bounds, kl_bounds_float32)  # −log u + u − 1
REVERSE_KL = Divergence(lambda u, x: _u_log_u(u, x) - x)  # u log u − u + 1
TOTAL_VARIATION = Divergence(lambda u, x: 0.5 * abs(x), total_variation_bounds)  # ½|u − 1|
CHI2 = Divergence(lambda u, x: x * x, chi2_bounds)  # (u − 1)²
NEYMAN = Divergence(lambda u, x: x * x / u, neyman_bounds)  # (u − 1)²/u
HELLINGER = Divergence(lambda u, x: _hellinger_root(u, x) ** 2, hellinger_bounds)  # (√u − 1)²
LE_CAM = Divergence(lambda u, x: x * x / (1.0 + u), le_cam_bounds)  # (u − 1)²/(u + 1)
JENSEN_SHANNON = Divergence(_f_js)  # ½u log(2u/(1 + u)) + ½log(2/(1 + u)), in nats
