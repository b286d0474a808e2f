"""Methods: the base classes of their settings (`bounds:` in a config file), and the Band, which is the default method.

`bounds.method` chooses the class. Defaults are those that the source named in each class publishes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from bandpo_cli.bounds.arrays import Array, RatioBounds, namespace
from bandpo_cli.bounds.band import logprob_bounds
from bandpo_cli.bounds.intervals import BoundsFunction, fixed_bounds
from bandpo_cli.errors import ConfigError
from bandpo_cli.methods import METHODS, MethodEntry, method_name
from bandpo_cli.registries import DIVERGENCES, load_attribute
from bandpo_cli.settings_validation import Positive, Section, TaggedSection, require

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo_cli.methods.loss import Columns, LossBatch

DivergenceName = Annotated[str, AfterValidator(DIVERGENCES.check_name)]
Share = Annotated[float, Field(gt=0, le=1)]
MaxRatio = Annotated[float, Field(gt=1)]


class MethodSettings(TaggedSection):
    """Base class of a method. Each setting of a subclass has a default.

    A method that is an interval of ratios defines `ratio_bounds`, any other method `token_losses`, and `prepare` if
    its loss needs values that are computed from π_old. Three class variables are as in `PolicyLoss`.
    """

    tag = "method"
    default = "band"
    custom = "module:name"
    text: ClassVar[str] = "{s.method}: {s.entry.summary}"  # one line; `{s.NAME}` is the setting NAME
    needs_all_tokens: ClassVar[bool] = False
    needs_sampler: ClassVar[bool] = False
    adapts: ClassVar[bool] = False
    has_negative: ClassVar[bool] = True  # completions with a negative advantage have a loss

    method: str

    @classmethod
    def classes(cls) -> Mapping[str, type[Self]]:
        """Return the settings class of each registered method, and of custom ones."""
        registered = {name: load_attribute(entry.settings) for name, entry in METHODS.items()}
        return registered | {cls.custom: CustomSettings}

    @classmethod
    def kind_of(cls, section: Mapping[str, Any]) -> Any:
        """Return the name of the method in a section, also where the section has an alias: `grpo` is `clip`."""
        return method_name(super().kind_of(section))

    @property
    def entry(self) -> MethodEntry:
        """The entry of the method in `METHODS`."""
        return METHODS[self.method]

    def describe(self) -> str:
        """Return the method with the settings that matter, in one line."""
        return self.text.format(s=self)

    def slug(self) -> str:
        """Return the method's component of a run's name."""
        return self.method

    def published(self) -> Self:
        """Return the method with the default settings, which are those of its paper or of public code that it names."""
        return cast("Self", type(self).model_construct())  # type: ignore[call-arg]

    def source(self) -> str:
        """Return the method's paper, and which settings differ from the published ones; "" without a paper."""
        if not self.entry.paper:
            return ""
        published = vars(self.published())
        changed = ", ".join(name for name, value in vars(self).items() if value != published[name])
        return f"{self.entry.paper}, " + (f"{changed} changed" if changed else "published defaults")

    def scheduled(self, step: int, steps: int) -> dict[str, float]:
        """Return the settings that change over training, with their values at step `step` of `steps` (from 1)."""
        return {}

    def ratio_bounds(self) -> BoundsFunction:
        """Return the interval of ratios beyond which the method removes a token's gradient, by the advantage's sign.

        Raises:
            ConfigError: the method has no interval of ratios; the message gives the reason.
        """
        raise ConfigError(f"{self.method} has no interval of ratios: {self.entry.without_bounds}")

    def interval_curves(self) -> dict[str, BoundsFunction]:
        """Return the intervals that `bandpo bounds --compare` shows, by label."""
        return {self.method: self.ratio_bounds()}

    def prepare(self, old_logprobs: Tensor, advantages: Tensor) -> Columns:
        """Return the values per token that `token_losses` needs; see `PolicyLoss.prepare`."""
        return {}

    def adapt(self, batch: LossBatch, logprobs: Tensor) -> Columns:
        """Return the columns of an update; see `PolicyLoss.adapt`."""
        raise NotImplementedError

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return the loss of each token, [n]; see `PolicyLoss.token_losses`."""
        raise NotImplementedError("the class defines no token_losses(logprobs, batch)")


class CustomSettings(MethodSettings):
    """Custom code: a subclass of `PolicyLoss`, or a function from log π_old to the bounds (lower, upper) of the ratio.

    A run imports the code before it starts, checks the options, and adds their defaults.
    """

    method: str = MethodSettings.custom
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """The fields of the pydantic class `Options` in the policy loss, or the function's arguments after the first."""

    def describe(self) -> str:
        options = ", ".join(f"{name} = {value}" for name, value in self.options.items())
        return f"custom: {self.method}" + (f", {options}" if options else "")

    def slug(self) -> str:
        return self.method.replace(":", "-").replace(".", "-")

    def ratio_bounds(self) -> BoundsFunction:
        function: BoundsFunction = load_attribute("bandpo_cli.objective.custom_methods:custom_bounds")(self)
        return function


DELTA_SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "linear": lambda progress, power: 1.0 - progress,
    "cosine": lambda progress, power: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "polynomial": lambda progress, power: (1.0 - progress) ** power,
}
"""Share of `delta` in the radius by schedule, from the progress 0 to 1 and `delta_power`; the rest is `delta_end`."""

