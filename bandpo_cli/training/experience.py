"""Experience: the tokens that one update trains on, with all values that are computed before the step's first update.

Dimensions: P groups of G completions, S = P·G completions, N tokens in total. Per-token tensors are flat, [N], without
padding, and in the order of the completions. Log-probs and entropies are in nats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError
from bandpo_cli.models.load import Policy
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.packing import Row, TokenBatch, batch_rows, collate, rows_from_groups
from bandpo_cli.objective.importance import importance_weights
from bandpo_cli.objective.loss import Columns, LossInputs, PolicyLoss, UpdateTokens
from bandpo_cli.types import Group


@dataclass(frozen=True)
class Experience:
    """The N tokens of an update's S completions, flat and in the order of `rows`.

    Attributes:
        groups: the P groups that the completions belong to.
        rows: the model's input: prompts and completions as rows of tokens.
        lengths: [S] int64, tokens per completion.
        old_logprobs: [N] float32, log π_old(token), the denominator of the ratio: the trainer's or the sampler's.
        trainer_logprobs: [N] float32, log-probs of π_old as the trainer computes them.
        sampler_logprobs: [N] float32, log-probs of π_old as the sampler reported them.
        entropy: [N] float32, entropy of π_old at T=1 at each token's position.
        correction: [N] float32, the weight of `objective.importance`, an estimate of π_old/π_sampler; None where the
            sampler's log-probs are the trainer's (`sampling.base.is_exact`), or where no correction is configured.
        loss: the policy loss of the method.
        columns: what `loss` computed from π_old (`PolicyLoss.prepare`), [N] each; for interval methods `lower` and
            `upper`, the ratio bounds.
        advantages: [N] float32, the advantage of the token's completion.
        ref_logprobs: [N] float32, log-probs under the reference model; None without one.
    """

    groups: Sequence[Group]
    rows: list[Row]
    lengths: torch.Tensor
    old_logprobs: torch.Tensor
    trainer_logprobs: torch.Tensor
    sampler_logprobs: torch.Tensor
    entropy: torch.Tensor
    correction: torch.Tensor | None
    loss: PolicyLoss
    columns: Columns
    advantages: torch.Tensor
    ref_logprobs: torch.Tensor | None

    @property
    def trained_advantages(self) -> torch.Tensor:
        """The advantages, and 0 for tokens whose importance weight is 0: these have no part in the loss, [N]."""
        if self.correction is None:
            return self.advantages
        return torch.where(self.correction == 0, 0.0, self.advantages)

    def loss_inputs(self, batch: MicroBatch, logprobs: torch.Tensor, weights: torch.Tensor) -> LossInputs:
        """Return the inputs of the loss for a micro-batch of n tokens.

        Args:
            logprobs: [n], log-probs under the policy being updated, with gradient.
            weights: [N], the aggregation weight of every token of the update.
        """
        span = batch.span
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=self.old_logprobs[span],
            advantages=self.advantages[span],
            weights=weights[span] if self.correction is None else weights[span] * self.correction[span],
            lengths=self.lengths[batch.sequences],
            columns={name: column[span] for name, column in self.columns.items()},
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[span],
        )


@dataclass(frozen=True)
class Forward:
    """The forward passes of an update, at the weights before it; all tensors are detached.

    Attributes:
        loss: the update's loss.
        logprobs: [N], log π(token), nats.
        ratios: [N], π/π_old.
        gradient_weights: [N], as in `LossOutputs`.
    """

    loss: float
    logprobs: torch.Tensor
    ratios: torch.Tensor
    gradient_weights: torch.Tensor


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


def micro_batches(policy: Policy, rows: Sequence[Row], max_tokens: int) -> Iterator[MicroBatch]:
    """Yield the rows in batches of at most `max_tokens` tokens."""
    token = sequence = 0
    for batch_of_rows in batch_rows(rows, max_tokens):
        tokens = collate(batch_of_rows, policy.device)
        last_token = token + len(tokens.targets)
        last_sequence = sequence + sum(len(row.completions) for row in batch_of_rows)
        yield MicroBatch(tokens, slice(token, last_token), slice(sequence, last_sequence))
        token, sequence = last_token, last_sequence


@torch.no_grad()
def prepare_experience(
    policy: Policy,
    reference: Policy | None,
    groups: Sequence[Group],
    advantages_PG: torch.Tensor,
    loss: PolicyLoss,
    config: RunConfig,
    sampler_is_exact: bool = True,
) -> Experience:
    """Compute old log-probs, entropy, the method's columns and reference log-probs of an update's groups.

    The values are not checked for NaN and infinity; `update_policy` does that.

    Args:
        policy: π_old, the policy before the step's first update.
        reference: the reference model, or None without a KL penalty.
        groups: the P graded groups.
        advantages_PG: [P, G] float32.
        loss: the method's loss.
        sampler_is_exact: the sampler's log-probs are the trainer's, so that no correction is needed; see
            `sampling.base.is_exact`.

    Raises:
        RunError: a completion has no tokens.
    """
    completions = [rollout.completion for group in groups for rollout in group.rollouts_G]
    if not all(completion.token_ids for completion in completions):
        raise RunError("the sampler returned a completion without a token, not even an end token")
    objective, temperature, device = config.objective, config.sampling.temperature, policy.device
    max_tokens = config.optim.micro_batch_tokens
    rows = rows_from_groups(groups)
    lengths = torch.tensor([len(completion.token_ids) for completion in completions], device=device)
    outputs = [
        token_logprobs(policy.model, batch.tokens, temperature, with_entropy=True)
        for batch in micro_batches(policy, rows, max_tokens)
    ]
    trainer_logprobs = torch.cat([output.logprobs for output in outputs])
    ref_logprobs = None
    if reference is not None:
        batches = micro_batches(reference, rows, max_tokens)
        ref_logprobs = torch.cat(
            [token_logprobs(reference.model, batch.tokens, temperature).logprobs for batch in batches]
        )
    reported = [logprob for completion in completions for logprob in completion.logprobs]
    sampler_logprobs = torch.tensor(reported, device=device)
    by_trainer = objective.old_logprobs == "trainer"
    old_logprobs = trainer_logprobs if by_trainer else sampler_logprobs
    correction = None
    if by_trainer and not sampler_is_exact:
        correction = importance_weights(trainer_logprobs, sampler_logprobs, lengths, objective)
    advantages = advantages_PG.flatten().to(device).repeat_interleave(lengths)
    return Experience(
        groups=groups,
        rows=rows,
        lengths=lengths,
        old_logprobs=old_logprobs,
        trainer_logprobs=trainer_logprobs,
        sampler_logprobs=sampler_logprobs,
        entropy=torch.cat([output.entropy for output in outputs if output.entropy is not None]),
        correction=correction,
        loss=loss,
        columns=loss.prepare(UpdateTokens(old_logprobs, advantages, lengths)),
        advantages=advantages,
        ref_logprobs=ref_logprobs,
    )
