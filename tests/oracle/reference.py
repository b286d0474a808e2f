"""Reference implementation of a training step: plain, slow, in float64, without code of the package.

One sequence at a time, without packing, full logits, the bounds by bisection on their definition, AdamW written out.
Settings are the plain dictionaries of a configuration file. The only thing shared with the package is the model.
"""

import copy
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.special import lambertw
from torch import nn

from tests.oracle.completion_losses import LOSSES, Completion

Settings = dict[str, Any]
"""The plain values of a configuration."""

GENERATORS: dict[str, Callable[[float], float]] = {
    "kl": lambda u: -math.log(u) + u - 1 if u > 0 else math.inf,
    "js": lambda u: (0.5 * u * math.log(2 * u / (1 + u)) if u > 0 else 0.0) + 0.5 * math.log(2 / (1 + u)),
}


@dataclass(frozen=True)
class GivenRollout:
    """One completion with its grade (`credit` is the grader's reward, 0 to 1), the input of the reference."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    sampler_entropies: tuple[float, ...]
    credit: float
    correct: bool
    verdict: str
    truncated: bool
    inserted: tuple[tuple[int, tuple[int, ...]], ...] = ()  # each before the sampled token of an index


GivenGroup = list[GivenRollout]


@dataclass
class Token:
    """The values of one sampled token in a step, as plain numbers; log-probs in nats."""

    old_logprob: float
    own_logprob: float
    sampler_logprob: float
    ref_logprob: float
    entropy: float
    lower: float
    upper: float
    advantage: float
    importance: float
    new_logprob: float = math.nan
    ratio: float = math.nan
    weight: float = math.nan  # of the gradient, of methods in `LOSSES`
    is_dropped: bool = False  # by the off-policy mask
    is_chosen: bool = True  # by M2PO
    has_top_entropy: bool = True  # one of the tokens that `objective.top_entropy` trains
    has_ratio: bool = True  # the package runs the token through the model in the update
    is_measured: bool = True  # and with the weights of π_old
    clipped: int = 0  # 1 at the upper bound, 2 at the lower one


@dataclass
class Update:
    """One optimizer update: its tokens in order, its loss, and the gradient before clipping, a tensor per parameter."""

    tokens: list[Token]
    loss: float = 0.0
    gradient: list[torch.Tensor] = field(default_factory=list)
    grad_norm: float = 0.0


@dataclass
class StepResult:
    """One step: the metrics, the groups that were trained on, their shaped rewards, and the updates."""

    record: dict[str, float]
    trained: list[GivenGroup]
    rewards: list[float]
    updates: list[Update]


class ReferenceTrainer:
    """A policy in float64 with its optimizer state.

    Args:
        model: copied; its current weights are also those of the reference model.
        settings: the complete configuration as plain values.
        exact_sampler: the sampler runs the trainer's own model, so that no importance correction is needed.
        narrow: round the weights to bfloat16 before every forward pass, as in a model of that type.
    """

    def __init__(
        self, model: nn.Module, settings: Settings, exact_sampler: bool, narrow: bool = False
    ) -> None:
        self.settings, self.exact_sampler, self.narrow = settings, exact_sampler, narrow
        self.model = copy.deepcopy(model).double()
        self.start = copy.deepcopy(self.model)
        self.masters = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.first_moments = [torch.zeros_like(master) for master in self.masters]
        self.second_moments = [torch.zeros_like(master) for master in self.masters]
        self.updates_done = self.steps_done = 0
        self.has_interval = settings["bounds"]["method"] not in LOSSES
        self.coefficient, self.bonus = 0.0, settings["objective"]["entropy_bonus"]

    def step(self, batches: Sequence[Sequence[GivenGroup]], take_gradient: Any = None) -> StepResult:
        """Apply one step to the batches of groups that dynamic sampling uses; without it, to the first batch.

        Args:
            take_gradient: a function from the index of an update to the gradient (before clipping) that AdamW uses.
        """
        self.steps_done += 1
        self.thresholds: list[float] = []
        sampled, trained = self._select(batches)
        self.rewards_of_step = [reward for group in trained for reward in self._rewards(group)]
        size = len(trained) // self.settings["optim"]["updates"]
        parts = [trained[i : i + size] for i in range(0, len(trained), size)]
        # Everything that depends on π_old alone is computed before the first update.
        updates = [Update(self._tokens_under_old_policy(part)) for part in parts]
        for index, (part, update) in enumerate(zip(parts, updates, strict=True)):
            self._forward_backward(part, update, is_first=index == 0)
            self._mark_tokens(index, part, update)
            given = update.gradient if take_gradient is None else take_gradient(index)
            lr = self._adamw(given)
        record = self._sample_metrics(sampled) | self._token_metrics(updates) | {"optim/lr": lr}
        if self._is_scheduled():
            record["bounds/delta"] = self._bounds()["delta"]
        if self.settings["objective"]["entropy_target"]:
            record |= {"train/entropy_coefficient": self.coefficient, "train/entropy_bonus": self.bonus}
            self._adapt_bonus(record["train/entropy"])
        return StepResult(record, trained, [self._reward(r) for group in trained for r in group], updates)

    def _adapt_bonus(self, entropy: float) -> None:
        """Follow Skywork-OR1: the coefficient rises up to the target and falls above it, where there is no bonus."""
        objective = self.settings["objective"]
        if entropy > objective["entropy_target"]:
            self.coefficient = max(0.0, self.coefficient - objective["entropy_bonus_step"])
            self.bonus = 0.0
        else:
            self.coefficient = min(
                objective["entropy_bonus_max"], self.coefficient + objective["entropy_bonus_step"]
            )
            self.bonus = self.coefficient

    def _is_graded(self, rollout: GivenRollout) -> bool:
        if rollout.verdict == "timeout":
            return bool(self.settings["grading"]["timeout_reward"] == "wrong")
        return rollout.verdict != "grader-error"

    def _rewards(self, group: Sequence[GivenRollout]) -> list[float]:
        return [self._reward(rollout) for rollout in group if self._is_graded(rollout)]

    def _reward(self, rollout: GivenRollout) -> float:
        reward, limit = self.settings["reward"], self.settings["sampling"]["max_tokens"]
        value: float = rollout.credit * reward["correct"] + (1 - rollout.credit) * reward["wrong"]
        buffer = reward["overlong_buffer"]
        if buffer:
            start = limit - buffer
            if len(rollout.token_ids) > start:
                value -= reward["overlong_penalty"] * (len(rollout.token_ids) - start) / buffer
        return value

    def _uniform(self, group: GivenGroup) -> bool:
        return len(set(self._rewards(group))) <= 1

    def _select(self, batches: Sequence[Sequence[GivenGroup]]) -> tuple[list[GivenGroup], list[GivenGroup]]:
        sampling = self.settings["sampling"]
        if not sampling["dynamic"]:
            return list(batches[0]), list(batches[0])
        sampled: list[GivenGroup] = []
        for batch in batches[: sampling["dynamic_batches"]]:
            sampled += batch
            if sum(not self._uniform(group) for group in sampled) >= sampling["prompts"]:
                break
        mixed = [group for group in sampled if not self._uniform(group)]
        return sampled, (mixed + [group for group in sampled if self._uniform(group)])[: sampling["prompts"]]

    def _advantages(self, group: GivenGroup) -> list[float]:
        if self._uniform(group):
            return [0.0] * len(group)
        rewards, objective = self._rewards(group), self.settings["objective"]
        mean, scale = math.fsum(rewards) / len(rewards), 1.0
        if objective["advantages"] == "maxrl":
            scale = mean
        elif objective["advantages"] == "batch":
            scale = statistics.stdev(self.rewards_of_step) + 1e-6
        elif objective["advantages"] == "group" and objective["advantage_std"]:
            variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
            scale = math.sqrt(variance) + 1e-6
        used = [r for r in group if self._is_graded(r) and self._has_loss(r)]
        if objective["advantages"] == "rloo":  # the mean of the others
            others = {id(r): (math.fsum(rewards) - self._reward(r)) / (len(rewards) - 1) for r in group}
            return [self._reward(r) - others[id(r)] if r in used else 0.0 for r in group]
        return [(self._reward(r) - mean) / scale if r in used else 0.0 for r in group]

    def _has_loss(self, rollout: GivenRollout) -> bool:
        return not (rollout.truncated and self.settings["objective"]["mask_truncated"])

    def _wrong_peers(self, group: GivenGroup, rollout: GivenRollout) -> float:
        correct = [other.correct for other in group if self._is_graded(other)]
        return correct.count(False) / max(1, len(correct) - 1) if rollout.correct else 0.0

    def _tokens_under_old_policy(self, groups: Sequence[GivenGroup]) -> list[Token]:
        objective = self.settings["objective"]
        bounds = self._bounds()
        tokens = []
        for group in groups:
            for rollout, advantage in zip(group, self._advantages(group), strict=True):
                with torch.no_grad():
                    logits = self._logits(self.model, rollout)
                    own = self._logprobs(logits, rollout).tolist()
                    ref = [math.nan] * len(own)
                    if objective["reference_kl"] > 0:
                        ref = self._logprobs(self._logits(self.start, rollout), rollout).tolist()
                    entropy = torch.distributions.Categorical(logits=logits).entropy().tolist()
                importance = self._importance(own, rollout.sampler_logprobs)
                for i, sampler in enumerate(rollout.sampler_logprobs):
                    old = own[i] if objective["old_logprobs"] == "trainer" else sampler
                    ends = ratio_bounds(bounds, old)
                    token = Token(old, own[i], sampler, ref[i], entropy[i], *ends, advantage, importance[i])
                    tokens.append(token)
        return tokens

    def _is_scheduled(self) -> bool:
        return self.settings["bounds"].get("delta_schedule", "constant") != "constant"

    def _bounds(self) -> Settings:
        """Return the settings of the bounds at this step."""
        bounds = self.settings["bounds"]
        if not self._is_scheduled():
            return bounds
        # A polynomial of the progress, as BandPO's code defines it (decaying_clipbound.py).
        rest = max(0.0, 1 - self.steps_done / bounds["delta_steps"])
        start, end = bounds["delta"], bounds["delta_end"]
        return {**bounds, "delta": end + (start - end) * rest ** bounds["delta_power"]}

    def corrects(self) -> bool:
        objective = self.settings["objective"]
        by_trainer = objective["old_logprobs"] == "trainer"
        return by_trainer and not self.exact_sampler and objective["importance_cap"] is not None

    def _importance(self, own: Sequence[float], sampler: Sequence[float]) -> list[float]:
        """Return the weights of the tokens of a completion, by cases of the rule's name."""
        if not self.corrects():
            return [1.0] * len(own)
        objective = self.settings["objective"]
        if not isinstance(objective["importance"], str):
            return self._rules(objective["importance"], [o - s for o, s in zip(own, sampler, strict=True)])
        level, _, rule = objective["importance"].partition("-")
        cap, floor = objective["importance_cap"], objective["importance_floor"]
        floor = 1 / cap if floor is None else floor
        weights = [math.exp(ours - theirs) for ours, theirs in zip(own, sampler, strict=True)]
        outside = [not floor <= weight <= cap for weight in weights]
        if rule == "mask-any":
            return [0.0] * len(weights) if any(outside) else weights
        if level == "sequence":
            weights = [math.prod(weights) ** (1 / len(weights))] * len(weights)
        if rule == "truncate":
            return [min(weight, cap) for weight in weights]
        return [weight if floor <= weight <= cap else 0.0 for weight in weights]

    def _rules(self, rules: Sequence[Settings], logs: Sequence[float]) -> list[float]:
        """Return the weights of the tokens of a completion by a list of rules, each of which sees the kept tokens."""
        kept, weights = set(range(len(logs))), [1.0] * len(logs)
        for rule in rules:
            name, low, high = rule["rule"], rule["low"] or -math.inf, rule["high"] or math.inf
            values = [math.exp(x) - 1 - x if "k3" in name else x for x in logs]
            present = [values[i] for i in sorted(kept)] or [0.0]
            if name.startswith("sequence"):
                values = [mean(present)] * len(logs)
            if name.startswith("product"):
                values = [math.fsum(present)] * len(logs)
            if "k3" not in name:
                values = [math.exp(value) for value in values]
            if name.endswith("truncate"):
                weights = [min(value, high) for value in values]
                continue
            outside = {i for i in kept if not low <= values[i] <= high}
            kept = set() if outside and name == "outlier-reject" else kept - outside
        return [weight if i in kept else 0.0 for i, weight in enumerate(weights)]

    def _logits(self, model: nn.Module, rollout: GivenRollout) -> torch.Tensor:
        """Return the logits from which each token was sampled, [tokens, vocabulary]."""
        ids, predictors = list(rollout.prompt_ids), []
        for index, token in enumerate(rollout.token_ids):
            ids += [item for place, items in rollout.inserted if place == index for item in items]
            predictors.append(len(ids) - 1)
            ids.append(token)
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, predictors]
        return logits

    def _logprobs(self, logits: torch.Tensor, rollout: GivenRollout) -> torch.Tensor:
        scaled = logits / self.settings["sampling"]["temperature"]
        chosen = scaled[torch.arange(len(scaled)), torch.tensor(rollout.token_ids)]
        return chosen - torch.logsumexp(scaled, dim=-1)

    def _forward_backward(self, groups: Sequence[GivenGroup], update: Update, is_first: bool) -> None:
        parameters = list(self.model.parameters())
        for parameter in parameters:
            parameter.grad = None
        objective = self.settings["objective"]
        counted = [rollout for group in groups for rollout in group if self._has_loss(rollout)]
        total_tokens = sum(len(rollout.token_ids) for rollout in counted)
        first = 0
        if self._bounds()["method"] == "m2po":
            self._choose(update.tokens, self._bounds()["threshold"])
        if self._bounds()["method"] == "bapo" and not is_first:
            self._choose_interval(groups, update.tokens)
        if objective["top_entropy"]:
            self._keep_top_entropy(groups, update.tokens, objective["top_entropy"])
        for group, rollout in [(members, rollout) for members in groups for rollout in members]:
            logits = self._logits(self.model, rollout)
            new = self._logprobs(logits, rollout)
            length = len(rollout.token_ids)
            tokens = update.tokens[first : first + length]
            first += length
            for token, logprob in zip(tokens, new.tolist(), strict=True):
                token.new_logprob, token.ratio = logprob, math.exp(logprob - token.old_logprob)
            losses = self._policy_losses(tokens, new, self._wrong_peers(group, rollout))
            threshold = objective["off_policy_mask"] or math.inf
            drift = sum(token.sampler_logprob - token.new_logprob for token in tokens) / length
            if tokens[0].advantage < 0 and drift > threshold:
                losses = [0.0 * loss for loss in losses]
                for token in tokens:
                    token.is_dropped = True
            entropy = torch.zeros(length)
            if self.bonus > 0:
                scaled = logits / self.settings["sampling"]["temperature"]
                entropy = torch.distributions.Categorical(logits=scaled).entropy()
            terms = [
                token.importance * (token.has_top_entropy * loss + self._penalty(token, logprob))
                - self.bonus * token.has_top_entropy * bonus
                for token, loss, logprob, bonus in zip(tokens, losses, new, entropy, strict=True)
            ]
            if not self._has_loss(rollout):
                continue
            weight = {
                "seq-mean-token-mean": 1 / length / len(counted),
                "token-mean": 1 / total_tokens,
                "seq-sum-norm": 1 / self.settings["sampling"]["max_tokens"] / len(counted),
            }[objective["aggregation"]]
            loss = weight * torch.stack(terms).sum()
            loss.backward()
            update.loss += loss.item()
        update.gradient = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in parameters]
        update.grad_norm = math.sqrt(sum(float((g * g).sum()) for g in update.gradient))

    def _choose(self, tokens: Sequence[Token], threshold: float) -> None:
        """Drop the token with the largest log²(π_old/π_sampler) as long as the mean of the others is not below."""
        rest = sorted(tokens, key=lambda t: abs(t.own_logprob - t.sampler_logprob))
        while len(rest) > 1 and mean([(t.own_logprob - t.sampler_logprob) ** 2 for t in rest]) >= threshold:
            rest.pop().is_chosen = False

    def _choose_interval(self, groups: Sequence[GivenGroup], tokens: Sequence[Token]) -> None:
        """Set BAPO's interval: the first, from narrow to wide, with the share of positive tokens, or the last."""
        bounds, new = self._bounds(), []
        for rollout in (rollout for group in groups for rollout in group):
            with torch.no_grad():
                new += self._logprobs(self._logits(self.model, rollout), rollout).tolist()
        ratios = [math.exp(logprob - token.old_logprob) for logprob, token in zip(new, tokens, strict=True)]
        pairs = [*zip(ratios, (token.advantage for token in tokens), strict=True)]
        lows, highs = (
            [min(bounds[f"{end}_start"] + k * bounds["step"], bounds[f"{end}_end"]) for k in range(100)]
            for end in ("low", "high")
        )
        for low, high in [*((low, highs[0]) for low in lows), *((lows[-1], high) for high in highs)]:
            gains = math.fsum(a * min(ratio, high) for ratio, a in pairs if a > 0)
            losses = math.fsum(-a * max(ratio, low) for ratio, a in pairs if a < 0)
            if gains >= bounds["share"] * (gains + losses):
                break
        for token in tokens:
            token.lower, token.upper = low, high

    def _keep_top_entropy(self, groups: Sequence[GivenGroup], tokens: Sequence[Token], share: float) -> None:
        """Mark the tokens at or above NumPy's quantile of the entropies, of completions that have a loss."""
        rollouts = [rollout for group in groups for rollout in group]
        counted = [self._has_loss(rollout) for rollout in rollouts for _ in rollout.token_ids]
        entropies = [t.entropy for t, counts in zip(tokens, counted, strict=True) if counts]
        self.thresholds.append(float(np.quantile(entropies, 1 - share, method="higher")))
        for token in tokens:
            token.has_top_entropy = token.entropy >= self.thresholds[-1]

    def _mark_tokens(self, index: int, groups: Sequence[GivenGroup], update: Update) -> None:
        """Set which tokens have a ratio: not those of zero-variance groups, except the first group if all are such.

        A token is measured in a pass under π_old: the first update's own, or one that the loss or a setting needs.
        """
        objective = self.settings["objective"]
        needs_all = any(objective[term] > 0 for term in ("reference_kl", "entropy_bonus", "drift_penalty"))
        needs_all |= self._bounds()["method"] == "m2po" or objective["entropy_target"] is not None
        uniform = [not any(self._advantages(group)) and not needs_all for group in groups]
        if all(uniform):
            uniform[0] = False
        lengths = [sum(len(rollout.token_ids) for rollout in group) for group in groups]
        flags = [not is_uniform for is_uniform, n in zip(uniform, lengths, strict=True) for _ in range(n)]
        needs_pass = index == 0 or (objective["old_logprobs"] == "trainer" and not self.exact_sampler)
        measures_all = (objective["all_token_metrics"] or objective["top_entropy"]) and not self.exact_sampler
        for token, has_ratio in zip(update.tokens, flags, strict=True):
            token.has_ratio, token.is_measured = has_ratio, measures_all or (has_ratio and needs_pass)

    def _policy_losses(
        self, tokens: list[Token], new: torch.Tensor, wrong_peers: float
    ) -> list[torch.Tensor]:
        """Return the loss of each token of a completion, without penalty and importance weight."""
        bounds = self._bounds()
        if bounds["method"] not in LOSSES:
            return [self._token_loss(token, logprob) for token, logprob in zip(tokens, new, strict=True)]
        old, importance = [t.old_logprob for t in tokens], [t.importance for t in tokens]
        sampler, chosen = [t.sampler_logprob for t in tokens], [t.is_chosen for t in tokens]
        completion = Completion(new, old, tokens[0].advantage, wrong_peers, importance, sampler, chosen)
        losses = LOSSES[bounds["method"]](bounds, completion)
        (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), new, retain_graph=True)
        for token, slope in zip(tokens, gradient.tolist(), strict=True):
            token.weight = slope / -token.advantage if token.advantage else 0.0
        return losses

    def _token_loss(self, token: Token, logprob: torch.Tensor) -> torch.Tensor:
        """Return the loss of a token with an interval, by cases of the sign of its advantage, without min and clamp."""
        objective = self.settings["objective"]
        ratio = torch.exp(logprob - token.old_logprob)
        size = abs(token.advantage)
        loss = 0.0 * logprob
        if token.advantage > 0:
            loss = loss - size * (ratio if ratio.item() < token.upper else token.upper)
        elif token.advantage < 0:
            limit = math.inf if objective["dual_clip"] is None else objective["dual_clip"]
            is_free = token.lower < ratio.item() < limit
            loss = loss + size * (ratio if is_free else min(max(ratio.item(), token.lower), limit))
        return loss

    def _penalty(self, token: Token, logprob: torch.Tensor) -> torch.Tensor:
        objective, log_r = self.settings["objective"], logprob - token.old_logprob
        penalty = objective["drift_penalty"] * log_r * log_r
        if objective["reference_kl"] > 0:
            log_u = token.ref_logprob - logprob
            estimate = torch.exp(log_u) - 1 - log_u
            if objective["reference_kl_estimator"] == "unbiased":
                estimate = estimate * torch.exp(log_r)
            penalty = penalty + objective["reference_kl"] * estimate
        return penalty

    def _adamw(self, gradient: Sequence[torch.Tensor]) -> float:
        """Apply one update (arXiv 1711.05101, algorithm 2) and return its learning rate."""
        optim = self.settings["optim"]
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradient))
        limit = optim["max_grad_norm"]
        scale = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        lr: float = optim["lr"] * self._schedule()
        self.updates_done += 1
        beta1, beta2 = optim["betas"]
        with torch.no_grad():
            state = (self.masters, self.first_moments, self.second_moments)
            for master, m, v, raw, parameter in zip(*state, gradient, self.model.parameters(), strict=True):
                g = raw.double() * scale
                m.copy_(beta1 * m + (1 - beta1) * g)
                v.copy_(beta2 * v + (1 - beta2) * g * g)
                unbiased_m = m / (1 - beta1**self.updates_done)
                unbiased_v = v / (1 - beta2**self.updates_done)
                decayed = master * (1 - lr * optim["weight_decay"])
                master.copy_(decayed - lr * unbiased_m / (unbiased_v.sqrt() + optim["eps"]))
                parameter.copy_(master.bfloat16() if self.narrow else master)
        return lr

    def _schedule(self) -> float:
        optim, done = self.settings["optim"], self.updates_done
        warmup = optim["warmup_steps"]
        if done < warmup:
            return float((done + 1) / warmup)
        progress = (done - warmup) / (self.settings["steps"] * optim["updates"] - warmup)
        if optim["schedule"] == "linear":
            return float(1 - progress)
        return 1.0 if optim["schedule"] == "constant" else (1 + math.cos(math.pi * progress)) / 2

    def _sample_metrics(self, groups: Sequence[GivenGroup]) -> dict[str, float]:
        rollouts = [rollout for group in groups for rollout in group]
        return {
            "train/reward": mean(self._rewards(rollouts)),
            "train/ungraded_fraction": mean([0.0 if self._is_graded(r) else 1.0 for r in rollouts]),
            "train/accuracy": mean([1.0 if r.correct else 0.0 for r in rollouts]),
            "train/response_length": mean([len(r.token_ids) for r in rollouts]),
            "train/truncated_fraction": mean([1.0 if r.truncated else 0.0 for r in rollouts]),
            "train/uniform_group_fraction": mean([1.0 if self._uniform(g) else 0.0 for g in groups]),
            "train/groups_drawn": float(len(groups)),
            "grade/malformed_fraction": mean([1.0 if r.verdict == "malformed" else 0.0 for r in rollouts]),
            "grade/timeout_fraction": mean([1.0 if r.verdict == "timeout" else 0.0 for r in rollouts]),
            "grade/error_fraction": mean([1.0 if r.verdict == "grader-error" else 0.0 for r in rollouts]),
        }

    def _token_metrics(self, updates: Sequence[Update]) -> dict[str, float]:
        tokens = [token for update in updates for token in update.tokens]

        def share(chosen: Sequence[Token], of: Sequence[Token]) -> float:
            return len(chosen) / len(of)

        measured = [t for t in tokens if t.is_measured]
        gaps = [abs(t.sampler_logprob - t.own_logprob) for t in measured]
        entropies = [t.entropy for t in (tokens if self.exact_sampler else measured)]
        weighted = [t for t in tokens if t.importance != 0 and not t.is_dropped and t.has_top_entropy]
        above = [t for t in weighted if (t.ratio > t.upper if self.has_interval else t.weight == 0)]
        below = [t for t in weighted if (t.ratio < t.lower if self.has_interval else t.weight == 0)]
        at_upper, at_lower = [t for t in above if t.advantage > 0], [t for t in below if t.advantage < 0]
        for number, clipped in enumerate((at_upper, at_lower), start=1):
            for token in clipped:
                token.clipped = number
        with_ratio = [t for t in tokens if t.has_ratio]
        outside = [t for t in with_ratio if not t.lower <= t.ratio <= t.upper]
        record = {
            "train/entropy": mean(entropies),
            "sampler/logprob_gap_mean": mean(gaps),
            "sampler/logprob_gap_max": max(gaps),
            "optim/skipped_updates": 0.0,
            "optim/loss": mean([update.loss for update in updates]),
            "optim/grad_norm": mean([update.grad_norm for update in updates]),
            "ratio/mean": mean([t.ratio for t in with_ratio]),
            "ratio/max": max(t.ratio for t in with_ratio),
            "kl/old_new": mean([_k3(t.new_logprob - t.old_logprob) for t in with_ratio]),
            "clip/active_fraction": share([*at_upper, *at_lower], tokens),
            "clip/upper_fraction": share(at_upper, tokens),
            "clip/lower_fraction": share(at_lower, tokens),
        }
        if self._bounds()["method"] == "dgpo":
            low, high = 1 - self._bounds()["eps_low"], 1 + self._bounds()["eps_high"]
            record["clip/outside_fraction"] = share(
                [t for t in with_ratio if not low <= t.ratio <= high], with_ratio
            )
        if self.has_interval and self._bounds()["method"] != "bapo":
            record["clip/outside_fraction"] = share(outside, with_ratio)
        if len(entropies) < len(tokens):
            record["train/entropy_token_share"] = len(entropies) / len(tokens)
        if self.corrects():
            record["sampler/importance_mean"] = mean([t.importance for t in measured])
            record["sampler/importance_max"] = max(t.importance for t in measured)
            masked = [t for t in measured if t.importance == 0]
            record["sampler/importance_masked_fraction"] = share(masked, measured)
        if self.settings["objective"]["off_policy_mask"]:
            record["clip/off_policy_masked_fraction"] = share([t for t in tokens if t.is_dropped], with_ratio)
        if self.thresholds:
            record["train/top_entropy_fraction"] = share(
                [t for t in with_ratio if t.has_top_entropy], with_ratio
            )
            record["train/top_entropy_threshold"] = mean(self.thresholds)
        if self.settings["objective"]["reference_kl"] > 0:
            record["kl/ref"] = mean([_k3(t.ref_logprob - t.new_logprob) for t in tokens])
        edges = [0, 0.001, 0.01, 0.1, 0.5, 0.9, 1]
        for low, high in itertools.pairwise(edges):
            inside = [t for t in tokens if low < math.exp(self.known_old_logprob(t)) <= high]
            active = [t for t in (*at_upper, *at_lower) if low < math.exp(t.old_logprob) <= high]
            record[f"clip/token_share/p_{low:g}_{high:g}"] = share(inside, tokens)
            if inside:
                record[f"clip/active_fraction/p_{low:g}_{high:g}"] = share(active, inside)
        used = [t for t in weighted if t.advantage != 0]
        for sign, name in ((1, "positive"), (-1, "negative")):
            for low, high in itertools.pairwise(edges):
                chosen = [t for t in used if t.advantage * sign > 0 and low < math.exp(t.old_logprob) <= high]
                record |= self._gradient_metrics(chosen, f"/{name}/p_{low:g}_{high:g}")
        return record | self._gradient_metrics(used, "")

    def known_old_logprob(self, token: Token) -> float:
        """Return log π_old, or the sampler's log-prob of a token that the package runs through no model."""
        return token.old_logprob if token.is_measured or token.has_ratio else token.sampler_logprob

    def _gradient_metrics(self, tokens: Sequence[Token], suffix: str) -> dict[str, float]:
        """Return the metrics of dloss/dlog π over −advantage, by cases: the ratio, or 0 for a clipped token."""
        if not tokens:
            return {}
        dual_clip = self.settings["objective"]["dual_clip"]
        limit = math.inf if dual_clip is None else dual_clip
        kept = [t.ratio < t.upper if t.advantage > 0 else t.lower < t.ratio < limit for t in tokens]
        weights = [t.ratio if is_kept else 0.0 for t, is_kept in zip(tokens, kept, strict=True)]
        if self._bounds()["method"] in LOSSES:
            weights = [t.weight for t in tokens]
        return {
            f"gradient/zero_fraction{suffix}": weights.count(0.0) / len(weights),
            f"gradient/weight_mean{suffix}": math.fsum(weights) / len(weights),
            f"gradient/weight_min{suffix}": min(weights),
            f"gradient/weight_max{suffix}": max(weights),
        }


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _k3(log_u: float) -> float:
    return math.exp(log_u) - 1 - log_u


