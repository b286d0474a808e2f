"""Experience: the tokens of one update, with all values that are computed before the step's first update.

`old_policy` chooses the source of the values under π_old, the policy before a step's first update. Groups whose
advantages are all 0 are left out: without a penalty and an entropy bonus they have no gradient. With
`objective.mask_truncated` a truncated completion has the advantage and the weight 0. Every rank holds the values of
all N tokens, but its micro-batches are only its part of them.

Dimensions: P groups of G completions, S = P·G completions, N tokens in total. Per-token tensors are flat, [N], in the
order of the completions. Log-probs and entropies are in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError
from bandpo_cli.methods.importance_correction import importance_weights
from bandpo_cli.methods.loss import LossBatch, PolicyLoss
from bandpo_cli.models import packing
from bandpo_cli.models.load import Policy
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.objective.advantages import wrong_peers
from bandpo_cli.objective.policy_objective import AGGREGATIONS, entropy_threshold, off_policy_tokens
from bandpo_cli.processes.ranks import Ranks
from bandpo_cli.types import Group


class MicroBatch(NamedTuple):
    """Complete completions that go through the model in one pass: n sampled tokens of s completions."""

    tokens: packing.TokenBatch
    span: Tensor  # [n] int64, index of each sampled token among the N of the update
    sequences: Tensor  # [s] int64, index of each completion among the S of the update


Batch = TypeVar("Batch", bound=LossBatch)

Pass = Literal["own pass", "extra pass"]
"""A forward pass of the trainer under π_old: that of the first update itself, since the policy is still π_old then, or
one without gradient before the updates."""


class OldPolicy(NamedTuple):
    """The source of an update's values under π_old, and the passes of the trainer that measure them."""

    source: Literal["sampler"] | Pass  # of the log-probs that the ratio is taken to
    measured: Pass | None  # gives log-probs and entropies by the trainer; None for the values of the sampler
    measures_left_out: bool  # an extra pass gives those of the groups that are left out of the update, too
    is_exact: bool  # the sampler's log-probs need no correction; see `sampling.sampler.is_exact`


def old_policy(groups: Sequence[Group], loss: PolicyLoss, is_exact: bool, is_first: bool) -> OldPolicy:
    """Choose where an update takes its values under π_old from; `is_first` for the first update after sampling.

    The ratio is taken to the sampler's log-probs if `objective.old_logprobs` says so, and in later updates if they are
    exact. The first update takes its own even then: its ratios are exactly 1. A method that compares all tokens of an
    update cannot wait for that pass, nor can `objective.top_entropy` where the sampler has reported no entropies. A
    pass that only serves metrics needs `objective.all_token_metrics`, unless it is a part of the first update.
    """
    objective = loss.objective
    completions = (rollout.completion for group in groups for rollout in group.rollouts_G)
    lacks_entropy = objective.top_entropy is not None and not all(
        len(item.entropies) == len(item.token_ids) for item in completions
    )
    all_tokens = lacks_entropy or (objective.all_token_metrics and not is_exact)
    if objective.old_logprobs == "sampler" or (is_exact and not is_first):
        measured: Pass | None = "own pass" if is_first else None
        if lacks_entropy or (all_tokens and not is_first):
            measured = "extra pass"
        return OldPolicy("sampler", measured, all_tokens, is_exact)
    source: Pass = "own pass" if is_first and not (loss.needs_all_tokens or lacks_entropy) else "extra pass"
    return OldPolicy(source, source, all_tokens, is_exact)


