"""The importance correction: its settings, and the weights for the gap between sampler and trainer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, TypeAdapter, model_validator

from bandpo_cli.bounds.arrays import namespace
from bandpo_cli.errors import unknown_choice
from bandpo_cli.methods.loss import MAX_LOG_RATIO, log_ratio, sequence_index, sequence_sum
from bandpo_cli.settings_validation import Positive, Section, require

if TYPE_CHECKING:
    from torch import Tensor

    from bandpo_cli.config.run import ObjectiveConfig

RuleName = Literal[
    "token-truncate", "sequence-truncate", "product-truncate", "token-reject", "sequence-reject", "product-reject",
    "outlier-reject", "token-k3-reject", "sequence-k3-reject",
]  # fmt: skip
_LIMITS: dict[str, tuple[float | None, float]] = {
    **dict.fromkeys(("token-truncate", "sequence-truncate", "product-truncate"), (None, 2.0)),
    **dict.fromkeys(("token-reject", "product-reject"), (0.5, 2.0)),
    "sequence-reject": (0.99, 1.01),
    "outlier-reject": (1e-4, 100.0),
    **dict.fromkeys(("token-k3-reject", "sequence-k3-reject"), (None, 0.01)),
}
"""Default limits of each rule."""


class ImportanceRule(Section):
    """A rule in a list `objective.importance`: a weight of the loss, or a condition on the tokens with a loss."""

    rule: RuleName
    """With w = π_old/π_sampler: `truncate` gives the weight min(w, high), with w of the token, its geometric mean
    over the completion (`sequence`) or of the product. `reject` removes tokens, or completions, with a w outside
    [low, high], or a k3 estimate w − 1 − log w, or its mean over the completion, above high. `outlier-reject` removes a
    completion with any token outside."""
    low: Positive | None = None
    """The smallest w that is kept; null for the rule's default."""
    high: Positive | None = None
    """The largest weight, or the largest w or k3 estimate that is kept; by default that of the rule, and null for no
    truncation."""

    @model_validator(mode="before")
    @classmethod
    def _with_default_limits(cls, values: Any) -> Any:
        values = {"rule": values} if isinstance(values, str) else values
        if not isinstance(values, dict) or values.get("rule") not in _LIMITS:
            return values
        return dict(zip(("low", "high"), _LIMITS[values["rule"]], strict=True)) | values

    @property
    def is_weight(self) -> bool:
        """Whether the rule gives a weight."""
        return self.rule.endswith("truncate")

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        low, high, has_interval = self.low, self.high, _LIMITS[self.rule][0] is not None
        require(
            has_interval or low is None, f"low = {low} has no effect with rule = '{self.rule}'; leave it out"
        )
        require(self.is_weight or high is not None, f"rule = '{self.rule}' needs high")
        require(
            not has_interval or (low is not None and high is not None and low <= 1 <= high and low < high),
            f"rule = '{self.rule}' keeps the ratios in [{low}, {high}]; take low ≤ 1 ≤ high, so that a token on which "
            "sampler and trainer agree is kept",
        )
        return self


_GEOMETRIC = {"rule": "sequence-reject", "low": 1 / 1.001, "high": 1 / 0.999}
_TOKEN, _PRODUCT = {"rule": "token-truncate"}, {"rule": "product-truncate"}
VERL_PRESETS: dict[str, list[dict[str, Any]]] = {
    "decoupled_token_is": [_TOKEN],
    "decoupled_seq_is": [_PRODUCT],
    "decoupled_token_icepop": [{"rule": "token-reject", "low": 0.5, "high": 5.0}, {**_TOKEN, "high": None}],
    "decoupled_seq_is_rs": [{"rule": "product-reject"}, _PRODUCT],
    "decoupled_geo_rs": [_GEOMETRIC],
    "decoupled_geo_rs_seq_tis": [_GEOMETRIC, _PRODUCT],
    "decoupled_geo_rs_token_tis": [_GEOMETRIC, _TOKEN],
    "decoupled_k3_rs": [{"rule": "sequence-k3-reject"}],
    "decoupled_k3_rs_seq_tis": [{"rule": "sequence-k3-reject"}, _PRODUCT],
    "decoupled_k3_rs_token_tis": [{"rule": "sequence-k3-reject"}, _TOKEN],
}
"""The rules of the presets of verl 0.9.1 with the trainer's π_old (`RolloutCorrectionConfig`); its statistic of a
completion is the inverse of the ratio here."""

DEFAULT_CAP = 2.0  # The default of `objective.importance_cap`

SINGLE_RULES: dict[str, tuple[RuleName, ...]] = {
    "token-truncate": ("token-truncate",),
    "sequence-truncate": ("sequence-truncate",),
    "token-mask": ("token-reject", "token-truncate"),
    "sequence-mask": ("sequence-reject", "sequence-truncate"),
    "sequence-mask-any": ("outlier-reject", "token-truncate"),
}
"""The rules that a single name stands for, with the limits `importance_floor` and `importance_cap`."""


