"""Settings of the ratio-bound methods (`bounds:` in a config file): one class per method, chosen by `method`.

A new method needs a class here, a function in `bounds.methods` and an entry in `registries.METHODS`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from bandpo_cli.config.base import Choice, Section
from bandpo_cli.registries import DIVERGENCES, METHODS, load_attribute

DivergenceName = Annotated[str, AfterValidator(DIVERGENCES.check_name)]


class MethodSettings(Section):
    """Base class of the settings of a method. Each setting of a subclass has a default."""

    method: str

    def describe(self) -> str:
        """Return the method with the settings that matter, in one line."""
        return f"{self.method}: {METHODS[self.method].summary}"

    def slug(self) -> str:
        """Return the method's component of a run's name."""
        return self.method


class Relax(Section):
    """Never tighter than a fixed interval: min(lower, 1−eps_low), max(upper, 1+eps_high) (BandPO's ablation)."""

    eps_low: float = Field(0.2, gt=0, lt=1)
    eps_high: float = Field(0.28, gt=0)


class BandSettings(MethodSettings):
    """The interval of ratios that an f-divergence ball of radius `delta` allows each token (arXiv 2603.04918)."""

    method: Literal["band"] = "band"
    divergence: DivergenceName = "kl"
    delta: float = Field(
        0.05, gt=0, allow_inf_nan=False, description="radius of the trust region, in nats for kl"
    )
    max_ratio: float | None = Field(10.0, gt=1, description="cap on the upper bound; null for none")
    relax: Relax | None = None

    def describe(self) -> str:
        cap = f", ratio ≤ {self.max_ratio:g}" if self.max_ratio is not None else ""
        relaxed = (
            f", never tighter than −{self.relax.eps_low:g}/+{self.relax.eps_high:g}" if self.relax else ""
        )
        return f"Band of the {self.divergence} trust region, δ = {self.delta:g}{cap}{relaxed}"

    def slug(self) -> str:
        divergence = self.divergence.replace(":", "-").replace(".", "-")
        return f"band-{divergence}-{self.delta:g}"


class ClipSettings(MethodSettings):
    """One fixed interval [1−eps_low, 1+eps_high] for every token (PPO, GRPO)."""

    method: Literal["clip"] = "clip"
    eps_low: float = Field(0.2, gt=0, le=1)
    eps_high: float = Field(0.2, gt=0)

    def describe(self) -> str:
        return _describe_interval(self)


class ClipHigherSettings(MethodSettings):
    """The fixed interval with a higher upper end (DAPO)."""

    method: Literal["clip-higher"] = "clip-higher"
    eps_low: float = Field(0.2, gt=0, le=1)
    eps_high: float = Field(0.28, gt=0)

    def describe(self) -> str:
        return _describe_interval(self)


class DcpoSettings(MethodSettings):
    """Bounds that widen as the token gets rarer (DCPO, arXiv 2509.02333)."""

    method: Literal["dcpo"] = "dcpo"
    eps_low: float = Field(0.16, gt=0)
    eps_high: float = Field(0.2, gt=0)
    max_ratio: float | None = Field(10.0, gt=1)

    def describe(self) -> str:
        return f"dcpo: dynamic bounds, ε = {self.eps_low:g}/{self.eps_high:g}"


class NoClipSettings(MethodSettings):
    """No clipping: the control that every comparison needs."""

    method: Literal["none"] = "none"

    def describe(self) -> str:
        return "none: no bound on the ratio"


def _describe_interval(settings: ClipSettings | ClipHigherSettings) -> str:
    aliases = ", ".join(name.upper() for name in METHODS[settings.method].aliases)
    name = f"{settings.method} ({aliases})" if aliases else settings.method
    return f"{name}: ratio in [{1 - settings.eps_low:g}, {1 + settings.eps_high:g}]"


def method_classes() -> dict[str, type[MethodSettings]]:
    """Return the settings class of each registered method."""
    return {name: load_attribute(entry.settings) for name, entry in METHODS.items()}


METHOD_CHOICE = Choice(method_classes, "method")


def method_defaults() -> dict[str, MethodSettings]:
    """Return the default settings of each method that is compared by its name: all but those with a trust region."""
    return {name: cls() for name, cls in method_classes().items() if not METHODS[name].trust_region}  # type: ignore[call-arg]
