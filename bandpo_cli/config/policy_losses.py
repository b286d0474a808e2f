"""Settings of the methods that are not an interval of ratios: one class per method, chosen by `bounds.method`.

Defaults are those that the source named in each class publishes. A new method needs a class here or in
`config.methods`, a subclass of `objective.loss.PolicyLoss`, and an entry in `registries.METHODS`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from bandpo_cli.config.methods import IntervalSettings, MethodSettings, TrustRegionSettings
from bandpo_cli.config.section import NotNegative, Positive

Share = Annotated[float, Field(gt=0, le=1)]

DPPO_DELTAS = {"kl": 0.05, "tv": 0.15}
"""Radius of DPPO by divergence, where none is given; those of verl's examples."""


class DppoSettings(TrustRegionSettings):
    """Zero gradient for tokens that move away from π_old and are outside the trust region (DPPO, arXiv 2602.04879)."""

    method: Literal["dppo"] = "dppo"
    divergence: Literal["kl", "tv"] = "kl"
    max_weight: Positive | None = 20.0
    """Truncation of the ratio in the gradient; null for none."""

    @model_validator(mode="before")
    @classmethod
    def _default_delta(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("delta") is None:
            divergence = str(values.get("divergence"))  # an invalid one is reported after this
            return {**values, "delta": DPPO_DELTAS.get(divergence, DPPO_DELTAS["kl"])}
        return values

    def published(self) -> Self:
        """Return the defaults with this divergence, which determines the radius."""
        return type(self)(divergence=self.divergence)

    def describe(self) -> str:
        return f"DPPO: mask outside the binary {self.divergence} trust region, {self.describe_radius()}"


class CispoSettings(MethodSettings):
    """Truncated importance weights, with a gradient for every token (CISPO, MiniMax-M1, arXiv 2506.13585)."""

    method: Literal["cispo"] = "cispo"
    min_weight: NotNegative = 0.0
    max_weight: Positive = 5.0

    def describe(self) -> str:
        return f"CISPO: ratio truncated to [{self.min_weight:g}, {self.max_weight:g}] as a weight"


class SapoSettings(MethodSettings):
    """A sigmoid of the ratio in place of a clip (SAPO, arXiv 2511.20347)."""

    method: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05

    def describe(self) -> str:
        return f"SAPO: soft gate, τ = {self.tau_positive:g} for positive, {self.tau_negative:g} for negative advantages"


class GspoSettings(MethodSettings):
    """The clipped loss on the geometric mean ratio of a completion (GSPO, arXiv 2507.18071)."""

    method: Literal["gspo"] = "gspo"
    eps_low: Positive = 3e-4
    eps_high: Positive = 4e-4

    def describe(self) -> str:
        return f"GSPO: ratio of the completion in [1 − {self.eps_low:g}, 1 + {self.eps_high:g}]"


class GmpoSettings(MethodSettings):
    """The geometric mean over a completion of ratios clipped in log space (GMPO, arXiv 2507.20673)."""

    method: Literal["gmpo"] = "gmpo"
    log_eps_low: Positive = 0.4
    log_eps_high: Positive = 0.4

    def describe(self) -> str:
        return f"GMPO: geometric mean of ratios in [e^−{self.log_eps_low:g}, e^{self.log_eps_high:g}]"


class CeGppoSettings(IntervalSettings):
    """The fixed interval, with a scaled gradient for clipped tokens (CE-GPPO, arXiv 2509.20712)."""

    method: Literal["ce-gppo"] = "ce-gppo"
    beta_low: NotNegative = 0.5
    """Scale of the gradient below the interval, for negative advantages; β₁ of the paper: 0.5 at 1.5B, 0.75 at 7B."""
    beta_high: NotNegative = 1.0
    """Scale of the gradient above the interval, for positive advantages; β₂ of the paper."""

    def describe(self) -> str:
        return (
            f"CE-GPPO: {self.interval}, gradient of clipped tokens "
            f"× {self.beta_low:g} below and × {self.beta_high:g} above"
        )


class AspoSettings(IntervalSettings):
    """The fixed interval, with 1/r as the weight of tokens with a positive advantage (ASPO, arXiv 2510.06062)."""

    method: Literal["aspo"] = "aspo"
    max_weight: Positive = 3.0
    """Cap of the weight: of 1/r for positive, of r for negative advantages."""

    def describe(self) -> str:
        return f"ASPO: {self.interval}, weight 1/r for positive advantages, weights ≤ {self.max_weight:g}"


class DrpoSettings(MethodSettings):
    """A quadratic penalty on the change of probability in place of a mask (DRPO, arXiv 2606.09821)."""

    method: Literal["drpo"] = "drpo"
    eps: Positive = 12.5
    """Change of probability at which the gradient is 0; above 1 it never is, and the penalty only scales it."""

    def describe(self) -> str:
        return f"DRPO: penalty |a|·π_old·(r − 1)²/2ε, ε = {self.eps:g}"


class ToprSettings(MethodSettings):
    """Weight 1 for positive advantages, a completion's truncated ratio for negative ones (TOPR, arXiv 2503.14286)."""

    method: Literal["topr"] = "topr"
    max_weight: Positive = 1.0
    """Upper truncation of the completion's ratio, for negative advantages."""

    def describe(self) -> str:
        return f"TOPR: weight 1, for negative advantages the completion's ratio truncated to [0, {self.max_weight:g}]"


class ClipCovSettings(IntervalSettings):
    """The fixed interval, without gradient for some tokens of high covariance (Clip-Cov, arXiv 2505.22617)."""

    method: Literal["clip-cov"] = "clip-cov"
    eps_low: float = Field(1.0, gt=0, le=1)
    eps_high: float = Field(1.0, gt=0)
    """The authors' scripts widen the interval to [0, 2], so that the covariance decides and not the ratio."""
    share: Share = 2e-4
    """Share of the update's tokens whose gradient is removed, at random among those in the range."""
    cov_low: float = 1.0
    cov_high: float = 5.0
    """Range of the covariance of a token's log-prob and advantage in which gradients are removed."""

    def describe(self) -> str:
        return (
            f"Clip-Cov: {self.interval}, no gradient for {self.share:.2%} of "
            f"the tokens, with a covariance in [{self.cov_low:g}, {self.cov_high:g}]"
        )


class KlCovSettings(MethodSettings):
    """No interval; a penalty |log r| on the tokens of the highest covariance (KL-Cov, arXiv 2505.22617)."""

    method: Literal["kl-cov"] = "kl-cov"
    share: Share = 2e-4
    """Share of the update's tokens with the penalty, those with the highest covariance of log-prob and advantage.

    The authors' scripts have 2e-3 at 7B and 2e-4 at 32B.
    """
    kl_coef: NotNegative = 1.0
    """Coefficient of |log r|; 1 in the authors' scripts, 0.1 in verl's configuration."""

    def describe(self) -> str:
        return f"KL-Cov: penalty {self.kl_coef:g}·|log r| on {self.share:.2%} of the tokens"
