"""Settings of the methods that are an interval of ratios (`bounds:` in a config file), one class per method.

`bounds.method` chooses the class. The other methods are in `config.policy_losses`. A new method needs a class, a
function in `bounds.intervals` or a loss in `objective`, and an entry in `registries.METHODS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from bandpo_cli.config.section import Choice, Positive, Section
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

    def published(self) -> Self:
        """Return the method with the default settings, which are those of its paper or of public code that it names."""
        return type(self)()  # type: ignore[call-arg]

    def source(self) -> str:
        """Return the method's paper, and which settings differ from the published ones; "" without a paper."""
        paper = METHODS[self.method].paper
        if not paper:
            return ""
        published = self.published()
        changed = [
            name for name in type(self).model_fields if getattr(self, name) != getattr(published, name)
        ]
        return f"{paper}, {', '.join(changed)} changed" if changed else f"{paper}, published defaults"

    def scheduled(self, step: int, steps: int) -> dict[str, float]:
        """Return the settings that change over training, with their values at step `step` of `steps` (from 1)."""
        return {}

    def at_step(self, step: int, steps: int) -> Self:
        """Return the settings with the values of `scheduled`."""
        return self.model_copy(update=self.scheduled(step, steps))

    def schedules_over_run(self) -> dict[str, str]:
        """Return the schedules, by key, that end with the run: its number of steps is part of every step."""
        return {}


DELTA_SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "linear": lambda progress, power: 1.0 - progress,
    "cosine": lambda progress, power: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "polynomial": lambda progress, power: (1.0 - progress) ** power,
}
"""Share of `delta` in the radius by schedule, from the progress 0 to 1 and `delta_power`; the rest is `delta_end`."""

_DEFAULT_POWER = 2.0  # as in BandPO's code: verl/bandpo/decaying_clipbound/decaying_clipbound.py
_SCHEDULE_FIELDS = ("delta_schedule", "delta_end", "delta_power", "delta_steps")


