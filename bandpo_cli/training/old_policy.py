"""Values of π_old, the policy before a step's first update, for each update, with as few forward passes as possible.

The log-probs of π_old have three sources:

- `SAMPLER`: a sampler that runs the trainer's own model in float32 has computed them, and the entropies.
- `FORWARD`: at the first update of a step the policy is π_old, so its own forward pass gives them.
- `TRAINER`: a pass of the trainer without gradient, for the later updates where the sampler's differ, and for a first
  update whose method needs all tokens at once.

Groups whose advantages are all 0 have no gradient without a reference model; they go through the model only in passes
without gradient, where their log-probs or entropies are not known.

Dimensions as in `training.experience`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError
from bandpo_cli.models.load import Policy
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.packing import device_tensor
from bandpo_cli.objective.loss import PolicyLoss
from bandpo_cli.training.experience import (
    CorrectionRule,
    Experience,
    IdleTokens,
    MicroBatch,
    UpdateBatch,
    rank_batches,
)
from bandpo_cli.types import Completion, Group


class OldSource(Enum):
    """Source of the log-probs of π_old; see the module."""

    SAMPLER = auto()
    FORWARD = auto()
    TRAINER = auto()


def prepare_updates(
    policy: Policy,
    reference: Policy | None,
    groups: Sequence[Group],
    advantages_PG: torch.Tensor,
    loss: PolicyLoss,
    config: RunConfig,
    sampler_is_exact: bool,
) -> list[UpdateBatch]:
    """Return one batch per update of the step, each from P/`optim.updates` consecutive groups.

    All values of π_old that an update's own forward pass does not give are computed here, before the first update.

    Args:
        groups: the P graded groups of the step.
        advantages_PG: [P, G] float32.

    Other arguments and errors as in `prepare_experience`.
    """
    exact = sampler_is_exact and _have_entropies(groups)
    step = _Step(policy, reference, loss, config, sampler_is_exact, exact)
    size = len(groups) // config.optim.updates
    batches = []
    for start in range(0, len(groups), size):
        if start == 0:
            # The same kernels as in the update: its ratios are exactly 1.
            source = OldSource.TRAINER if loss.needs_all_tokens else OldSource.FORWARD
        else:
            source = OldSource.SAMPLER if exact else OldSource.TRAINER
        advantages = advantages_PG[start : start + size]
        runs = torch.ones(len(advantages), dtype=torch.bool)
        if reference is None and not loss.needs_all_tokens:
            runs = active_groups(advantages)
        batches.append(step.batch(groups[start : start + size], advantages, source, runs))
    return batches


def prepare_experience(
    policy: Policy,
    reference: Policy | None,
    groups: Sequence[Group],
    advantages_PG: torch.Tensor,
    loss: PolicyLoss,
    config: RunConfig,
    sampler_is_exact: bool = True,
) -> Experience:
    """Compute all values of an update from passes of the trainer, and leave out no group.

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
    step = _Step(policy, reference, loss, config, sampler_is_exact, exact=False)
    runs = torch.ones(len(groups), dtype=torch.bool)
    batch = step.batch(groups, advantages_PG, OldSource.TRAINER, runs)
    assert isinstance(batch, Experience)
    return batch