def ratio_bounds(bounds: Settings, old_logprob: float) -> tuple[float, float]:
    """Return the interval of ratios that a method's settings allow a token of this log-probability."""
    p = math.exp(old_logprob)
    method = bounds["method"]
    if method == "none" or method in LOSSES:
        return 0.0, math.inf
    if method == "bapo":
        return bounds["low_start"], bounds["high_start"]
    if method in ("clip", "clip-higher"):
        return 1 - bounds["eps_low"], 1 + bounds["eps_high"]
    if method == "examples.custom_interval:log_interval":
        width = 1 + bounds["options"]["eps"] * (1 - old_logprob)
        return 1 / width, width
    cap = bounds.get("max_ratio") or math.inf
    if method == "ripo":
        width = math.sqrt(bounds["delta"] / p)
        return max(1 - width, bounds["min_ratio"]), min(1 + width, cap)
    if method == "atr":
        low, high = (-lambertw(-math.exp(-1 - bounds["delta"]), branch).real for branch in (0, -1))
        return float(low), float(high)
    if method == "dcpo":
        lower = 0.5 + 0.5 * math.sqrt(max(1 - 4 * bounds["eps_low"] / p, 0))
        return lower, min(0.5 + 0.5 * math.sqrt(1 + 4 * bounds["eps_high"] / p), cap)
    assert method == "band"
    lower, upper = band(GENERATORS[bounds["divergence"]], old_logprob, bounds["delta"])
    upper = min(upper, cap)
    if bounds["relax"] is not None:
        lower = min(lower, 1 - bounds["relax"]["eps_low"])
        upper = max(upper, 1 + bounds["relax"]["eps_high"])
    return lower, upper


def band(f: Callable[[float], float], old_logprob: float, delta: float) -> tuple[float, float]:
    """Return the roots of p·f(r) + (1−p)·f((1−rp)/(1−p)) = δ in [0, 1] and [1, 1/p]; an end within δ instead of one."""
    p, rest = math.exp(old_logprob), -math.expm1(old_logprob)

    def divergence(r: float) -> float:
        return p * f(r) + rest * f(max(0.0, 1 - p * (r - 1) / rest))

    def bisect(inside: float, outside: float) -> float:
        if divergence(outside) <= delta:
            return outside
        for _ in range(100):
            middle = 0.5 * (inside + outside)
            inside, outside = (middle, outside) if divergence(middle) <= delta else (inside, middle)
        return inside

    return bisect(1.0, 0.0), bisect(1.0, 1 / p)