class TrustRegionSettings(MethodSettings):
    """Base class of the settings of a method with a trust region, whose radius may change over training."""

    divergence: DivergenceName = "kl"
    delta: Positive = Field(0.05, description="radius of the trust region, in nats for kl")
    delta_schedule: Literal["constant", "linear", "cosine", "polynomial"] = "constant"
    """The radius over training: `delta` throughout, or from `delta` at step 0 to `delta_end`."""
    delta_end: Positive | None = None
    """With a schedule: the radius at its end."""
    delta_power: Positive | None = None
    """With the polynomial schedule: the exponent; null for 2, as in BandPO's code."""
    delta_steps: PositiveInt | None = None
    """With a schedule: the step from which the radius is `delta_end`; null for the last step of the run."""

    def scheduled(self, step: int, steps: int) -> dict[str, float]:
        """Return the radius at a step, delta_end + (delta − delta_end)·share; the share falls from 1 to 0."""
        if self.delta_end is None:
            return {}
        progress = min(1.0, step / (self.delta_steps or steps))
        share = DELTA_SCHEDULES[self.delta_schedule](progress, self.delta_power or _DEFAULT_POWER)
        return {"delta": self.delta_end + (self.delta - self.delta_end) * share}

    def schedules_over_run(self) -> dict[str, str]:
        """Return the radius' schedule if it runs over all steps."""
        return {"bounds.delta_schedule": self.delta_schedule} if self.delta_steps is None else {}

    def region(self) -> str:
        """Return the trust region without its radius, as names of variants have it: `kl`, `dppo kl`."""
        return self.divergence if METHODS[self.method].named_by_region else f"{self.method} {self.divergence}"

    def describe_radius(self) -> str:
        """Return the radius, and its schedule where it has one."""
        if self.delta_end is None:
            return f"δ = {self.delta:g}"
        power = (
            f" of power {self.delta_power or _DEFAULT_POWER:g}" if self.delta_schedule == "polynomial" else ""
        )
        over = f"{self.delta_steps:,} steps" if self.delta_steps else "the run"
        return f"δ = {self.delta:g} → {self.delta_end:g} ({self.delta_schedule}{power} over {over})"

    def slug(self) -> str:
        """Return the method's component of a run's name: method, divergence, radius."""
        divergence = self.divergence.replace(":", "-").replace(".", "-")
        end = "" if self.delta_end is None else f"-to-{self.delta_end:g}"
        return f"{self.method}-{divergence}-{self.delta:g}{end}"

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.delta_schedule == "constant":
            unused = [name for name in _SCHEDULE_FIELDS[1:] if getattr(self, name) is not None]
            if unused:
                raise ValueError(
                    f"{unused[0]} = {getattr(self, unused[0]):g} needs a schedule; set delta_schedule to one of "
                    f"{', '.join(DELTA_SCHEDULES)}"
                )
        elif self.delta_end is None:
            raise ValueError(
                f"delta_schedule = {self.delta_schedule!r} needs delta_end, the radius at its end"
            )
        if self.delta_power is not None and self.delta_schedule != "polynomial":
            raise ValueError(
                f"delta_power = {self.delta_power:g} applies only to delta_schedule = 'polynomial', "
                f"not to {self.delta_schedule!r}"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_unused_schedule(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the keys of the schedule where there is none, so that config.yaml names only what is in effect."""
        dumped: dict[str, Any] = handler(self)
        if self.delta_end is None:
            dumped = {name: value for name, value in dumped.items() if name not in _SCHEDULE_FIELDS}
        return dumped


class Relax(Section):
    """Never tighter than a fixed interval: min(lower, 1−eps_low), max(upper, 1+eps_high) (BandPO's ablation)."""

    eps_low: float = Field(0.2, gt=0, lt=1)
    eps_high: float = Field(0.28, gt=0)


class BandSettings(TrustRegionSettings):
    """The interval of ratios that an f-divergence ball of radius `delta` allows each token (arXiv 2603.04918)."""

    method: Literal["band"] = "band"
    max_ratio: float | None = Field(10.0, gt=1, description="cap on the upper bound; null for none")
    relax: Relax | None = None

    def describe(self) -> str:
        cap = f", ratio ≤ {self.max_ratio:g}" if self.max_ratio is not None else ""
        relaxed = (
            f", never tighter than −{self.relax.eps_low:g}/+{self.relax.eps_high:g}" if self.relax else ""
        )
        return f"Band of the {self.divergence} trust region, {self.describe_radius()}{cap}{relaxed}"


class IntervalSettings(MethodSettings):
    """Base class of the settings of a method with one fixed interval [1−eps_low, 1+eps_high] for every token."""

    eps_low: float = Field(0.2, gt=0, le=1)
    eps_high: float = Field(0.2, gt=0)

    def describe(self) -> str:
        aliases = ", ".join(name.upper() for name in METHODS[self.method].aliases)
        return f"{self.method} ({aliases}): {self.interval}" if aliases else f"{self.method}: {self.interval}"

    @property
    def interval(self) -> str:
        """The interval for a description: `ratio in [0.8, 1.2]`."""
        return f"ratio in [{1 - self.eps_low:g}, {1 + self.eps_high:g}]"


class ClipSettings(IntervalSettings):
    """One fixed interval for every token (PPO, GRPO)."""

    method: Literal["clip"] = "clip"


class ClipHigherSettings(IntervalSettings):
    """The fixed interval with a higher upper end (DAPO)."""

    method: Literal["clip-higher"] = "clip-higher"
    eps_high: float = Field(0.28, gt=0)


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


def method_classes() -> dict[str, type[MethodSettings]]:
    """Return the settings class of each registered method."""
    return {name: load_attribute(entry.settings) for name, entry in METHODS.items()}


METHOD_CHOICE = Choice(method_classes, "method")


def bounded_methods() -> dict[str, MethodSettings]:
    """Return the default settings of each method that is an interval of ratios, apart from the Band itself.

    The Band is described by divergence and radius, and not by its name.
    """
    return {
        name: cls()  # type: ignore[call-arg]
        for name, cls in method_classes().items()
        if METHODS[name].bounds is not None and not METHODS[name].named_by_region
    }
