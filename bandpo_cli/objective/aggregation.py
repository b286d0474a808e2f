"""Aggregations: the weight of each token in the loss of an update.

The loss of an update is the sum of weight·loss over its tokens. The weights depend on the completion lengths of the
complete update, so eight passes of one sequence and one pass of eight give the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Aggregation = Callable[[torch.Tensor, int], torch.Tensor]
"""(lengths_S int64 [S], max_tokens) -> weight of each token of sequence s, float32 [S]."""


def seq_mean_token_mean(lengths_S: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Return 1/(S·length): the mean over the tokens of a sequence, then over sequences (GRPO, BandPO)."""
    return 1.0 / (len(lengths_S) * lengths_S.float())


def token_mean(lengths_S: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Return 1/Σ length: the mean over all tokens of the update (DAPO)."""
    return torch.full_like(lengths_S, 1.0 / int(lengths_S.sum()), dtype=torch.float32)


def seq_sum_norm(lengths_S: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Return 1/(S·max_tokens): a sequence's sum over a constant, then the mean over sequences (Dr. GRPO)."""
    return torch.full_like(lengths_S, 1.0 / (len(lengths_S) * max_tokens), dtype=torch.float32)


AGGREGATIONS: dict[str, Aggregation] = {
    "seq-mean-token-mean": seq_mean_token_mean,
    "token-mean": token_mean,
    "seq-sum-norm": seq_sum_norm,
}
