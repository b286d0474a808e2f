"""Settings of the methods whose loss of a token depends on the other tokens of its completion, or on its group.

`config.methods` has the base classes and the methods that treat every token separately.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bandpo_cli.config.methods import MethodSettings
from bandpo_cli.settings_validation import Positive, require


class CompletionIntervalSettings(MethodSettings):
    """Base class of the settings of a method with an interval of the ratio of a completion, its geometric mean."""

    eps_low: Positive = 3e-4
    eps_high: Positive = 4e-4
    """The interval of the ratio of a completion is [1 − eps_low, 1 + eps_high]."""


class GspoSettings(CompletionIntervalSettings):
    """The clipped loss on the geometric mean ratio of a completion (GSPO, arXiv 2507.18071)."""

    text = "GSPO: ratio of the completion in [1 − {s.eps_low:g}, 1 + {s.eps_high:g}]"
    method: Literal["gspo"] = "gspo"


class LuspoSettings(CompletionIntervalSettings):
    """GSPO with the loss of a completion multiplied by its length (LUSPO, arXiv 2602.05261)."""

    text = "LUSPO: length × GSPO, ratio of the completion in [1 − {s.eps_low:g}, 1 + {s.eps_high:g}]"
    method: Literal["luspo"] = "luspo"
    eps_low: Positive = 2e-3
    eps_high: Positive = 2.5e-3


class GapoSettings(CompletionIntervalSettings):
    """GSPO with a lower upper bound for the correct completions of an easier problem (GAPO, arXiv 2609.00444)."""

    text = "GAPO: ratio of the completion in [1 − {s.eps_low:g}, 1 + {s.eps_low:g} to {s.eps_high:g}]"
    method: Literal["gapo"] = "gapo"
    eps_low: Positive = 3e-3
    eps_high: Positive = 5e-3
    """The interval is [1 − eps_low, 1 + eps_high] for the only correct completion of a group; the upper bound falls
    linearly in the number of correct completions, to 1 + eps_low where all are correct."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        low, high = self.eps_low, self.eps_high
        require(high >= low, f"eps_high = {high:g} must be at least eps_low = {low:g}, where the bound ends")
        return self


class GmpoSettings(MethodSettings):
    """The geometric mean over a completion of ratios clipped in log space (GMPO, arXiv 2507.20673)."""

    text = "GMPO: geometric mean of ratios in [e^−{s.log_eps_low:g}, e^{s.log_eps_high:g}]"
    method: Literal["gmpo"] = "gmpo"
    log_eps_low: Positive = 0.4
    log_eps_high: Positive = 0.4
    """The interval of a token's log ratio is [−log_eps_low, log_eps_high]."""


class ToprSettings(MethodSettings):
    """Weight 1 for positive advantages, a completion's truncated ratio for negative ones (TOPR, arXiv 2503.14286)."""

    text = "TOPR: weight 1, for negative advantages the completion's ratio truncated to [0, {s.max_weight:g}]"
    method: Literal["topr"] = "topr"
    max_weight: Positive = 1.0
    """Upper truncation of the completion's ratio, for negative advantages."""


class VespoSettings(MethodSettings):
    """A smooth weight w^k·e^{λ(1−w)} of the completion's ratio w in place of a clip (VESPO, arXiv 2602.10693)."""

    text = (
        "VESPO: weight w^k·e^(λ(1−w)) of the completion's ratio w, k = {s.k_positive:g}/{s.k_negative:g}, "
        "λ = {s.lambda_positive:g}/{s.lambda_negative:g}"
    )
    method: Literal["vespo"] = "vespo"
    k_positive: Positive = 2.0
    k_negative: Positive = 3.0
    """The exponent k for positive and for negative advantages."""
    lambda_positive: Positive = 3.0
    lambda_negative: Positive = 2.0
    """The rate λ for positive and for negative advantages; the weight is largest at w = k/λ."""


class CppoSettings(MethodSettings):
    """DPPO's mask with a threshold by position and a budget for the tokens before (CPPO, arXiv 2606.10968)."""

    text = (
        "CPPO: mask where the weighted change of probability exceeds {s.delta:g}, or the budget of "
        "{s.prefix_delta:g} per token of the prefix"
    )
    method: Literal["cppo"] = "cppo"
    delta: Positive = 0.15
    """The largest change of a token's probability, times the weight of its position; 0.2 for the paper's mixture of
    experts."""
    prefix_delta: Positive = 0.02
    """The mean change of probability that the tokens before may have had; a completion whose 90th percentile is larger
    is allowed that, up to twice this value."""
    last_weight: Annotated[float, Field(gt=0, le=1)] = 0.8
    """The weight of the last position of a completion; it falls linearly from 1 at the first."""
    max_weight: Positive | None = 20.0
    """Truncation of the ratio in the gradient, as in DPPO; null for none, as in the paper."""
