"""Experience: the tokens that one update trains on, with all values that are computed before the step's first update.

With several ranks, every rank holds the values of all N tokens, but its micro-batches are only its part of them.

Dimensions: P groups of G completions, S = P·G completions, N tokens in total. Per-token tensors are flat, [N], without
padding, and in the order of the completions. Log-probs and entropies are in nats.

`UpdateBatch` holds what does not depend on the trainer's log-probs under π_old, `Experience` everything.
`training.old_policy` chooses which of the two an update starts from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from bandpo_cli.config.run import ObjectiveConfig
from bandpo_cli.models.load import Policy
from bandpo_cli.models.packing import Row, TokenBatch, batch_rows, collate, empty_batch, rows_from_groups
from bandpo_cli.objective.importance import importance_weights
from bandpo_cli.objective.loss import Columns, LossInputs, PolicyLoss, UpdateTokens
from bandpo_cli.types import Group

ALL = slice(None)


class MicroBatch(NamedTuple):
    """Complete completions that go through the model in one pass.

    Attributes:
        tokens: the model's input.
        span: its sampled tokens among the N of the update.
        sequences: its completions among the S of the update.
    """

    tokens: TokenBatch
    span: slice
    sequences: slice


def rank_batches(policy: Policy, groups: Sequence[Group], max_tokens: int) -> list[MicroBatch]:
    """Return this rank's part of an update in micro-batches of at most `max_tokens` tokens.

    The ranks have about equal numbers of tokens, of consecutive groups, and equal numbers of micro-batches: some may be
    empty, because every pass through a sharded model needs all ranks.
    """
    counts = [[len(rollout.completion.token_ids) for rollout in group.rollouts_G] for group in groups]
    prompts = [len(group.rollouts_G[0].prompt_ids) for group in groups]
    part = policy.ranks.share_by_cost([p + sum(each) for p, each in zip(prompts, counts, strict=True)])
    token, sequence = sum(map(sum, counts[: part.start])), sum(map(len, counts[: part.start]))
    batches = [*micro_batches(policy, rows_from_groups(groups[part]), max_tokens, token, sequence)]
    most = int(policy.ranks.max(len(batches)))
    nothing = MicroBatch(empty_batch(policy.pad_id, policy.device), slice(0, 0), slice(0, 0))
    return batches + [nothing] * (most - len(batches))


def micro_batches(
    policy: Policy, rows: Sequence[Row], max_tokens: int, token: int = 0, sequence: int = 0
) -> Iterator[MicroBatch]:
    """Yield the rows in batches of at most `max_tokens` tokens.

    Args:
        token, sequence: numbers of the first token and the first completion of the rows within the update.
    """
    for batch_of_rows in batch_rows(rows, max_tokens):
        tokens = collate(batch_of_rows, policy.device)
        last_token = token + len(tokens.targets)
        last_sequence = sequence + sum(len(row.completions) for row in batch_of_rows)
        yield MicroBatch(tokens, slice(token, last_token), slice(sequence, last_sequence))
        token, sequence = last_token, last_sequence


@dataclass(frozen=True)
class CorrectionRule:
    """How π_old and the importance weights of an update follow from the trainer's and the sampler's log-probs.

    Attributes:
        by_trainer: the ratio is taken to the trainer's log-probs, else to the sampler's.
        corrects: tokens are weighted by `objective.importance`.
    """

    objective: ObjectiveConfig
    by_trainer: bool
    corrects: bool

    def old_logprobs(self, trainer_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor) -> torch.Tensor:
        """Return log π_old of each token, the denominator of the ratio, [n]."""
        return trainer_logprobs if self.by_trainer else sampler_logprobs

    def weights(
        self, trainer_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the importance weight of each token, [n]; None without a correction.

        Args:
            lengths: [s] int64, tokens per completion.
        """
        if not self.corrects:
            return None
        return importance_weights(trainer_logprobs, sampler_logprobs, lengths, self.objective)


@dataclass(frozen=True)
class IdleTokens:
    """The M tokens of groups whose advantages are all 0, which an update does not run through the model.

    They count in the normalisation of the loss and in the metrics that need no ratio.

    Attributes:
        lengths: [s] int64, tokens per completion.
        old_logprobs, sampler_logprobs: [M] float32.
        trainer_logprobs, entropy, correction: [M] float32, or None as in `Experience`.
    """

    lengths: torch.Tensor
    old_logprobs: torch.Tensor
    sampler_logprobs: torch.Tensor
    trainer_logprobs: torch.Tensor | None
    entropy: torch.Tensor | None
    correction: torch.Tensor | None


