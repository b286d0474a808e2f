"""The divergences by name. Adding one is adding an entry: without `solve`, the generic solver finds its Band."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bandpo_cli.bounds import closed, custom, generators, solver
from bandpo_cli.bounds.arrays import Array, namespace
from bandpo_cli.bounds.generators import Generator
from bandpo_cli.bounds.kl import kl, kl_short
from bandpo_cli.bounds.values import RatioBounds, Tokens
from bandpo_cli.errors import ConfigError, nearest


@dataclass(frozen=True)
class Divergence:
    """One f-divergence D_f(π‖π_old).

    Attributes:
        region: what the trust region bounds, for people.
        f: its generator, `f(u, u−1)`.
        solve: its Band in closed form or by a method of its own; None for the generic solver.
        solve_short: the same from float32 log-probs to float32 ratios, for many tokens; None where `solve` serves.
    """

    region: str
    f: Generator
    solve: Callable[[Tokens, float], RatioBounds] | None = None
    solve_short: Callable[[Array, float], RatioBounds] | None = None

    def roots(self, tokens: Tokens, delta: float) -> RatioBounds:
        """Ratios at which g(p, r) = δ; the upper at most 1/p, the lower not yet clamped at 0. Shapes (T,)."""
        return self.solve(tokens, delta) if self.solve else solver.solve(self.f, tokens, delta)


DIVERGENCES: dict[str, Divergence] = {
    "kl": Divergence("KL(π_old‖π), nats", generators.kl, kl, kl_short),
    "reverse-kl": Divergence("KL(π‖π_old), nats", generators.reverse_kl),
    "tv": Divergence("total variation", generators.total_variation, closed.total_variation),
    "chi2": Divergence("Pearson χ²(π‖π_old)", generators.chi2, closed.chi2),
    "neyman": Divergence("Neyman χ²(π_old‖π)", generators.neyman, closed.neyman),
    "hellinger": Divergence("squared Hellinger", generators.hellinger, closed.hellinger),
    "le-cam": Divergence("triangular discrimination", generators.le_cam, closed.le_cam),
    "js": Divergence("Jensen–Shannon, nats", generators.jensen_shannon),
}


def find(name: str) -> Divergence:
    """The divergence of that name, or a user's own f for `module:function`. Raises ConfigError."""
    if name in DIVERGENCES:
        return DIVERGENCES[name]
    if ":" not in name:
        raise ConfigError(
            f"divergence '{name}' is not known{nearest(name, DIVERGENCES)}; "
            f"known: {', '.join(DIVERGENCES)}, or your own f as module:function"
        )
    return Divergence("your own f", custom.generator(name))


def divergence_at(divergence: Divergence, tokens: Tokens, ratio: float) -> float:
    """g(p, r) of docs/bounds.md: the least divergence at which a token of probability p can have ratio r ≤ 1/p.

    `tokens` hold one token, as numpy arrays of shape (1,). inf where no radius is enough, as r = 1/p for kl.
    """
    xp, p, m = namespace(tokens.p), tokens.p, tokens.m
    x = xp.zeros_like(p) + (ratio - 1.0)
    other_x = xp.clip(-p * x / m, -1.0, None)
    terms = p * divergence.f(1.0 + x, x) + m * divergence.f(1.0 + other_x, other_x)
    return float(terms[0])
