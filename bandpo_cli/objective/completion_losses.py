"""Policy losses in which the loss of a token depends on the other tokens of its completion, or on its group.

Notation and conventions as in `objective.policy_losses`. A micro-batch has complete completions, so its size changes no
loss. A token that the importance correction masks (weight 0) has no part in the means and products of its completion,
as in verl, which removes such tokens from the response mask before the loss is computed. The value of a completion has
no gradient, so that a token gets its gradient from its own loss only, and its importance weight applies to it alone.
"""

import torch
from torch import Tensor

from bandpo_cli.config import completion_methods as methods
from bandpo_cli.objective.loss import (
    MAX_LOG_RATIO,
    LossBatch,
    log_ratio,
    sequence_index,
    sequence_sum,
)
from bandpo_cli.objective.policy_losses import Bound, MethodLoss, by_sign, clipped_losses, masked_losses


class GspoLoss(MethodLoss[methods.CompletionIntervalSettings]):
    """−min(s·a, clamp(s, 1 − ε, 1 + ε)·a), s = exp(mean over the completion of log r) (arXiv 2507.18071, equation 5).

    Per token it is the GSPO-token form of the paper's section 4.3, s_t = sg(s)·π/sg(π): equal in value, and in
    gradient where the tokens of a completion have equal weights. The recommended aggregation is
    `seq-mean-token-mean`.

    Equal to verl 0.9.1, `compute_policy_loss_gspo` (which limits log s to 10, here ±20), and in the gradient to TRL
    1.16, `importance_sampling_level="sequence"`, which distributes the completion's gradient over its tokens evenly.
    """

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        means = completion_mean(logprobs.detach() - batch.old_logprobs, batch)
        log_s = means + (logprobs - logprobs.detach())
        ratios = torch.exp(log_s.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        return clipped_losses(ratios, batch.advantages, 1.0 - self.settings.eps_low, self.upper(batch))

    def upper(self, batch: LossBatch) -> Bound:
        """Return the upper bound of the ratio of each token's completion, [n] or one number for all."""
        return 1.0 + self.settings.eps_high


class LuspoLoss(GspoLoss):
    """The loss of GSPO times the length of the completion (LUSPO, arXiv 2602.05261).

    With `seq-mean-token-mean` a completion then counts by its sum over tokens, not by its mean, so that long ones have
    no smaller gradient per token. That is GSPO with `seq-sum-norm`, times `sampling.max_tokens`. Masked tokens count in
    the length, as in `objective.aggregation`.

    Equal to TRL 1.16, `loss_type="luspo"` with `importance_sampling_level="sequence"`, whose documentation gives the
    paper's ε (section 5.1).
    """

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        return batch.lengths[sequence_index(batch.lengths)] * super().token_losses(logprobs, batch)


class GapoLoss(GspoLoss):
    """The loss of GSPO with the upper bound 1 + ε(c), ε(c) = ε₋ + (ε₊ − ε₋)·(k − c)/(k − 1) (arXiv 2609.00444, eq. 11).

    c of the k completions of the group are correct. The only correct completion of a group has the bound 1 + ε₊, a
    completion that is not correct 1 + ε₋. The paper does not divide advantages by the standard deviation
    (`objective.advantage_std: false`). Its variant with the ratio of a token is not here. The authors' repository,
    Sheng-J/GAPO, could not be read for the comparison.
    """

    def upper(self, batch: LossBatch) -> Bound:
        assert batch.wrong_peers is not None, "the completions come in groups"
        low, high = self.settings.eps_low, self.settings.eps_high
        return 1.0 + low + (high - low) * batch.wrong_peers[sequence_index(batch.lengths)]


class GmpoLoss(MethodLoss[methods.GmpoSettings]):
    """−a·exp(mean over the completion of the clipped log r) (arXiv 2507.20673, equation 4).

    log r is clipped to [−ε_low, ε_high] on the side that the sign of a asks for, as in PPO; clipped tokens have no
    gradient. With `seq-mean-token-mean` the loss is the mean over completions, as in the source.

    As in `GspoLoss`, each token has the gradient of its own term, which sums up to the paper's where the tokens of a
    completion have equal weights.

    Equal to verl 0.9.1, `compute_policy_loss_geo_mean`; the authors' code is callsys/GMPO, train_zero_math_gmpo.py.
    Two departures: log r is limited to ±20 on the other side, which no finite ratio of interest reaches; and verl
    weights a completion by the geometric mean of its importance weights.
    """

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        low, high = -self.settings.log_eps_low, self.settings.log_eps_high
        log_r = log_ratio(logprobs, batch.old_logprobs)
        clipped = torch.where(batch.advantages > 0, log_r.clamp(max=high), log_r.clamp(min=low))
        means = completion_mean(clipped.detach(), batch)
        return -batch.advantages * torch.exp(means + (clipped - clipped.detach()))


class ToprLoss(MethodLoss[methods.ToprSettings]):
    """−sg(w)·a·log π, w = 1 for a ≥ 0 and clamp(Π r, 0, max_weight) for a < 0 (TOPR, arXiv 2503.14286).

    Two departures: the sign and the factor are those of the paper's reward, here those of the advantage, which is the
    reward minus a baseline; and π_old takes the place of the policy that sampled the data. The paper's ratio is that
    of the complete completion, as here; public code that multiplies per-token ratios' clamps instead (Trinity-RFT,
    `TOPRPolicyLossFn`) differs.
    """

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        products = log_product(logprobs, batch).exp().clamp(max=self.settings.max_weight)
        weights = torch.where(batch.advantages < 0, products, 1.0)
        return -weights * batch.advantages * logprobs


class VespoLoss(MethodLoss[methods.VespoSettings]):
    """−sg(φ(w))·a·log π, φ(w) = w^k·e^{λ(1−w)} with w = Π r over the completion (VESPO, arXiv 2602.10693).

    k and λ depend on the sign of a. φ(1) = 1, and φ is largest at w = k/λ and falls to 0 on both sides.

    Equal to TRL 1.16, `loss_type="vespo"`, and to the authors' code, recipe/vespo/code/core_algos.py of
    FloyedShen/VESPO, both with `token-mean`. One departure: they multiply the weights of the importance correction into
    w; here these weight the loss, as with every method.
    """

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        settings, log_w = self.settings, log_product(logprobs, batch)
        k = by_sign(batch.advantages, settings.k_positive, settings.k_negative)
        rate = by_sign(batch.advantages, settings.lambda_positive, settings.lambda_negative)
        weights = torch.exp(k * log_w + rate - rate * log_w.exp())
        return -weights * batch.advantages * logprobs


def completion_sum(values: Tensor, batch: LossBatch) -> Tensor:
    """Return the sum of `values` [n] over the tokens of each completion that have an importance weight above 0, [s]."""
    weights = batch.importance_weights
    return sequence_sum(values if weights is None else values.where(weights != 0, 0.0), batch.lengths)


def completion_mean(values: Tensor, batch: LossBatch) -> Tensor:
    """Return the mean of `values` [n] over these tokens of each token's completion, [n]; 0 where there are none."""
    counts = completion_sum(torch.ones_like(values), batch).clamp(min=1.0)
    return (completion_sum(values, batch) / counts)[sequence_index(batch.lengths)]


def log_product(logprobs: Tensor, batch: LossBatch) -> Tensor:
    """Return the log of the product of the ratios of each token's completion, [n], without gradient, within ±20."""
    sums = completion_sum(logprobs.detach() - batch.old_logprobs, batch)
    return sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[sequence_index(batch.lengths)]


BUDGET_QUANTILE, BUDGET_RANGE = 0.9, 2.0
"""The budget per token is this quantile of the completion's changes of probability, from `prefix_delta` to this many
times it (section 4.1 of the paper, and UniRL)."""


class CppoLoss(MethodLoss[methods.CppoSettings]):
    """−sg(mask·min(r, max_weight))·a·log π, mask 0 for moves away from π_old beyond a threshold (arXiv 2606.10968).

    The divergence of token t of a completion of T tokens is D_t = |π − π_old|, its weight w_t falls linearly from 1 to
    `last_weight`. The mask is 0 where w_t·D_t exceeds δ, or where the sum of w_j·D_j for j ≤ t exceeds the prefix
    budget δ + b·Σ_{j<t} w_j (equations 8 to 10). Tokens that the importance correction masks count in both sums and in
    b: their change of probability is part of the prefix that the later tokens follow.

    Source: Tencent-Hunyuan/UniRL, unirl/algorithms/cppo.py, `_cppo_loss`. Three departures: the cap `max_weight` is the
    one of the authors' pull request to verl (verl#6731), which clamps b at 5 times its floor, not 2 times as in
    the paper and in UniRL; π_old is the trainer's unless `objective.old_logprobs` is `sampler`; and for post-trained
    models the paper has a fixed b. The paper's experiments have the total variation over the 20 most likely tokens in
    place of D_t.
    """

    def token_losses(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        outside = self.is_outside(logprobs.detach(), batch)
        return masked_losses(logprobs, batch, outside, self.settings.max_weight)

    def is_outside(self, logprobs: Tensor, batch: LossBatch) -> Tensor:
        """Return whether each token exceeds its threshold, bool [n].

        Sums are float64, so that they do not depend on the completions before in the micro-batch.
        """
        lengths, index, delta = batch.lengths, sequence_index(batch.lengths), self.settings.delta
        starts = lengths.cumsum(0) - lengths
        position = torch.arange(len(index), device=index.device) - starts[index]
        slope = (1.0 - self.settings.last_weight) / (lengths - 1).clamp(min=1).double()[index]
        changes = (logprobs.exp() - batch.old_logprobs.exp()).abs().double()
        weighted = (1.0 - slope * position) * changes
        total_before = weighted.cumsum(0) - weighted
        spent = total_before - total_before[starts][index]
        weights_before = position - slope * position * (position - 1) / 2
        floor = self.settings.prefix_delta
        budget = sequence_quantile(changes, lengths, BUDGET_QUANTILE).clamp(floor, BUDGET_RANGE * floor)
        return weighted > delta + (budget[index] * weights_before - spent).clamp(max=0.0)


def sequence_quantile(values: Tensor, lengths: Tensor, q: float) -> Tensor:
    """Return the quantile q of `values` [n] over the tokens of each completion, [s], interpolated linearly."""
    index = sequence_index(lengths)
    order = values.argsort()
    order = order[index[order].argsort(stable=True)]  # by completion, then by value
    place = q * (lengths - 1).double()
    first, share = lengths.cumsum(0) - lengths, place.frac().to(values.dtype)
    below, above = (values[order[first + end.long()]] for end in (place.floor(), place.ceil()))
    return torch.lerp(below, above, share)
