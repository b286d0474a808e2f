"""Settings of the ratio-bound methods (`bounds:` in a config file): one class a method, chosen by `method`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from bandpo_cli.config.base import Section
from bandpo_cli.config.data import is_function_path
from bandpo_cli.errors import nearest

DIVERGENCES = ("kl", "reverse-kl", "tv", "chi2", "neyman", "hellinger", "le-cam", "js")
"""The divergences known by name; any other f is given as `module:function`."""


def known_divergence(name: str) -> str:
    """Accept a known name or `module:function`; raise ValueError with the nearest name otherwise."""
    if name in DIVERGENCES or is_function_path(name):
        return name
    raise ValueError(
        f"no divergence of that name{nearest(name, DIVERGENCES)}; "
        f"known: {', '.join(DIVERGENCES)}, or your own f as module:function"
    )


DivergenceName = Annotated[str, AfterValidator(known_divergence)]


class Relax(Section):
    """Never tighter than a fixed interval: min(lower, 1−eps_low), max(upper, 1+eps_high) (BandPO's ablation)."""

    eps_low: float = Field(0.2, gt=0, lt=1)
    eps_high: float = Field(0.28, gt=0)


class BandSettings(Section):
    """The interval of ratios that an f-divergence ball of radius `delta` allows each token (arXiv 2603.04918)."""

    method: Literal["band"] = "band"
    divergence: DivergenceName = "kl"
    delta: float = Field(
        0.05, gt=0, allow_inf_nan=False, description="radius of the trust region, in nats for kl"
    )
    max_ratio: float | None = Field(10.0, gt=1, description="cap on the upper bound; null for none")
    relax: Relax | None = None


class ClipSettings(Section):
    """One fixed interval [1−eps_low, 1+eps_high] for every token (PPO, GRPO)."""

    method: Literal["clip"] = "clip"
    eps_low: float = Field(0.2, gt=0, le=1)
    eps_high: float = Field(0.2, gt=0)


class ClipHigherSettings(Section):
    """The fixed interval with a higher upper end (DAPO)."""

    method: Literal["clip-higher"] = "clip-higher"
    eps_low: float = Field(0.2, gt=0, le=1)
    eps_high: float = Field(0.28, gt=0)


class DcpoSettings(Section):
    """Bounds that widen as the token gets rarer (DCPO, arXiv 2509.02333)."""

    method: Literal["dcpo"] = "dcpo"
    eps_low: float = Field(0.16, gt=0)
    eps_high: float = Field(0.2, gt=0)
    max_ratio: float | None = Field(10.0, gt=1)


class NoClipSettings(Section):
    """No clipping: the control that every comparison needs."""

    method: Literal["none"] = "none"


MethodSettings = Annotated[
    BandSettings | ClipSettings | ClipHigherSettings | DcpoSettings | NoClipSettings,
    Field(discriminator="method"),
]

METHODS = ("band", "clip", "clip-higher", "dcpo", "none")