_DEFAULT_POWER = 2.0  # as in BandPO's code: verl/bandpo/decaying_clipbound/decaying_clipbound.py
_SCHEDULE_FIELDS = ("delta_end", "delta_power", "delta_steps")


class TrustRegionSettings(MethodSettings):
    """Base class of the settings of a method with a trust region, whose radius may change over training."""

    divergence: DivergenceName = "kl"
    """The f-divergence of the trust region; dppo has kl and tv only."""
    delta: Positive = 0.05
    """The radius of the trust region, in nats for kl."""
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

    def region(self) -> str:
        """Return the trust region without its radius, as names of variants have it: `kl`, `dppo kl`."""
        return self.divergence if self.entry.named_by_region else f"{self.method} {self.divergence}"

    def interval_curves(self) -> dict[str, BoundsFunction]:
        return {self.region(): self.ratio_bounds()}

    @property
    def radius(self) -> str:
        """The radius, and its schedule where it has one: `δ = 0.2 → 0.02 (linear over the run)`."""
        if self.delta_end is None:
            return f"δ = {self.delta:g}"
        power = f" of power {self.delta_power or _DEFAULT_POWER:g}"
        schedule = self.delta_schedule + (power if self.delta_schedule == "polynomial" else "")
        over = f"{self.delta_steps:,} steps" if self.delta_steps else "the run"
        return f"δ = {self.delta:g} → {self.delta_end:g} ({schedule} over {over})"

    def slug(self) -> str:
        """Return the method's component of a run's name: method, divergence, radius."""
        divergence = self.divergence.replace(":", "-").replace(".", "-")
        end = "" if self.delta_end is None else f"-to-{self.delta_end:g}"
        return f"{self.method}-{divergence}-{self.delta:g}{end}"

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        schedule, needs = self.delta_schedule, f"set delta_schedule to one of {', '.join(DELTA_SCHEDULES)}"
        for name in _SCHEDULE_FIELDS:
            value = getattr(self, name)
            require(schedule != "constant" or not value, f"{name} = {value} needs a schedule; {needs}")
        require(
            schedule == "constant" or self.delta_end,
            f"delta_schedule = {schedule!r} needs delta_end, the radius at its end",
        )
        require(
            schedule == "polynomial" or not self.delta_power,
            f"delta_power = {self.delta_power} applies only to delta_schedule = 'polynomial', not to {schedule!r}",
        )
        return self

    @model_serializer(mode="wrap")
    def _without_unused_schedule(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the keys of the schedule where there is none, so that config.yaml names only what is in effect."""
        unused = () if self.delta_end else ("delta_schedule", *_SCHEDULE_FIELDS)
        return {name: value for name, value in handler(self).items() if name not in unused}


class Relax(Section):
    """Never tighter than a fixed interval: min(lower, 1−eps_low), max(upper, 1+eps_high) (BandPO's ablation)."""

    eps_low: float = Field(0.2, gt=0, lt=1)
    eps_high: float = Field(0.28, gt=0)
    """The fixed interval of ratios is [1 − eps_low, 1 + eps_high]."""


class BandSettings(TrustRegionSettings):
    """The interval of ratios that an f-divergence ball of radius `delta` allows each token (arXiv 2603.04918)."""

    method: Literal["band"] = "band"
    max_ratio: MaxRatio | None = 10.0
    """Cap on the upper bound; null for none."""
    relax: Relax | None = None

    def describe(self) -> str:
        cap = "" if self.max_ratio is None else f", ratio ≤ {self.max_ratio:g}"
        text = f"Band of the {self.divergence} trust region, {self.radius}{cap}"
        relax = self.relax
        return text if relax is None else f"{text}, never tighter than −{relax.eps_low:g}/+{relax.eps_high:g}"

    def ratio_bounds(self) -> BoundsFunction:
        """Return the Band, capped at `max_ratio` and widened to the interval of `relax` where that is set."""
        band = partial(logprob_bounds, divergence=self.divergence, delta=self.delta, max_ratio=self.max_ratio)
        if (relax := self.relax) is None:
            return band

        def relaxed(old_logprobs: Array) -> RatioBounds:
            lower, upper = band(old_logprobs)
            xp = namespace(lower)
            return RatioBounds(
                xp.clip(lower, None, 1.0 - relax.eps_low), xp.clip(upper, 1.0 + relax.eps_high, None)
            )

        return relaxed


class IntervalSettings(MethodSettings):
    """Base class of the settings of a method with one fixed interval [1−eps_low, 1+eps_high] for every token."""

    eps_low: float = Field(0.2, gt=0, le=1)
    eps_high: float = Field(0.2, gt=0)
    """The interval of ratios is [1 − eps_low, 1 + eps_high]."""

    @property
    def ends(self) -> tuple[float, float]:
        """Both ends of the interval."""
        return 1.0 - self.eps_low, 1.0 + self.eps_high

    @property
    def interval(self) -> str:
        """The interval for a description: `ratio in [0.8, 1.2]`."""
        return f"ratio in [{1 - self.eps_low:g}, {1 + self.eps_high:g}]"

    def ratio_bounds(self) -> BoundsFunction:
        """Return the interval for every token, unless tokens outside of it keep a gradient."""
        return super().ratio_bounds() if self.entry.without_bounds else fixed_bounds(*self.ends)


def default_settings(method: str) -> MethodSettings:
    """Return the default settings of a method, or the settings of a custom function or class, by its name."""
    if method not in METHODS:
        return CustomSettings(method=method)
    return cast("MethodSettings", load_attribute(METHODS[method].settings)())