@dataclass(frozen=True)
class _Step:
    """What the updates of a step have in common; attributes as the arguments of `prepare_experience`.

    Attributes:
        exact: `sampler_is_exact`, and the sampler reported entropies: nothing is computed that it has computed.
    """

    policy: Policy
    reference: Policy | None
    loss: PolicyLoss
    config: RunConfig
    sampler_is_exact: bool
    exact: bool

    @torch.no_grad()
    def batch(
        self, groups: Sequence[Group], advantages_PG: torch.Tensor, source: OldSource, runs_P: torch.Tensor
    ) -> UpdateBatch:
        """Return the batch of one update: an `Experience`, except with the source `FORWARD`.

        Args:
            runs_P: [P] bool, the groups that the update runs through the model; the others have no advantage.
        """
        if not all(completion.token_ids for completion in _completions(groups)):
            raise RunError("the sampler returned a completion without a token, not even an end token")
        used = [group for group, runs in zip(groups, runs_P.tolist(), strict=True) if runs]
        others = [group for group, runs in zip(groups, runs_P.tolist(), strict=True) if not runs]
        completions, device = _completions(used), self.policy.device
        lengths = _lengths(completions, device)
        batches = self._micro_batches(used)
        batch = UpdateBatch(
            groups=used,
            batches=batches,
            lengths=lengths,
            sampler_logprobs=_flat(completions, lambda each: each.logprobs, device),
            entropy=_flat(completions, lambda each: each.entropies, device) if self.exact else None,
            loss=self.loss,
            rule=self._rule,
            advantages=advantages_PG[runs_P].flatten().to(device).repeat_interleave(lengths),
            ref_logprobs=None if self.reference is None else self._run(self.reference, batches)[0],
            idle=self._idle_tokens(others) if others else None,
        )
        if source is OldSource.FORWARD:
            return batch
        if source is OldSource.SAMPLER:
            return batch.with_old_policy()
        return batch.with_old_policy(*self._run(self.policy, batches, with_entropy=True))

    @property
    def _rule(self) -> CorrectionRule:
        by_trainer = self.config.objective.old_logprobs == "trainer"
        return CorrectionRule(
            self.config.objective, by_trainer, corrects=by_trainer and not self.sampler_is_exact
        )

    def _idle_tokens(self, groups: Sequence[Group]) -> IdleTokens:
        """Return the tokens of groups without an advantage; a sampler that is not exact costs a pass over them."""
        completions, device = _completions(groups), self.policy.device
        lengths = _lengths(completions, device)
        sampler_logprobs = _flat(completions, lambda each: each.logprobs, device)
        if self.exact:
            entropy = _flat(completions, lambda each: each.entropies, device)
            return IdleTokens(lengths, sampler_logprobs, sampler_logprobs, None, entropy, None)
        logprobs, entropies = self._run(self.policy, self._micro_batches(groups), with_entropy=True)
        return IdleTokens(
            lengths=lengths,
            old_logprobs=self._rule.old_logprobs(logprobs, sampler_logprobs),
            sampler_logprobs=sampler_logprobs,
            trainer_logprobs=logprobs,
            entropy=entropies,
            correction=self._rule.weights(logprobs, sampler_logprobs, lengths),
        )

    def _micro_batches(self, groups: Sequence[Group]) -> list[MicroBatch]:
        return rank_batches(self.policy, groups, self.config.optim.micro_batch_tokens)

    def _run(
        self, policy: Policy, batches: Sequence[MicroBatch], with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probs and entropies of all tokens of the batches, of those of all ranks, [N] each."""
        temperature = self.config.sampling.temperature
        outputs = []
        with policy.passes() as model:
            for each in batches:
                outputs.append(token_logprobs(model, each.tokens, temperature, with_entropy))
                each.tokens.packing.drop_masks()
        found = [torch.cat([output.logprobs for output in outputs])]
        if with_entropy:
            found.append(torch.cat([output.entropy for output in outputs if output.entropy is not None]))
        logprobs, *entropies = policy.ranks.concatenate(found)
        return logprobs, entropies[0] if entropies else None


def active_groups(advantages_PG: torch.Tensor) -> torch.Tensor:
    """Return which groups have an advantage that is not 0, [P] bool; the first one where none has.

    An update without any token would leave the moments of AdamW as they are; with a gradient of 0 they decay.
    """
    active = (advantages_PG != 0).any(dim=1)
    if not active.any():
        active[0] = True
    return active


def _have_entropies(groups: Sequence[Group]) -> bool:
    """Return whether the sampler reported the entropy at every token."""
    return all(len(each.entropies) == len(each.token_ids) for each in _completions(groups))


def _completions(groups: Sequence[Group]) -> list[Completion]:
    return [rollout.completion for group in groups for rollout in group.rollouts_G]


def _lengths(completions: Sequence[Completion], device: torch.device) -> torch.Tensor:
    return device_tensor([len(completion.token_ids) for completion in completions], device)


def _flat(
    completions: Sequence[Completion], values: Callable[[Completion], array[float]], device: torch.device
) -> torch.Tensor:
    """Return a value per token of all completions, [N] float32."""
    return device_tensor(np.concatenate([np.asarray(values(each)) for each in completions]), device)
