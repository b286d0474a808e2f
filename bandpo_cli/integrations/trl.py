"""The Band in TRL's GRPOTrainer: `BandGRPOTrainer` with `BandGRPOConfig`.

    from bandpo_cli.integrations.trl import BandGRPOConfig, BandGRPOTrainer
    args = BandGRPOConfig(band_divergence="kl", band_delta=0.05, num_iterations=4)
    BandGRPOTrainer(model=..., reward_funcs=..., args=args, train_dataset=...).train()

TRL clamps the ratio to [1 − epsilon_low, 1 + epsilon_high], which are attributes of the trainer, and its clamp and its
metrics `clip_ratio/...` accept tensors for them. While the loss of a micro-batch is computed, the trainer here sets
both to the values of each token; the rest of TRL's loss applies unchanged.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import trl
from trl import GRPOConfig, GRPOTrainer

from bandpo_cli.bounds import band_bounds
from bandpo_cli.bounds.band import logprob_bounds
from bandpo_cli.errors import ConfigError

CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Values of `loss_type` with a ratio that TRL clamps on both sides; cispo, sapo and vespo weight tokens otherwise."""

if tuple(map(int, trl.__version__.split(".")[:2])) < (1, 16):
    raise ImportError(
        f"bandpo_cli.integrations.trl needs TRL 1.16 or later, not {trl.__version__}: earlier versions can compute the "
        "loss in Liger's fused kernel, which ignores the bounds"
    )


@dataclass
class BandGRPOConfig(GRPOConfig):  # type: ignore[misc]
    """TRL's GRPOConfig with the settings of the Band, which replaces `epsilon` and `epsilon_high`.

    Raises ConfigError if a setting of the Band is invalid, or a setting of TRL excludes the Band.
    """

    band_divergence: str = field(
        default="kl",
        metadata={"help": "Divergence of the trust region: a name, or module:function for a custom f."},
    )
    band_delta: float = field(
        default=0.05, metadata={"help": "Radius of the trust region, > 0; in nats for kl, reverse-kl and js."}
    )
    band_max_ratio: float | None = field(
        default=10.0, metadata={"help": "Largest upper bound of the ratio, > 1; None for no limit."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            band_bounds([-1.0], self.band_divergence, self.band_delta, self.band_max_ratio)
        except ConfigError as error:
            raise ConfigError(
                f"BandGRPOConfig(band_divergence={self.band_divergence!r}, band_delta={self.band_delta!r}, "
                f"band_max_ratio={self.band_max_ratio!r}): {error}"
            ) from None
        cap = self.band_max_ratio
        interval = "has no effect, since the Band replaces the interval", "leave it out, and set band_delta"
        checks = [
            ("loss_type", self.loss_type in CLIPPED_LOSSES, "has no interval of ratios that the Band could replace",
             f"set loss_type to one of {', '.join(CLIPPED_LOSSES)}"),
            ("importance_sampling_level", self.importance_sampling_level == "token",
             "has no ratio per token for the Band to bound", "set importance_sampling_level='token'"),
            ("epsilon", self.epsilon == GRPOConfig.epsilon, *interval),
            ("epsilon_high", self.epsilon_high is None, *interval),
            ("delta", self.delta is None or (cap is not None and self.delta > cap),
             "limits the ratio at negative advantages and must be above every upper bound",
             f"set band_max_ratio (now {cap!r}) to less than delta, or leave delta out"),
        ]  # fmt: skip
        for name, is_allowed, reason, advice in checks:
            if not is_allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} {reason}; {advice}")
        if self.gradient_accumulation_steps % (self.steps_per_generation * self.num_iterations) == 0:
            warnings.warn(
                "every batch is used for one optimizer step, at which the ratio π/π_old is 1, so that no bound has an "
                "effect: set num_iterations to 2 or more, or steps_per_generation to more than "
                f"gradient_accumulation_steps ({self.gradient_accumulation_steps})",
                stacklevel=3,
            )


class BandGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer with the Band of each token in place of the interval [1 − epsilon, 1 + epsilon_high].

    It takes the arguments of GRPOTrainer; `args` must be a `BandGRPOConfig`.

    Attributes:
        epsilon_low, epsilon_high: TRL's numbers; [B, T] while the loss of a micro-batch is computed.

    Raises:
        ConfigError: `args` is missing or of another type.
    """

    epsilon_low: float | torch.Tensor
    epsilon_high: float | torch.Tensor

    def __init__(
        self, model: Any, reward_funcs: Any, args: BandGRPOConfig, *others: Any, **named: Any
    ) -> None:
        if not isinstance(args, BandGRPOConfig):
            raise ConfigError(
                f"BandGRPOTrainer needs args=BandGRPOConfig(...), which has the settings of the Band, not "
                f"{type(args).__name__}"
            )
        super().__init__(model, reward_funcs, args, *others, **named)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Return TRL's loss of a micro-batch, clamped to the Band of each token, scalar.

        `inputs["old_per_token_logps"]` is [B, T]; TRL leaves it out where the ratio is 1.
        """
        args, fixed = self.args, (self.epsilon_low, self.epsilon_high)
        if (old := inputs.get("old_per_token_logps")) is not None:
            lower, upper = logprob_bounds(old, args.band_divergence, args.band_delta, args.band_max_ratio)
            self.epsilon_low, self.epsilon_high = 1.0 - lower, upper - 1.0
        try:
            return super()._compute_loss(model, inputs)  # type: ignore[no-any-return]
        finally:
            self.epsilon_low, self.epsilon_high = fixed
