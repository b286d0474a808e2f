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


def gmpo(settings: Settings, completion: Completion) -> list[Tensor]:
    """Equation 4 of arXiv 2507.20673: a token that is clipped in the mean has no gradient."""
    a, low, high = completion.advantage, -settings["log_eps_low"], settings["log_eps_high"]

    def clipped(log_ratio: float) -> float:
        return min(log_ratio, high) if a > 0 else max(log_ratio, low)

    mean = math.fsum(map(clipped, completion.kept)) / max(1, len(completion.kept))
    ends = [
        logprob if clipped(log_ratio) == log_ratio else 0 * logprob
        for logprob, log_ratio in zip(completion.new, completion.log_ratios, strict=True)
    ]
    return powers(-a * math.exp(mean), ends)


def luspo(settings: Settings, completion: Completion) -> list[Tensor]:
    return [len(completion.old) * loss for loss in geometric(settings, completion, settings["eps_high"])]


def gapo(settings: Settings, completion: Completion) -> list[Tensor]:
    low, high = settings["eps_low"], settings["eps_high"]
    return geometric(settings, completion, low + (high - low) * completion.wrong_peers)


def vespo(settings: Settings, completion: Completion) -> list[Tensor]:
    side = "positive" if completion.advantage > 0 else "negative"
    k, rate = settings[f"k_{side}"], settings[f"lambda_{side}"]
    product = math.exp(sum(completion.kept))
    weight = math.exp(rate) * product**k * math.exp(-rate * product)
    return [-weight * completion.advantage * logprob for logprob in completion.new]


def cppo(settings: Settings, completion: Completion) -> list[Tensor]:
    """Algorithm 1 of arXiv 2606.10968, with the prefix threshold of its section 4.1."""
    new, a = completion.new.tolist(), completion.advantage
    changes = [abs(math.exp(n) - math.exp(o)) for n, o in zip(new, completion.old, strict=True)]
    floor = settings["prefix_delta"]
    quantile = torch.quantile(torch.tensor(changes, dtype=torch.float64), 0.9).item()
    delta_b, spent, total, losses = min(max(quantile, floor), 2 * floor), 0.0, 0.0, []
    for t, (change, log_ratio) in enumerate(zip(changes, completion.log_ratios, strict=True), start=1):
        w = 1 - (1 - settings["last_weight"]) / max(1, len(new) - 1) * (t - 1)
        kept = a * log_ratio <= 0 or w * change <= min(
            settings["delta"], settings["delta"] + delta_b * total - spent
        )
        weight = min(math.exp(log_ratio), settings["max_weight"]) if kept else 0.0
        losses.append(-weight * a * completion.new[t - 1])
        spent, total = spent + w * change, total + w
    return losses


LOSSES: dict[str, Callable[[Settings, Completion], list[Tensor]]] = {
    "luspo": luspo, "gapo": gapo, "vespo": vespo, "cppo": cppo, "gmpo": gmpo
}  # fmt: skip
