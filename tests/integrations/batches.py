"""Random padded batches, and the loss of this package with which the losses of other packages are compared.

Log-probs are float64, so that differences are those of the formulas. `pytest -s` prints the largest difference of each
case.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bandpo_cli.config.layers import resolve
from bandpo_cli.methods.loss import Columns, LossBatch, PolicyLoss, policy_loss
from bandpo_cli.objective.policy_objective import AGGREGATIONS, LossOutputs, policy_objective

SPREADS = {"near": 0.01, "apart": 0.3, "far": 2.0}
"""Standard deviation of log r. The largest ratios are 1.03, 2.5 and 88, which exceeds the caps of 3, 5, 10 and 20."""


@dataclass(frozen=True)
class Batch:
    """B completions of up to T tokens, padded on the right; all tensors are [B, T] float64 except `mask` (bool)."""

    old: Tensor
    new: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def lengths(self) -> Tensor:
        """Return the tokens per completion, int64 [B]."""
        return self.mask.sum(-1)


def random_batch(seed: int, spread: float, completions: int = 12, max_tokens: int = 40) -> Batch:
    """Return completions of 1 to `max_tokens` tokens of every probability, with advantages of both signs and 0."""
    generator = torch.Generator().manual_seed(seed)
    shape = (completions, max_tokens)
    lengths = torch.randint(1, max_tokens + 1, (completions, 1), generator=generator)
    lengths[0] = max_tokens
    old = -8 * torch.rand(shape, generator=generator, dtype=torch.float64) ** 3 - 1e-3
    new = (old + spread * torch.randn(shape, generator=generator, dtype=torch.float64)).clamp(max=-1e-4)
    advantages = torch.randn((completions, 1), generator=generator, dtype=torch.float64)
    advantages[-1] = 0.0
    return Batch(old, new, advantages.expand(shape).clone(), torch.arange(max_tokens) < lengths)


@dataclass(frozen=True)
class Ours:
    """This package's loss of the tokens of a batch, in the order of `batch.mask`."""

    loss: PolicyLoss
    columns: Columns
    advantages: Tensor
    outputs: LossOutputs

    @property
    def clipped(self) -> Any:
        """Return the `ClipState` of the tokens."""
        weights = self.outputs.gradient_weights
        return self.loss.clip_state(self.columns, self.outputs.ratios, self.advantages, weights)


def ours(
    batch: Batch, bounds: dict[str, Any], weights: Tensor | str, dual_clip: float | None = None,
    correction: Tensor | None = None, columns: Callable[[PolicyLoss], Columns] | None = None,
    ref: Tensor | None = None, chosen: Tensor | None = None, **terms: Any,
) -> Ours:  # fmt: skip
    """Return this package's loss and gradient.

    Args:
        weights: the weight of each token, [B, T], or an aggregation.
        correction: importance weights, [B, T].
        columns: what to use in place of `PolicyLoss.prepare`.
        ref: log-probs under the reference model, [B, T].
        chosen: the tokens with a policy loss, [tokens]; None for all.
        terms: further settings of the objective.
    """
    is_name = isinstance(weights, str)
    objective = {"dual_clip": dual_clip, **terms} | ({"aggregation": weights} if is_name else {})
    config = resolve([{"bounds": bounds, "objective": objective}])
    loss = policy_loss(config.bounds, config.objective)
    old, new, advantages = (tensor[batch.mask] for tensor in (batch.old, batch.new, batch.advantages))
    prepared = columns(loss) if columns else loss.prepare(old, advantages)
    if is_name:
        per_completion = AGGREGATIONS[weights](batch.lengths, batch.mask.shape[1]).double()
        token_weights = per_completion.repeat_interleave(batch.lengths)
    else:
        token_weights = weights[batch.mask]
    if correction is not None:
        token_weights = token_weights * correction[batch.mask]
    ref_logprobs = None if ref is None else ref[batch.mask]
    tokens = LossBatch(batch.lengths, advantages, old, prepared, ref_logprobs=ref_logprobs, chosen=chosen)
    outputs = policy_objective(loss, new, tokens, token_weights)
    return Ours(loss, prepared, advantages, outputs)


def assert_equal(
    case: str, expected: LossOutputs, loss: Tensor, gradient: Tensor, mask: Tensor, rtol: float = 1e-6
) -> None:
    """Assert that a loss and its gradient, [B, T], are those of this package, and that padding has no gradient."""
    assert (gradient[~mask] == 0).all()
    gradient, loss = gradient[mask], loss.detach()
    of_loss = ((expected.loss - loss).abs() / loss.abs()).item()
    of_gradient = ((expected.gradient - gradient).abs().max() / gradient.abs().max()).item()
    print(f"{case}: largest relative difference, loss {of_loss:.1e}, gradient {of_gradient:.1e}")
    torch.testing.assert_close(loss, expected.loss, rtol=rtol, atol=1e-7)
    torch.testing.assert_close(gradient, expected.gradient, rtol=rtol, atol=1e-10)


def trl_config(cls: type, folder: Path, **settings: Any) -> Any:
    """Return GRPOConfig, or a subclass, for this machine."""
    return cls(output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", **settings)


def trl_trainer(
    cls: Any, args: Any, logprobs: Tensor, has_ratios_of_vllm: bool = False, entropies: Tensor | None = None
) -> Any:
    """Return a GRPOTrainer with the attributes that `_compute_loss` reads, whose model returns the given log-probs.

    Args:
        cls: GRPOTrainer, or a subclass; its constructor, which would set the attributes, does not run.
        args: its GRPOConfig.
        entropies: [B, T] of the model; zeros if None.
    """
    trainer = object.__new__(cls)
    copied = (
        "beta", "importance_sampling_level", "loss_type", "max_completion_length", "off_policy_mask_threshold",
        "top_entropy_quantile",
    )  # fmt: skip
    entropies = torch.zeros_like(logprobs) if entropies is None else entropies
    accelerator = SimpleNamespace(num_processes=1, sync_gradients=True)
    accelerator.gather = accelerator.pad_across_processes = accelerator.reduce = lambda value, *_, **__: value
    attributes = {name: getattr(args, name) for name in copied} | {
        "args": args,
        "accelerator": accelerator,
        "model": SimpleNamespace(training=True),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs, entropies, None),
        "_metrics": {"train": defaultdict(list)},
        "_entropy_bonus_enabled": False,
        "aux_loss_enabled": False,
        "use_vllm": has_ratios_of_vllm,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": args.gradient_accumulation_steps,
        "epsilon_low": args.epsilon,
        "epsilon_high": args.epsilon_high if args.epsilon_high is not None else args.epsilon,
    }
    for name, value in attributes.items():
        setattr(trainer, name, value)
    return trainer


def trl_inputs(batch: Batch) -> dict[str, Any]:
    """Return the inputs of `GRPOTrainer._compute_loss`."""
    return {
        "prompt_ids": torch.zeros(len(batch.mask), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(batch.mask), 1, dtype=torch.int64),
        "completion_ids": torch.zeros(batch.mask.shape, dtype=torch.int64),
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages[:, 0],
        "old_per_token_logps": batch.old,
        "num_items_in_batch": batch.mask.sum(),
    }