@dataclass(frozen=True, kw_only=True)
class Experience(LossBatch):
    """The N tokens of an update's S completions, or of some of them."""

    groups: Sequence[Group]  # the P groups that the completions belong to
    # [S] bool on the CPU, False for a completion that `objective.mask_truncated` masks: it has no loss, and does not
    # count in the normalisation of the loss.
    has_loss: Tensor
    micro_batches: Sequence[MicroBatch]  # the completions of this rank; as many micro-batches on every rank
    order: Tensor | None  # [N] int64, index in the update of each token in the order of several ranks
    sampler_logprobs: Tensor  # also `old_logprobs`, until the source `old` has given other ones
    loss: PolicyLoss
    old: OldPolicy
    trainer_logprobs: Tensor | None = None  # [N] float32, log-probs of π_old as the trainer computes them
    entropy: Tensor | None = None  # [N] float32, of π_old at T=1, by the trainer, else by the sampler
    entropy_threshold: Tensor | None = None  # the lowest entropy of a `chosen` token, scalar
    # The tokens of the update's other groups, whose advantages are all 0. They do not go through the model in the
    # update, but count in the normalisation of the loss and in the metrics that need no ratio.
    left_out: Experience | None = None

    @property
    def parts(self) -> list[Experience]:
        """The tokens of all groups of the update: these, and those that are left out."""
        return [self] if self.left_out is None else [self, self.left_out]

    @property
    def measures_entropy(self) -> bool:
        """Whether the pass of the update gives the entropies under π_old."""
        return self.old.measured == "own pass" and not (self.old.is_exact and self.entropy is not None)

    def loss_weights(self, aggregation: str, max_tokens: int) -> Tensor:
        """Return the weight of each token in the loss of the update, [N] float32, by `objective.aggregation`."""
        has_loss = torch.cat([part.has_loss for part in self.parts])
        lengths = torch.cat([part.lengths for part in self.parts])
        counted = packing.device_tensor(has_loss.nonzero().squeeze(1), lengths.device)
        weights = torch.zeros(len(lengths), device=lengths.device)
        weights[counted] = AGGREGATIONS[aggregation](lengths[counted], max_tokens)
        return weights[: len(self.lengths)].repeat_interleave(self.lengths, output_size=self.tokens)

    @property
    def tokens(self) -> int:
        """The number of tokens, N."""
        return len(self.sampler_logprobs)

    def dropped(self, logprobs: Tensor) -> Tensor | None:
        """Return which tokens the off-policy mask drops, bool [N], for log π [N] in the update; None without it."""
        threshold = self.loss.objective.off_policy_mask
        return None if threshold is None else off_policy_tokens(logprobs, self, threshold)

    def trained_advantages(self, logprobs: Tensor) -> Tensor:
        """Return the advantages, and 0 for masked, dropped and not chosen tokens, which have no policy loss, [N]."""
        masked = None if self.importance_weights is None else self.importance_weights == 0
        others = None if self.chosen is None else ~self.chosen
        advantages = self.advantages
        for mask in (masked, self.dropped(logprobs), others):
            if mask is not None:
                advantages = advantages.masked_fill(mask, 0.0)
        return advantages

    def batch(self, part: MicroBatch, logprobs: Tensor) -> LossBatch:
        """Return the values of the tokens of one of `micro_batches`.

        `logprobs`, [n], are those of the pass of the update, which may be the source of the values under π_old.
        """
        tokens, completions = part.span, part.sequences
        batch = LossBatch(
            lengths=self.lengths[completions],
            advantages=self.advantages[tokens],
            old_logprobs=self.old_logprobs[tokens],
            columns={name: column[tokens] for name, column in self.columns.items()},
            importance_weights=None if self.importance_weights is None else self.importance_weights[tokens],
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[tokens],
            sampler_logprobs=self.sampler_logprobs[tokens],
            wrong_peers=None if self.wrong_peers is None else self.wrong_peers[completions],
            chosen=None if self.chosen is None else self.chosen[tokens],
        )
        if self.old.source == "own pass":
            return self._under_trainer(batch, logprobs.detach())
        return batch

    def _under_trainer(self, batch: Batch, logprobs: Tensor) -> Batch:
        """Return n tokens with the ratio taken to log-probs of π_old by the trainer, [n] float32.

        Importance weights and the columns of the method follow from them.
        """
        weights = None
        if not self.old.is_exact:
            weights = importance_weights(logprobs, batch.sampled_logprobs, batch.lengths, self.loss.objective)
        sampled = (batch.sampled_logprobs,) if self.loss.needs_sampler else ()
        columns = self.loss.prepare(logprobs, batch.advantages, *sampled)
        return replace(batch, old_logprobs=logprobs, importance_weights=weights, columns=columns)

    def gather(self, ranks: Ranks, columns: Sequence[Tensor]) -> list[Tensor]:
        """Return the values of all ranks, [N] each, in the order of the update.

        `columns` are of one dtype and have the values of the tokens of `micro_batches`, one after another.
        """
        gathered = ranks.concatenate(columns)
        if self.order is None:
            return gathered
        return [torch.empty_like(column).index_copy_(0, self.order, column) for column in gathered]

    def measured(self, logprobs: Tensor, entropy: Tensor | None) -> Experience:
        """Return the experience with log-probs and entropies (None: those of the sampler) by the trainer, [N] float32.

        The ratio is taken to these log-probs unless its source is the sampler.
        """
        entropy = self.entropy if entropy is None else entropy
        experience = replace(self, trainer_logprobs=logprobs, entropy=entropy)
        if self.old.source == "sampler":
            return experience
        return self._under_trainer(experience, logprobs)

    def updated(self, logprobs: Tensor, entropy: Tensor | None) -> Experience:
        """Return the experience after its update, whose pass gave these values; it may be a pass under π_old."""
        return self.measured(logprobs, entropy) if self.old.measured == "own pass" else self

    def on_host(self) -> Experience:
        """Return the experience without micro-batches, with `host_copy` of its tensors."""
        tensors: dict[str, Any] = {
            name: packing.host_copy(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        columns = {name: packing.host_copy(column) for name, column in self.columns.items()}
        left_out = None if self.left_out is None else self.left_out.on_host()
        return replace(self, micro_batches=(), columns=columns, left_out=left_out, **tensors)


@torch.no_grad()
def prepare_updates(
    policy: Policy,
    reference: Policy | None,
    groups: Sequence[Group],
    advantages_PG: Tensor,
    loss: PolicyLoss,
    config: RunConfig,
    sampler_is_exact: bool,
) -> list[Experience]:
    """Return one experience per update of the step, each from P/`optim.updates` consecutive groups.

    All values of π_old that an update's own forward pass does not give are computed here, before the first update. They
    are not checked for NaN and infinity; `update_policy` does that. Raise RunError if a completion has no tokens.

    Args:
        policy: π_old, the policy before the step's first update.
        reference: the reference model, or None without a KL penalty.
        advantages_PG: [P, G] float32.
        sampler_is_exact: the sampler's log-probs need no correction; see `sampling.sampler.is_exact`.
    """
    max_tokens, temperature = config.optim.pass_tokens, config.sampling.temperature
    device, objective, size = policy.device, loss.objective, len(groups) // config.optim.updates
    finished_PG = [[item.completion.finish_reason == "stop" for item in group.rollouts_G] for group in groups]
    has_loss_PG = torch.tensor(finished_PG) | (not objective.mask_truncated)
    advantages_PG = advantages_PG.where(has_loss_PG, 0.0)
    # With a penalty, a bonus, or a method that compares all tokens, groups without an advantage have a gradient, too.
    has_bonus = objective.entropy_bonus > 0 or objective.entropy_target is not None
    trains_all = bool(reference or loss.needs_all_tokens or has_bonus or objective.drift_penalty)
    first, later = (old_policy(groups, loss, sampler_is_exact, is_first) for is_first in (True, False))
    experiences = []
    for start in range(0, len(groups), size):
        part, old = slice(start, start + size), later if start else first
        of_update = groups[part], advantages_PG[part], has_loss_PG[part], loss, old, device
        runs = active_groups(advantages_PG[part]) | trains_all
        experience = _with_micro_batches(_sampled(*of_update, runs), policy, max_tokens)
        if reference is not None:
            (ref_logprobs,) = _forward(reference, experience, temperature, with_entropy=False)
            experience = replace(experience, ref_logprobs=ref_logprobs)
        if old.source == "sampler":
            columns = loss.prepare(experience.old_logprobs, experience.advantages)
            experience = replace(experience, columns=columns)
        if old.measured == "extra pass":
            experience = experience.measured(*_forward(policy, experience, temperature))
        if not runs.all():
            left_out = _sampled(*of_update, ~runs)
            if old.measures_left_out:
                in_model = _with_micro_batches(left_out, policy, max_tokens)
                left_out = left_out.measured(*_forward(policy, in_model, temperature))
            experience = replace(experience, left_out=left_out)
        if objective.top_entropy is not None:
            experience = _with_chosen(experience, objective.top_entropy)
        experiences.append(experience)
    return experiences


def _with_chosen(experience: Experience, share: float) -> Experience:
    """Return the experience with the share of tokens that have the highest entropy as `chosen`.

    The share is one of the tokens of all groups and ranks, without those that `objective.mask_truncated` masks.
    """
    columns = []
    for part in experience.parts:
        assert part.entropy is not None
        has_loss = packing.device_tensor(part.has_loss, part.lengths.device)
        columns.append(part.entropy[has_loss.repeat_interleave(part.lengths, output_size=part.tokens)])
    if not len(entropy := torch.cat(columns)):
        return experience
    assert experience.entropy is not None
    threshold = entropy_threshold(entropy, share)
    return replace(experience, chosen=experience.entropy >= threshold, entropy_threshold=threshold)


@torch.no_grad()
def adapted(policy: Policy, experience: Experience, temperature: float) -> Experience:
    """Return the experience with the columns that the method chooses from the ratios before the update."""
    (logprobs,) = _forward(policy, experience, temperature, with_entropy=False)
    columns = experience.loss.adapt(experience, logprobs)
    return replace(experience, columns={**experience.columns, **columns})


def active_groups(advantages_PG: Tensor) -> Tensor:
    """Return which groups have an advantage that is not 0, [P] bool; the first one where none has.

    An update without any token would leave the moments of AdamW as they are; with a gradient of 0 they decay.
    """
    active = (advantages_PG != 0).any(dim=1)
    if not active.any():
        active[0] = True
    return active


def _sampled(
    groups: Sequence[Group],
    advantages_PG: Tensor,
    has_loss_PG: Tensor,
    loss: PolicyLoss,
    old: OldPolicy,
    device: torch.device,
    chosen_P: Tensor,
) -> Experience:
    """Return the experience of the chosen groups with the values of the sampler, without micro-batches."""
    groups, advantages = [*compress(groups, chosen_P.tolist())], advantages_PG[chosen_P].flatten().to(device)
    completions = [rollout.completion for group in groups for rollout in group.rollouts_G]
    if not all(completion.token_ids for completion in completions):
        raise RunError("the sampler returned a completion without a token, not even an end token")
    peers = [share for group in groups for share in wrong_peers(group)]
    lengths = packing.device_tensor([len(completion.token_ids) for completion in completions], device)
    sampler_logprobs = packing.device_tensor(np.concatenate([item.logprobs for item in completions]), device)
    entropy = None
    if all(len(item.entropies) == len(item.token_ids) for item in completions):
        entropy = packing.device_tensor(np.concatenate([item.entropies for item in completions]), device)
    return Experience(
        groups=groups,
        micro_batches=(),
        order=None,
        lengths=lengths,
        has_loss=has_loss_PG[chosen_P].flatten(),
        wrong_peers=packing.device_tensor(peers, device, torch.float32),
        advantages=advantages.repeat_interleave(lengths, output_size=len(sampler_logprobs)),
        sampler_logprobs=sampler_logprobs,
        old_logprobs=sampler_logprobs,
        entropy=entropy,
        loss=loss,
        old=old,
    )


def _with_micro_batches(experience: Experience, policy: Policy, max_tokens: int) -> Experience:
    """Return the experience with this rank's completions in micro-batches of at most `max_tokens` tokens.

    The ranks have about equal numbers of tokens, and equal numbers of micro-batches: some may be empty, because every
    pass through a sharded model needs all ranks.
    """
    ranks, device, groups = policy.ranks, experience.lengths.device, experience.groups
    prompts_P = [group.rollouts_G[0].prompt_ids for group in groups]
    completions_PG = [[rollout.completion.marked_ids for rollout in group.rollouts_G] for group in groups]
    lengths_PG = [[*map(len, completions_G)] for completions_G in completions_PG]
    owners_PG = np.array(packing.balanced_owners([*map(len, prompts_P)], lengths_PG, ranks.size))
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]
    token_owners = owners_PG.repeat([len(rollout.completion.token_ids) for rollout in rollouts])
    sequences, tokens = (np.flatnonzero(owners == ranks.rank) for owners in (owners_PG, token_owners))
    batches = []
    own_rows = packing.shared_rows(prompts_P, completions_PG, (owners_PG == ranks.rank).tolist())
    for rows in packing.batch_rows(own_rows, max_tokens):
        batch = packing.collate(rows, device)
        n, s = len(batch.targets), sum(len(row.completions) for row in rows)
        places = (packing.device_tensor(tokens[:n], device), packing.device_tensor(sequences[:s], device))
        batches.append(MicroBatch(batch, *places))
        tokens, sequences = tokens[n:], sequences[s:]
    if missing := max(ranks.gather(len(batches))) - len(batches):
        none = packing.device_tensor([], device, torch.int64)
        batches += [MicroBatch(packing.empty_batch(policy.pad_id, device), none, none)] * missing
    order = None if ranks.size == 1 else packing.device_tensor(token_owners.argsort(kind="stable"), device)
    return replace(experience, micro_batches=batches, order=order)


def _forward(
    policy: Policy, experience: Experience, temperature: float, with_entropy: bool = True
) -> list[Tensor]:
    """Return log-probs, and entropies if asked for, of the tokens of all ranks, [N] each."""
    outputs = []
    with policy.passes() as model:
        for batch in experience.micro_batches:
            output = token_logprobs(model, batch.tokens, temperature, with_entropy)
            batch.tokens.packing.drop_masks()
            outputs.append([values for values in output if values is not None])
    return experience.gather(policy.ranks, [torch.cat(values) for values in zip(*outputs, strict=True)])