def _known_rules(value: Any) -> Any:
    """Return a name in `SINGLE_RULES`, and the rules of a list or a preset; raise ValueError for others."""
    if isinstance(value, str) and value in SINGLE_RULES:
        return value
    if not isinstance(value, str) or value in VERL_PRESETS:
        return _RULES.validate_python(VERL_PRESETS[value] if isinstance(value, str) else value)
    if value.startswith("bypass_"):
        raise ValueError(
            "verl's bypass presets have π_sampler as π_old: set objective.old_logprobs to 'sampler'"
        )
    raise ValueError(f"{unknown_choice(value, [*SINGLE_RULES, *VERL_PRESETS])}; or a list of rules")


_RULES = TypeAdapter(tuple[ImportanceRule, ...])
ImportanceRules = Annotated[str | tuple[ImportanceRule, ...], BeforeValidator(_known_rules)]


def check_importance(importance: ImportanceRules, floor: float | None, cap: float | None) -> None:
    """Raise ValueError for limits that have no effect, or that would mask a token on which both engines agree."""
    chosen = f"importance = {importance!r}"
    if not isinstance(importance, str):
        weights = [rule.rule for rule in importance if rule.is_weight]
        require(importance, "importance = []: name a rule, or set importance_cap to null for no correction")
        require(len(weights) < 2, f"importance: a token has one weight, not both {' and '.join(weights)}")
        require(
            floor is None and cap == DEFAULT_CAP,
            "importance_cap and importance_floor have no effect with a list of rules, which have their own limits; "
            "leave both out",
        )
    elif "mask" not in importance:
        require(
            floor is None,
            f"importance_floor = {floor} has no effect with {chosen}; set importance to token-mask, sequence-mask "
            "or sequence-mask-any, or leave it out",
        )
    elif cap is None:
        raise ValueError(
            f"{chosen} needs importance_cap, the largest weight; importance_cap = null is no correction"
        )
    else:
        lowest = floor or 1 / cap
        require(
            lowest <= 1 <= cap and lowest < cap,
            f"{chosen} keeps the weights in [{lowest:g}, {cap:g}]; take importance_floor ≤ 1 ≤ importance_cap, so "
            "that a token on which sampler and trainer agree is kept",
        )


def rules_of(objective: ObjectiveConfig) -> tuple[ImportanceRule, ...]:
    """Return the rules of the importance correction, in order; empty for no correction."""
    importance, cap = objective.importance, objective.importance_cap
    if cap is None or not isinstance(importance, str):
        return () if isinstance(importance, str) else importance
    *reject, truncate = SINGLE_RULES[importance]
    low = objective.importance_floor or 1.0 / cap
    rules = [ImportanceRule(rule=name, low=low, high=cap) for name in reject]
    return (*rules, ImportanceRule(rule=truncate, high=None if rules else cap))


def importance_weights(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, lengths: Tensor, objective: ObjectiveConfig
) -> Tensor | None:
    """Return the weight of each token's loss, w, [N] without gradient; None where `objective.importance_cap` is null.

    The ratio of the objective is relative to the trainer's π_old, but the tokens were sampled from the sampler's π. The
    two differ where the sampler is another engine, by kernels, number formats and batch shapes. w is an estimate of
    π_old/π_sampler of limited variance. The rules of `objective.importance` apply in order, and each sees only the
    tokens that the rules before have kept: a weight (truncated importance sampling, Ionides 2008; 1 without such a
    rule), or a rejection, after which w is 0: per token as in IcePop, per completion as in masked importance sampling
    (verl 0.9.1, `rollout_corr_helper.py`), or of a completion with any token outside (TRM, arXiv 2512.23075).

    Args:
        trainer_logprobs, sampler_logprobs: [N] float32, nats, of the same weights at the same temperature.
        lengths: [S] int64, tokens per completion.
    """
    rules = rules_of(objective)
    if not rules:
        return None
    log_ratios, xp = log_ratio(trainer_logprobs.detach(), sampler_logprobs), namespace(lengths)
    index = sequence_index(lengths, log_ratios)
    kept: Tensor = xp.ones_like(log_ratios)
    weights = kept

    def total(values: Tensor) -> Tensor:
        """Return the sum over the kept tokens of each token's completion, [N]."""
        return sequence_sum(values * kept, lengths)[index]

    for rule in rules:
        level, _, _ = rule.rule.partition("-")
        values = log_ratios.expm1() - log_ratios if "k3" in rule.rule else log_ratios
        if level == "sequence":
            values = total(values) / total(xp.ones_like(values)).clamp(min=1.0)
        elif level == "product":
            values = total(values).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        if "k3" not in rule.rule:
            values = values.exp()
        if rule.is_weight:
            weights = values if rule.high is None else values.clamp(max=rule.high)
            continue
        outside = (values < (rule.low or -math.inf)) | (values > (rule.high or math.inf))
        if level == "outlier":
            outside = total(outside.float()) > 0
        kept = kept.masked_fill(outside, 0.0)
    return weights.where(kept > 0, 0.0)
