"""From a loss a token to one number: each aggregation is a weight a token, fixed by the lengths of the update.

Because the weights know the whole update, a loss is a plain sum of weight·loss: eight passes of one sequence and
one pass of eight add up to the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Aggregation = Callable[[torch.Tensor, int], torch.Tensor]
"""(lengths_S int64 [S], max_tokens) -> weight of each token of sequence s, float32 [S]."""


def seq_mean_token_mean(lengths_S: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Mean over the tokens of a sequence, then over sequences: 1/(S·length) (GRPO, BandPO)."""
    return 1.0 / (len(lengths_S) * lengths_S.float())


def token_mean(lengths_S: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Mean over all tokens of the update: 1/Σ length (DAPO)."""
    return torch.full_like(lengths_S, 1.0 / int(lengths_S.sum()), dtype=torch.float32)


def seq_sum_norm(lengths_S: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Sum over a sequence's tokens by a constant, then mean over sequences: 1/(S·max_tokens) (Dr. GRPO)."""
    return torch.full_like(lengths_S, 1.0 / (len(lengths_S) * max_tokens), dtype=torch.float32)


AGGREGATIONS: dict[str, Aggregation] = {
    "seq-mean-token-mean": seq_mean_token_mean,
    "token-mean": token_mean,
    "seq-sum-norm": seq_sum_norm,
}
