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


def wapo(settings: Settings, completion: Completion) -> list[Tensor]:
    limit, a = 1 + settings["eps_high"], max(completion.advantage, 0.0)
    pairs = zip(completion.log_ratios, completion.new, strict=True)
    inside = [(math.exp(x), logprob) for x, logprob in pairs]
    return [powers(-r * a, [x])[0] if r <= limit else 0 * x - a * limit for r, x in inside]


def dgpo(settings: Settings, completion: Completion) -> list[Tensor]:
    losses, low, high, a = [], 1 - settings["eps_low"], 1 + settings["eps_high"], completion.advantage
    for x, logprob in zip(completion.log_ratios, completion.new, strict=True):
        weight = math.exp(x)
        if a < 0 and weight < low:
            weight = weight ** (settings["decay_low"] + 1) / low ** settings["decay_low"]
        elif a > 0 and weight > high:
            share = 1 / settings["decay_high"]
            weight = weight ** (1 - share) * high**share
        losses += powers(-weight * a, [logprob])
    return losses


LOSSES: dict[str, Callable[[Settings, Completion], list[Tensor]]] = {
    "luspo": luspo,
    "gapo": gapo,
    "ctpo": ctpo,
    "vaco": vaco,
    "m2po": m2po,
    "wapo": wapo,
    "dgpo": dgpo,
}
"""tests/objective compares the gradients of all methods with weights by hand."""
