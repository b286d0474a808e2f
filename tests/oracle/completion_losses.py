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

    `kept` has the log ratios of the tokens that the importance correction does not mask, `gaps` those to the sampler,
    and `chosen` whether M2PO keeps each token.
    """

    def __init__(
        self,
        new: Tensor,
        old: Sequence[float],
        advantage: float,
        wrong_peers: float,
        importance: Sequence[float],
        sampler: Sequence[float],
        chosen: Sequence[bool],
    ) -> None:
        self.gaps = [n - s for n, s in zip(new.tolist(), sampler, strict=True)]
        self.chosen = chosen
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


def gapo(settings: Settings, completion: Completion) -> list[Tensor]:
    low, high = settings["eps_low"], settings["eps_high"]
    return geometric(settings, completion, low + (high - low) * completion.wrong_peers)


def masked(completion: Completion, keeps: Sequence[bool]) -> list[Tensor]:
    """Return −r·a for the tokens that are kept, 0 for the others."""
    tokens = zip(completion.log_ratios, completion.new, keeps, strict=True)
    return [-completion.advantage * keep * powers(math.exp(x), [logprob])[0] for x, logprob, keep in tokens]


def vaco(settings: Settings, completion: Completion) -> list[Tensor]:
    pairs = zip(completion.gaps, completion.importance, strict=True)
    shifts = [abs(math.exp(gap) - 1) for gap, weight in pairs if weight > 0]
    is_far = math.fsum(shifts) / max(1, len(shifts)) > settings["delta"]
    return masked(completion, [not (is_far and completion.advantage * gap > 0) for gap in completion.gaps])


def m2po(settings: Settings, completion: Completion) -> list[Tensor]:
    return masked(completion, completion.chosen)


LOSSES: dict[str, Callable[[Settings, Completion], list[Tensor]]] = {"gapo": gapo, "vaco": vaco, "m2po": m2po}
"""tests/objective compares the gradients of all methods with weights by hand."""
