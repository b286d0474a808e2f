"""What one update learns from: graded groups, with everything that π_old fixes already computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bandpo_cli.bounds import RatioBounds
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError
from bandpo_cli.models.load import Policy
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.packing import Row, TokenBatch, batch_rows, collate, rows_from_groups
from bandpo_cli.objective.loss import LossInputs, truncated_importance
from bandpo_cli.types import Group

BoundsOf = Callable[[torch.Tensor], RatioBounds]


@dataclass(frozen=True)
class Experience:
    """The N tokens of an update's S completions, flat and in the order of `rows`.

    Attributes:
        groups: where the completions come from.
        rows: what the model is run on.
        lengths: [S] int64, tokens of each completion.
        old_logprobs: [N] float32, nats: what ratios are taken to, the trainer's or the sampler's.
        trainer_logprobs, sampler_logprobs: [N] float32, nats: the same policy as each of the two computes it.
        entropy: [N] float32, nats, at T=1.
        correction: [N], π_old/π_sampler truncated at a cap, where the sampler is another engine; else None.
        bounds: lower and upper ratio bounds, [N] each.
        advantages: [N], the completion's advantage at each of its tokens.
        ref_logprobs: [N] under the reference model, or None.
    """

    groups: Sequence[Group]
    rows: list[Row]
    lengths: torch.Tensor
    old_logprobs: torch.Tensor
    trainer_logprobs: torch.Tensor
    sampler_logprobs: torch.Tensor
    entropy: torch.Tensor
    correction: torch.Tensor | None
    bounds: RatioBounds
    advantages: torch.Tensor
    ref_logprobs: torch.Tensor | None

    def loss_inputs(self, span: slice, logprobs: torch.Tensor, weights: torch.Tensor) -> LossInputs:
        """Return the loss's inputs for the tokens in `span`; `logprobs` are theirs, `weights` are all N."""
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=self.old_logprobs[span],
            lower=self.bounds.lower[span],
            upper=self.bounds.upper[span],
            advantages=self.advantages[span],
            weights=weights[span] if self.correction is None else weights[span] * self.correction[span],
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[span],
        )


@dataclass(frozen=True)
class Forward:
    """An experience under the weights that its update starts from: the loss, log-probs and ratios [N] (detached)."""

    loss: float
    logprobs: torch.Tensor
    ratios: torch.Tensor


def micro_batches(policy: Policy, rows: Sequence[Row], max_tokens: int) -> Iterator[tuple[slice, TokenBatch]]:
    """Yield the rows in batches of at most `max_tokens` tokens, each with the span of its tokens among N."""
    start = 0
    for part in batch_rows(rows, max_tokens):
        batch = collate(part, policy.device)
        yield slice(start, start + len(batch.targets)), batch
        start += len(batch.targets)


@torch.no_grad()
def prepare_experience(
    policy: Policy,
    reference: Policy | None,
    groups: Sequence[Group],
    advantages_PG: torch.Tensor,
    bounds_of: BoundsOf,
    config: RunConfig,
    sampler_shares_weights: bool = True,
) -> Experience:
    """Compute old log-probs, entropy, bounds and reference log-probs for an update's groups, finite or not.

    Args:
        sampler_shares_weights: the sampler ran the trainer's own model, so that there is nothing to correct.

    Raises:
        RunError: a completion has no token, so that there is nothing to learn from it.
    """
    completions = [rollout.completion for group in groups for rollout in group.rollouts_G]
    if not all(completion.token_ids for completion in completions):
        raise RunError("the sampler returned a completion without a token; not even one that ends it")
    rows, device = rows_from_groups(groups), policy.device
    temperature, max_tokens = config.sampling.temperature, config.optim.micro_batch_tokens
    parts = [
        token_logprobs(policy.model, batch, temperature, with_entropy=True)
        for _, batch in micro_batches(policy, rows, max_tokens)
    ]
    own = torch.cat([part.logprobs for part in parts])
    ref = None
    if reference is not None:
        batches = micro_batches(reference, rows, max_tokens)
        ref = torch.cat(
            [token_logprobs(reference.model, batch, temperature).logprobs for _, batch in batches]
        )
    lengths = torch.tensor([len(completion.token_ids) for completion in completions], device=device)
    sampled = torch.tensor([lp for completion in completions for lp in completion.logprobs], device=device)
    by_trainer = config.objective.old_logprobs == "trainer"
    old = own if by_trainer else sampled
    cap = config.objective.importance_cap
    corrected = by_trainer and not sampler_shares_weights and cap is not None
    return Experience(
        groups=groups,
        rows=rows,
        lengths=lengths,
        old_logprobs=old,
        trainer_logprobs=own,
        sampler_logprobs=sampled,
        entropy=torch.cat([part.entropy for part in parts if part.entropy is not None]),
        correction=truncated_importance(own, sampled, cap) if corrected and cap is not None else None,
        bounds=bounds_of(old),
        advantages=advantages_PG.flatten().to(device).repeat_interleave(lengths),
        ref_logprobs=ref,
    )
