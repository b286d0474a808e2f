"""What becomes of an update whose numbers are not finite: its batch is kept, and the run stops or goes on without it.

Weights are only ever moved by finite gradients. What was not finite, and at how many tokens, is said in the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bandpo_cli.config.run import ModelConfig, OptimConfig, RunConfig
from bandpo_cli.tracking.bad_batch import KEPT_BATCHES, BadCompletion, kept_batches, write_bad_batch
from bandpo_cli.training.experience import Experience, Forward
from bandpo_cli.training.optimizer import NonFiniteError, Optimizer


@dataclass(frozen=True)
class BadUpdate:
    """An update that cannot be applied.

    Attributes:
        number: which of its step's updates, from 1.
        forward: None where the experience itself was not finite, so that nothing was computed from it.
        error: says what was not finite.
    """

    number: int
    experience: Experience
    forward: Forward | None
    error: NonFiniteError


OnBadUpdate = Callable[[BadUpdate], None]
"""Raises where the run is to stop; returns where the update is to be skipped."""


def stop(bad: BadUpdate) -> None:
    """Stop at the first."""
    raise bad.error


def check_experience(experience: Experience) -> None:
    """Raise NonFiniteError where the log-probs or advantages that an update would learn from are not finite."""
    _check_tokens(
        {
            "the policy's log-probs": experience.trainer_logprobs,
            "the sampler's log-probs": experience.sampler_logprobs,
            "the reference model's log-probs": experience.ref_logprobs,
            "the advantages": experience.advantages,
        }
    )


def check_forward(forward: Forward) -> None:
    """Raise NonFiniteError where the log-probs or the loss of the policy under update are not finite."""
    _check_tokens({"the policy's log-probs under update": forward.logprobs})
    if not math.isfinite(forward.loss):
        raise NonFiniteError(f"the loss is {forward.loss}")


def check_weights(model: nn.Module) -> None:
    """Raise NonFiniteError where weights are not finite: they belong in no checkpoint."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise NonFiniteError(
                f"the weights are not finite (the first such tensor is {name}); none were written"
            )


@dataclass(frozen=True)
class BadUpdateRule:
    """Keeps the batch of a bad update in the run's folder, then skips the update or stops the run.

    Attributes:
        optimizer: its count of updates skipped in a row decides, against `optim.max_skips`.
        run: the folder of the run.
    """

    config: RunConfig
    optimizer: Optimizer
    run: Path
    step: int

    def __call__(self, bad: BadUpdate) -> None:
        """Return where the update is to be skipped.

        Raises:
            NonFiniteError: the run is to stop; the line says where, where the batch is, and what to try.
        """
        done, optim = self.optimizer.skipped_in_a_row, self.config.optim
        skips = done < optim.max_skips
        if skips and kept_batches(self.run) >= KEPT_BATCHES:
            return
        try:
            path = write_bad_batch(self.run, self.step, bad.number, _completions(bad), _numbers(bad))
            kept = f"its batch is in {path}"
        except OSError as error:
            kept = f"its batch could not be written ({error})"
        if not skips:
            what = f"step {self.step}, update {bad.number} of {optim.updates}: {bad.error}"
            before = f", after {done} skipped in a row" if done else ""
            advice = _advice(optim, self.config.model)
            raise NonFiniteError(f"{what}; the update was not applied{before}; {kept}; {advice}") from None


def _check_tokens(named: Mapping[str, torch.Tensor | None]) -> None:
    for name, values in named.items():
        if values is not None and (bad := int((~torch.isfinite(values)).sum())):
            raise NonFiniteError(f"{name} are not finite at {bad:,} of {values.numel():,} tokens")


def _advice(optim: OptimConfig, model: ModelConfig) -> str:
    """Name the settings that may help, of those that can still be moved."""
    tries = [f"a lower optim.lr than {optim.lr:g}"]
    if model.dtype != "float32":
        tries.append("model.dtype=float32")
    if optim.max_grad_norm is None or optim.max_grad_norm > 1:
        tries.append("optim.max_grad_norm=1")
    if not optim.max_skips:
        tries.append("optim.max_skips=5, which goes on without such updates")
    return f"try {' or '.join(tries)}"


def _completions(bad: BadUpdate) -> list[BadCompletion]:
    return [
        BadCompletion(
            error=str(bad.error),
            problem_id=rollout.problem.id,
            prompt=rollout.prompt,
            text=rollout.text,
            reference=rollout.problem.answer,
            reward=rollout.grade.reward,
            verdict=rollout.grade.verdict,
            prompt_ids=list(rollout.prompt_ids),
            token_ids=list(rollout.completion.token_ids),
        )
        for group in bad.experience.groups
        for rollout in group.rollouts_G
    ]


def _numbers(bad: BadUpdate) -> dict[str, list[list[float] | None]]:
    """Cut what is known of each token into completions."""
    experience, forward = bad.experience, bad.forward
    lengths = experience.lengths.tolist()
    columns = {
        "old_logprobs": experience.old_logprobs,
        "new_logprobs": None if forward is None else forward.logprobs,
        "trainer_logprobs": experience.trainer_logprobs,
        "sampler_logprobs": experience.sampler_logprobs,
        "ref_logprobs": experience.ref_logprobs,
        "ratios": None if forward is None else forward.ratios,
        "lower": experience.bounds.lower,
        "upper": experience.bounds.upper,
        "importance": experience.correction,
        "advantages": experience.advantages,
    }
    return {
        name: [None] * len(lengths) if column is None else [each.tolist() for each in column.split(lengths)]
        for name, column in columns.items()
    }
