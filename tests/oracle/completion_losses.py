"""Reference losses of methods without an interval of ratios: one completion at a time, by their definitions.

Numbers are plain; the log-probs under update are a tensor in float64, through which the gradient flows.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Settings = dict[str, Any]


class Completion:
    """A completion: log-probs in nats, its advantage, and for a correct one the share of wrong peers.

    `kept` has the log ratios of the tokens that the importance correction does not mask.
    """

    def __init__(
        self,
        new: Tensor,
        old: Sequence[float],
        advantage: float,
        wrong_peers: float,
        importance: Sequence[float],
    ) -> None:
        self.new, self.old, self.advantage, self.wrong_peers = new, old, advantage, wrong_peers
        self.importance = importance
        self.log_ratios = [n - o for n, o in zip(new.tolist(), old, strict=True)]
        self.kept = [x for x, weight in zip(self.log_ratios, importance, strict=True) if weight > 0]


def powers(scale: float, logprobs: Sequence[Tensor]) -> list[Tensor]:
    """Return `scale` once per token, with the gradient `scale` with respect to the log-prob of the token."""
    return [scale * torch.exp(logprob - logprob.detach()) for logprob in logprobs]


def geometric(settings: Settings, completion: Completion, high: float) -> list[Tensor]:
    """Return the loss of GSPO for the upper bound 1 + high, once per token."""
    ratio = math.exp(math.fsum(completion.kept) / max(1, len(completion.kept)))
    a = completion.advantage
    bounded = min(max(ratio, 1 - settings["eps_low"]), 1 + high)
    if ratio * a <= bounded * a:
        return powers(-ratio * a, [*completion.new])
    return [0 * logprob - bounded * a for logprob in completion.new]


def luspo(settings: Settings, completion: Completion) -> list[Tensor]:
    return [len(completion.old) * loss for loss in geometric(settings, completion, settings["eps_high"])]


def gapo(settings: Settings, completion: Completion) -> list[Tensor]:
    low, high = settings["eps_low"], settings["eps_high"]
    return geometric(settings, completion, low + (high - low) * completion.wrong_peers)


def ctpo(settings: Settings, completion: Completion) -> list[Tensor]:
    losses, product, count, a = [], 1.0, 0, completion.advantage
    for x, logprob, weight in zip(completion.log_ratios, completion.new, completion.importance, strict=True):
        count, product = (count + 1, product * math.exp(x)) if weight > 0 else (count, product)
        root = math.sqrt(max(1, count))
        low, high = (math.exp(s * root) for s in (-settings["log_eps_low"], settings["log_eps_high"]))
        limit = math.exp(settings["log_dual_clip"] * root)
        is_free = product <= high if a > 0 else low <= product <= limit
        bounded = min(product, high) if a > 0 else min(max(product, low), limit)
        losses += powers(-product * a, [logprob]) if is_free else [0 * logprob - bounded * a]
    return losses


LOSSES: dict[str, Callable[[Settings, Completion], list[Tensor]]] = {
    "luspo": luspo,
    "gapo": gapo,
    "ctpo": ctpo,
}
"""tests/objective compares the gradients of all methods with weights by hand."""