@dataclass(frozen=True)
class UpdateBatch:
    """The N tokens of an update's S completions, without what follows from the trainer's log-probs under π_old.

    An update that starts from it must be the first one after sampling: its own forward pass gives these log-probs.

    Attributes:
        groups: the P groups that the completions belong to.
        batches: the model's input: prompts and completions in micro-batches.
        lengths: [S] int64, tokens per completion.
        sampler_logprobs: [N] float32, log-probs of π_old as the sampler reported them.
        entropy: [N] float32, entropy of π_old at T=1 at each token's position; None while it is not known.
        loss: the policy loss of the method.
        rule: how π_old and the importance weights follow from the log-probs.
        advantages: [N] float32, the advantage of the token's completion.
        ref_logprobs: [N] float32, log-probs under the reference model; None without one.
        idle: the tokens of the update's other groups; None where all of them are in `groups`.
    """

    groups: Sequence[Group]
    batches: Sequence[MicroBatch]
    lengths: torch.Tensor
    sampler_logprobs: torch.Tensor
    entropy: torch.Tensor | None
    loss: PolicyLoss
    rule: CorrectionRule
    advantages: torch.Tensor
    ref_logprobs: torch.Tensor | None
    idle: IdleTokens | None

    @property
    def all_lengths(self) -> torch.Tensor:
        """Tokens per completion of all groups of the update, int64; the first S are those of `lengths`."""
        return self.lengths if self.idle is None else torch.cat([self.lengths, self.idle.lengths])

    def loss_inputs(self, batch: MicroBatch, logprobs: torch.Tensor, weights: torch.Tensor) -> LossInputs:
        """Return the inputs of the loss for a micro-batch of n tokens.

        Args:
            logprobs: [n], log-probs under the policy being updated, with gradient.
            weights: [N], the aggregation weight of every token of the update.
        """
        return self._old(logprobs.detach(), batch.span, batch.sequences).inputs(
            logprobs,
            weights[batch.span],
            None if self.ref_logprobs is None else self.ref_logprobs[batch.span],
        )

    def with_old_policy(
        self, logprobs: torch.Tensor | None = None, entropy: torch.Tensor | None = None
    ) -> Experience:
        """Return the complete experience.

        Args:
            logprobs: [N] float32, the trainer's log-probs under π_old; None to use the sampler's as these.
            entropy: [N] float32; None where `self.entropy` has it.
        """
        old = self._old(self.sampler_logprobs if logprobs is None else logprobs, ALL, ALL)
        known = {field.name: getattr(self, field.name) for field in fields(UpdateBatch)}
        known["entropy"] = self.entropy if entropy is None else entropy
        return Experience(
            **known,
            old_logprobs=old.old_logprobs,
            trainer_logprobs=logprobs,
            correction=old.correction,
            columns=old.columns,
        )

    def _old(self, logprobs: torch.Tensor, span: slice, sequences: slice) -> _OldValues:
        """Return the values of complete completions that follow from the trainer's log-probs under π_old, [n]."""
        sampler_logprobs, lengths = self.sampler_logprobs[span], self.lengths[sequences]
        advantages = self.advantages[span]
        old_logprobs = self.rule.old_logprobs(logprobs, sampler_logprobs)
        return _OldValues(
            old_logprobs=old_logprobs,
            correction=self.rule.weights(logprobs, sampler_logprobs, lengths),
            columns=self.loss.prepare(UpdateTokens(old_logprobs, advantages, lengths)),
            advantages=advantages,
            lengths=lengths,
        )


@dataclass(frozen=True)
class Experience(UpdateBatch):
    """The N tokens of an update's S completions, flat and in the order of `batches`.

    Attributes:
        old_logprobs: [N] float32, log π_old(token), the denominator of the ratio: the trainer's or the sampler's.
        trainer_logprobs: [N] float32, log-probs of π_old as the trainer computes them; None where the sampler's are
            used as these.
        correction: [N] float32, the weight of `objective.importance`, an estimate of π_old/π_sampler; None where the
            sampler's log-probs are the trainer's (`sampling.base.is_exact`), or where no correction is configured.
        columns: what `loss` computed from π_old (`PolicyLoss.prepare`), [N] each; for interval methods `lower` and
            `upper`, the ratio bounds.
    """

    old_logprobs: torch.Tensor
    trainer_logprobs: torch.Tensor | None
    correction: torch.Tensor | None
    columns: Columns

    @property
    def trained_advantages(self) -> torch.Tensor:
        """The advantages, and 0 for tokens whose importance weight is 0: these have no part in the loss, [N]."""
        if self.correction is None:
            return self.advantages
        return torch.where(self.correction == 0, 0.0, self.advantages)

    def loss_inputs(self, batch: MicroBatch, logprobs: torch.Tensor, weights: torch.Tensor) -> LossInputs:
        """Return the inputs of the loss for a micro-batch; see `UpdateBatch.loss_inputs`."""
        span = batch.span
        values = _OldValues(
            old_logprobs=self.old_logprobs[span],
            correction=None if self.correction is None else self.correction[span],
            columns={name: column[span] for name, column in self.columns.items()},
            advantages=self.advantages[span],
            lengths=self.lengths[batch.sequences],
        )
        reference = None if self.ref_logprobs is None else self.ref_logprobs[span]
        return values.inputs(logprobs, weights[span], reference)


@dataclass(frozen=True)
class _OldValues:
    """Values of n tokens under π_old, [n] each."""

    old_logprobs: torch.Tensor
    correction: torch.Tensor | None
    columns: Columns
    advantages: torch.Tensor
    lengths: torch.Tensor

    def inputs(
        self, logprobs: torch.Tensor, weights: torch.Tensor, ref_logprobs: torch.Tensor | None
    ) -> LossInputs:
        """Return the inputs of the loss; `weights` [n] are the aggregation weights."""
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=self.old_logprobs,
            advantages=self.advantages,
            weights=weights if self.correction is None else weights * self.correction,
            lengths=self.lengths,
            columns=self.columns,
            ref_logprobs=ref_logprobs,
        )


@dataclass(frozen=True)
class Forward:
    """The forward passes of an update, at the weights before it; all tensors are detached.

    Attributes:
        loss: the update's loss, a scalar on the device.
        logprobs: [N], log π(token), nats.
        ratios: [N], π/π_old.
        gradient_weights: [N], as in `LossOutputs`.
        entropy: [N], entropy of π at T=1, nats; None where it was not asked for.
    """

    loss: torch.Tensor
    logprobs: torch.Tensor
    ratios: torch.Tensor
    gradient_weights: torch.Tensor
    entropy: torch.Tensor | None = None
