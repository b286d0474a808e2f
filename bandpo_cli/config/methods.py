"""Settings of the methods (`bounds:` in a config file), one class per method, chosen by `bounds.method`.

Defaults are those that the source named in each class publishes. A new method needs a class here, a function in
`bounds.intervals` or a subclass of `objective.loss.PolicyLoss`, and an entry in `registries.METHODS`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from bandpo_cli.registries import DIVERGENCES, METHODS, MethodEntry, load_attribute, method_name
from bandpo_cli.settings_validation import NotNegative, Positive, Section, TaggedSection, require

DivergenceName = Annotated[str, AfterValidator(DIVERGENCES.check_name)]
Share = Annotated[float, Field(gt=0, le=1)]
MaxRatio = Annotated[float, Field(gt=1)]


class MethodSettings(TaggedSection):
    """Base class of the settings of a method. Each setting of a subclass has a default.

    Attributes:
        text: the method with the settings that matter, in one line; `{s.NAME}` is the setting NAME.
    """

    tag = "method"
    default = "band"
    custom = "module:name"
    text: ClassVar[str] = "{s.method}: {s.entry.summary}"

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
        return type(self)()  # type: ignore[call-arg]

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

    def at_step(self, step: int, steps: int) -> Self:
        """Return the settings with the values of `scheduled`."""
        return self.model_copy(update=self.scheduled(step, steps))


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


class IntervalSettings(MethodSettings):
    """Base class of the settings of a method with one fixed interval [1−eps_low, 1+eps_high] for every token."""

    eps_low: float = Field(0.2, gt=0, le=1)
    eps_high: float = Field(0.2, gt=0)
    """The interval of ratios is [1 − eps_low, 1 + eps_high]."""

    @property
    def interval(self) -> str:
        """The interval for a description: `ratio in [0.8, 1.2]`."""
        return f"ratio in [{1 - self.eps_low:g}, {1 + self.eps_high:g}]"


class ClipSettings(IntervalSettings):
    """One fixed interval for every token (PPO, GRPO)."""

    text = "clip (GRPO, PPO): {s.interval}"
    method: Literal["clip"] = "clip"


class ClipHigherSettings(IntervalSettings):
    """The fixed interval with a higher upper end (DAPO)."""

    text = "clip-higher: {s.interval}"
    method: Literal["clip-higher"] = "clip-higher"
    eps_high: float = Field(0.28, gt=0)


class DcpoSettings(MethodSettings):
    """Bounds that widen as the token gets rarer (DCPO, arXiv 2509.02333)."""

    text = "dcpo: dynamic bounds, ε = {s.eps_low:g}/{s.eps_high:g}"
    method: Literal["dcpo"] = "dcpo"
    eps_low: float = Field(0.16, gt=0)
    eps_high: float = Field(0.2, gt=0)
    """The ε of the lower and of the upper bound, in the formula of the paper."""
    max_ratio: MaxRatio | None = 10.0
    """Cap on the upper bound; null for none."""


class RipoSettings(MethodSettings):
    """Bounds 1 ± √(δ/π_old), which keep π_old·(r − 1)² at most δ (RIPO, arXiv 2607.10169)."""

    text = "RIPO: ratio in 1 ± √(δ/π_old), δ = {s.delta:g}, within [{s.min_ratio:g}, {s.max_ratio:g}]"
    method: Literal["ripo"] = "ripo"
    delta: Positive = 0.05
    min_ratio: float = Field(0.5, ge=0, lt=1)
    max_ratio: MaxRatio = 10.0
    """The lower bound is at least min_ratio, the upper bound at most max_ratio."""


class NoClipSettings(MethodSettings):
    """No clipping: the control that every comparison needs."""

    text = "none: no bound on the ratio"
    method: Literal["none"] = "none"


class DppoSettings(TrustRegionSettings):
    """Zero gradient for tokens that move away from π_old and are outside the trust region (DPPO, arXiv 2602.04879)."""

    text = "DPPO: mask outside the binary {s.divergence} trust region, {s.radius}"
    method: Literal["dppo"] = "dppo"
    divergence: Literal["kl", "tv"] = "kl"
    max_weight: Positive | None = 20.0
    """Truncation of the ratio in the gradient; null for none."""

    @model_validator(mode="before")
    @classmethod
    def _default_delta(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("delta") is None:
            return {
                **values,
                "delta": 0.15 if values.get("divergence") == "tv" else 0.05,
            }  # as in verl's examples
        return values

    def published(self) -> Self:
        """Return the defaults with this divergence, which determines the radius."""
        return type(self)(divergence=self.divergence)


class CispoSettings(MethodSettings):
    """Truncated importance weights, with a gradient for every token (CISPO, MiniMax-M1, arXiv 2506.13585)."""

    text = "CISPO: ratio truncated to [{s.min_weight:g}, {s.max_weight:g}] as a weight"
    method: Literal["cispo"] = "cispo"
    min_weight: NotNegative = 0.0
    max_weight: Positive = 5.0
    """The range that the ratio, as the weight of the gradient, is truncated to."""


class SapoSettings(MethodSettings):
    """A sigmoid of the ratio in place of a clip (SAPO, arXiv 2511.20347)."""

    text = "SAPO: soft gate, τ = {s.tau_positive:g} for positive, {s.tau_negative:g} for negative advantages"
    method: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05
    """Temperature of the gate for positive and for negative advantages."""


class CeGppoSettings(IntervalSettings):
    """The fixed interval, with a scaled gradient for clipped tokens (CE-GPPO, arXiv 2509.20712)."""

    text = (
        "CE-GPPO: {s.interval}, gradient of clipped tokens × {s.beta_low:g} below and × {s.beta_high:g} above"
    )
    method: Literal["ce-gppo"] = "ce-gppo"
    beta_low: NotNegative = 0.5
    """Scale of the gradient below the interval, for negative advantages; β₁ of the paper: 0.5 at 1.5B, 0.75 at 7B."""
    beta_high: NotNegative = 1.0
    """Scale of the gradient above the interval, for positive advantages; β₂ of the paper."""


class AspoSettings(IntervalSettings):
    """The fixed interval, with 1/r as the weight of tokens with a positive advantage (ASPO, arXiv 2510.06062)."""

    text = "ASPO: {s.interval}, weight 1/r for positive advantages, weights ≤ {s.max_weight:g}"
    method: Literal["aspo"] = "aspo"
    max_weight: Positive = 3.0
    """Cap of the weight: of 1/r for positive, of r for negative advantages."""


class DrpoSettings(MethodSettings):
    """A quadratic penalty on the change of probability in place of a mask (DRPO, arXiv 2606.09821)."""

    text = "DRPO: penalty |a|·π_old·(r − 1)²/2ε, ε = {s.eps:g}"
    method: Literal["drpo"] = "drpo"
    eps: Positive = 12.5
    """Change of probability at which the gradient is 0; above 1 it never is, and the penalty only scales it."""


class ClipCovSettings(IntervalSettings):
    """The fixed interval, without gradient for some tokens of high covariance (Clip-Cov, arXiv 2505.22617)."""

    text = (
        "Clip-Cov: {s.interval}, no gradient for {s.share:.2%} of the tokens, with a covariance in "
        "[{s.cov_low:g}, {s.cov_high:g}]"
    )
    method: Literal["clip-cov"] = "clip-cov"
    eps_low: float = Field(1.0, gt=0, le=1)
    eps_high: float = Field(1.0, gt=0)
    """The authors' scripts widen the interval to [0, 2], so that the covariance decides and not the ratio."""
    share: Share = 2e-4
    """Share of the update's tokens whose gradient is removed, at random among those in the range."""
    cov_low: float = 1.0
    cov_high: float = 5.0
    """Range of the covariance of a token's log-prob and advantage in which gradients are removed."""


class KlCovSettings(MethodSettings):
    """No interval; a penalty |log r| on the tokens of the highest covariance (KL-Cov, arXiv 2505.22617)."""

    text = "KL-Cov: penalty {s.kl_coef:g}·|log r| on {s.share:.2%} of the tokens"
    method: Literal["kl-cov"] = "kl-cov"
    share: Share = 2e-4
    """Share of the update's tokens with the penalty, those with the highest covariance of log-prob and advantage.

    The authors' scripts have 2e-3 at 7B and 2e-4 at 32B.
    """
    kl_coef: NotNegative = 1.0
    """Coefficient of |log r|; 1 in the authors' scripts, 0.1 in verl's configuration."""


def bounded_methods() -> dict[str, MethodSettings]:
    """Return the default settings of each method that is an interval of ratios, apart from the Band itself.

    The Band is described by divergence and radius, and not by its name.
    """
    return {
        name: load_attribute(entry.settings)()
        for name, entry in METHODS.items()
        if entry.bounds is not None and not entry.named_by_region
    }
