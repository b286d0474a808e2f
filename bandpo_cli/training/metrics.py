"""Metrics of a step from its rollouts, tokens and updates, and its tables of values per token.

A token is *clipped* ("active") where the method removes its gradient; for interval methods where a bound binds, which
depends on the sign of the advantage. Its ratio is *outside* where it is not within the bounds, for any sign. The
*gradient weight* is the factor w in the gradient w·a·∇log π (`objective.loss.LossOutputs`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, starmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bandpo_cli.bounds.intervals import ClipState
from bandpo_cli.config.run import RunConfig
from bandpo_cli.objective.advantages import has_reward_spread
from bandpo_cli.objective.policy_objective import k3
from bandpo_cli.storage.tables import TokenValues
from bandpo_cli.training.experience import Experience
from bandpo_cli.training.update import AppliedUpdates, Forward
from bandpo_cli.types import Completion, Grade, Group, Rollout, is_ungraded

CLIP_MAP_TOKENS = 20_000
"""Maximum number of tokens stored for a clip map: enough to show the bounds, few enough to plot."""

PROBABILITY_EDGES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0)
"""Edges of the bins of π_old(token); a bin includes its upper edge and excludes its lower one."""

BIN_NAMES = tuple(f"p_{low:g}_{high:g}" for low, high in pairwise(PROBABILITY_EDGES))


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of all groups sampled in a step, including those that dynamic sampling dropped."""
    rollouts = [rollout for group in groups for rollout in group.rollouts_G]

    def mean(value: Callable[[Rollout], float]) -> float:
        return sum(map(value, rollouts)) / len(rollouts)

    return {
        **reward_metrics([rollout.grade for rollout in rollouts]),
        "train/accuracy": mean(lambda rollout: rollout.grade.correct),
        "train/response_length": mean(lambda rollout: len(rollout.completion.token_ids)),
        "train/truncated_fraction": mean(lambda rollout: rollout.completion.finish_reason == "length"),
        "train/uniform_group_fraction": sum(not has_reward_spread(group) for group in groups) / len(groups),
        "train/groups_drawn": len(groups),
        "grade/malformed_fraction": mean(lambda rollout: rollout.grade.verdict == "malformed"),
        "grade/timeout_fraction": mean(lambda rollout: rollout.grade.verdict == "timeout"),
        "grade/error_fraction": mean(lambda rollout: rollout.grade.verdict == "grader-error"),
        "train/ungraded_fraction": mean(lambda rollout: is_ungraded(rollout.grade)),
        **conversation_metrics([rollout.completion for rollout in rollouts]),
    }


def conversation_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the means per completion of turns, calls and inserted tokens, and the shares of calls and results.

    Empty for completions of a single turn; without a call, or an inserted message, there is no share of them.
    """
    turns = [item.conversation for item in completions if item.conversation is not None]
    if not turns:
        return {}
    calls = sum(item.calls for item in turns)
    results = sum(len(item.messages) - item.turns for item in turns)
    wholes = dict.fromkeys(("failed_call", "malformed_call", "timed_out_call"), calls)
    wholes["truncated_result"] = results
    shares = {
        f"conversation/{name}_fraction": sum(getattr(item, f"{name}s") for item in turns) / whole
        for name, whole in wholes.items()
        if whole
    }
    inserted = sum(len(part.token_ids) for item in completions for part in item.inserted)
    return {
        "conversation/turns": sum(item.turns for item in turns) / len(turns),
        "conversation/calls": calls / len(turns),
        "conversation/inserted_tokens": inserted / len(turns),
        **shares,
    }


def reward_metrics(grades: Sequence[Grade]) -> dict[str, float]:
    """Return the mean reward and the mean of each of `task.rewards` before its weight, over grades with a value."""
    values = {"train/reward": [grade.reward for grade in grades if grade.has_reward]}
    for name in grades[0].components:
        column = (grade.components[name] for grade in grades)
        values[f"train/reward/{name}"] = [value for value in column if value is not None]
    means = {key: sum(value) / len(value) for key, value in values.items() if value}
    without = sum(not grade.has_reward and not is_ungraded(grade) for grade in grades)
    return means | ({"grade/not_applicable_fraction": without / len(grades)} if without else {})


def _joined(columns: Iterable[Tensor | None]) -> Tensor | None:
    """Return the concatenated columns without those that are None, None if all are."""
    known = [column for column in columns if column is not None]
    return torch.cat(known) if known else None


def token_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """Return the metrics of π_old on the tokens of the step: entropy, log-prob gap, importance weights.

    Each is the metric of the tokens whose values are known. If no entropy is, it is NaN; the others are absent.
    `train/entropy_token_share` is the share of the tokens with an entropy; absent where all have one.
    """
    parts = [*experiences, *(item.left_out for item in experiences if item.left_out is not None)]
    entropy = _joined(part.entropy for part in parts)
    metrics = {"train/entropy": math.nan if entropy is None else entropy.mean().item()}
    share = (0 if entropy is None else len(entropy)) / sum(len(part.sampler_logprobs) for part in parts)
    if share < 1:
        metrics["train/entropy_token_share"] = share
    pairs = [(part.sampler_logprobs, part.trainer_logprobs) for part in parts]
    gap = _joined(None if trainer is None else (sampler - trainer).abs() for sampler, trainer in pairs)
    if gap is not None:
        metrics["sampler/logprob_gap_mean"] = gap.mean().item()
        metrics["sampler/logprob_gap_max"] = gap.max().item()
    if (weights := _joined(part.importance_weights for part in parts)) is not None:
        metrics["sampler/importance_mean"] = weights.mean().item()
        metrics["sampler/importance_max"] = weights.max().item()
        metrics["sampler/importance_masked_fraction"] = (weights == 0).double().mean().item()
    return metrics


def update_metrics(updates: AppliedUpdates) -> dict[str, float]:
    """Return the metrics of each token at its own update; if all updates were skipped, only learning rate and skips."""
    metrics = {"optim/lr": updates.lr, "optim/skipped_updates": float(len(updates.skipped))}
    metrics |= {} if updates.loss_scale is None else {"optim/loss_scale": updates.loss_scale}
    trained, forwards = updates.trained, updates.forwards
    if not trained:
        return metrics
    per_token = zip(*((item.logprobs, item.ratios, item.gradient_weights) for item in forwards), strict=True)
    logprobs, ratios, gradient_weights = map(torch.cat, per_token)
    old_logprobs = torch.cat([batch.old_logprobs for batch in trained])
    pairs = [*zip(trained, forwards, strict=True)]
    advantages = torch.cat([batch.trained_advantages(item.logprobs) for batch, item in pairs])
    states = starmap(_clip_state, pairs)
    state = ClipState(*map(_joined, zip(*states, strict=True)))
    left_out = [batch.left_out.old_logprobs for batch in trained if batch.left_out is not None]
    metrics |= {
        **clip_metrics(state, old_logprobs, *left_out),
        **gradient_metrics(gradient_weights, advantages, old_logprobs),
        "ratio/mean": ratios.mean().item(),
        "ratio/max": ratios.max().item(),
        "kl/old_new": k3(old_logprobs, logprobs).mean().item(),
        "optim/loss": torch.stack([forward.loss for forward in forwards]).double().mean().item(),
        "optim/grad_norm": sum(updates.grad_norms) / len(updates.grad_norms),
    }
    if (dropped := _joined(batch.dropped(item.logprobs) for batch, item in pairs)) is not None:
        metrics["clip/off_policy_masked_fraction"] = dropped.double().mean().item()
    if (chosen := _joined(batch.chosen for batch in trained)) is not None:
        thresholds = [batch.entropy_threshold for batch in trained if batch.entropy_threshold is not None]
        metrics["train/top_entropy_fraction"] = chosen.double().mean().item()
        metrics["train/top_entropy_threshold"] = torch.stack(thresholds).mean().item()
    if (of_reference := _joined(batch.ref_logprobs for batch in trained)) is not None:
        metrics["kl/ref"] = k3(logprobs, of_reference).mean().item()
    return metrics


def _clip_state(experience: Experience, forward: Forward) -> ClipState:
    """Return which tokens of an update the method clips."""
    advantages, weights = experience.trained_advantages(forward.logprobs), forward.gradient_weights
    return experience.loss.clip_state(experience.columns, forward.ratios, advantages, weights)


def probability_bins(old_logprobs: Tensor) -> Tensor:
    """Return the bin of each token's π_old, int64 [N]."""
    edges = torch.tensor(PROBABILITY_EDGES[1:-1], device=old_logprobs.device, dtype=torch.float64)
    return torch.bucketize(old_logprobs.double().exp(), edges)


def clip_metrics(state: ClipState, old_logprobs: Tensor, *left_out_logprobs: Tensor) -> dict[str, float]:
    """Return the `clip/` metrics; a bin without tokens has no active fraction.

    `old_logprobs` are those of the N tokens of `state`, `left_out_logprobs` those of tokens that have an advantage of 0
    and no ratio: they count as not clipped.
    """
    all_logprobs = torch.cat([old_logprobs, *left_out_logprobs])
    tokens = max(len(all_logprobs), 1)
    sides = {"active": state.active, "upper": state.at_upper, "lower": state.at_lower}
    metrics = {f"clip/{name}_fraction": int(side.sum()) / tokens for name, side in sides.items()}
    if state.outside is not None:
        metrics["clip/outside_fraction"] = int(state.outside.sum()) / max(len(old_logprobs), 1)
    by_bin = torch.bincount(probability_bins(all_logprobs), minlength=len(BIN_NAMES))
    active_by_bin = torch.bincount(probability_bins(old_logprobs)[state.active], minlength=len(BIN_NAMES))
    for name, active, in_bin in zip(BIN_NAMES, active_by_bin.tolist(), by_bin.tolist(), strict=True):
        metrics[f"clip/token_share/{name}"] = in_bin / tokens
        if in_bin:
            metrics[f"clip/active_fraction/{name}"] = active / in_bin
    return metrics


def gradient_metrics(gradient_weights: Tensor, advantages: Tensor, old_logprobs: Tensor) -> dict[str, float]:
    """Return the `gradient/` metrics of a step's tokens, from columns [N]; tokens with an advantage of 0 are left out.

    They are the share of tokens with zero gradient, and the mean, smallest and largest weight: of all tokens, and by
    sign of the advantage and bin of π_old. Empty where every advantage is 0.
    """
    used = advantages != 0
    if not used.any():
        return {}
    weights, positive = gradient_weights[used].double(), advantages[used] > 0
    bins = probability_bins(old_logprobs[used])
    parts = {"": weights}
    for sign, has_sign in (("positive", positive), ("negative", ~positive)):
        for index, name in enumerate(BIN_NAMES):
            parts[f"/{sign}/{name}"] = weights[has_sign & (bins == index)]
    metrics = {}
    for suffix, part in parts.items():
        if len(part):
            metrics[f"gradient/zero_fraction{suffix}"] = (part == 0).double().mean().item()
            metrics[f"gradient/weight_mean{suffix}"] = part.mean().item()
            metrics[f"gradient/weight_min{suffix}"] = part.min().item()
            metrics[f"gradient/weight_max{suffix}"] = part.max().item()
    return metrics


def clip_map_columns(updates: AppliedUpdates) -> dict[str, NDArray[np.float32]]:
    """Return the columns of the clip map, [n] each: the tokens with a ratio, each at its own update.

    A method without ratio bounds has the bounds 0 and infinity, a masked token has the advantage 0. If there are more
    than `CLIP_MAP_TOKENS` tokens, only every second, third, ... of them.
    """
    experiences, forwards = updates.trained, updates.forwards
    pairs, ratios = zip(experiences, forwards, strict=True), torch.cat([item.ratios for item in forwards])
    lower, upper = (_joined(item.columns.get(name) for item in experiences) for name in ("lower", "upper"))
    columns = {
        "old_logprob": torch.cat([experience.old_logprobs for experience in experiences]),
        "ratio": ratios,
        "lower": torch.zeros_like(ratios) if lower is None else lower,
        "upper": torch.full_like(ratios, math.inf) if upper is None else upper,
        "advantage": torch.cat([batch.trained_advantages(item.logprobs) for batch, item in pairs]),
        "gradient_weight": torch.cat([forward.gradient_weights for forward in forwards]),
    }
    stride = -(-len(ratios) // CLIP_MAP_TOKENS)
    return {name: column[::stride].numpy() for name, column in columns.items()}


def is_recorded(config: RunConfig, step: int, last: int) -> bool:
    """Return whether the values per token of `step` are recorded: of the first, every n-th and the last step."""
    every = config.tracking.tokens_every
    return every > 0 and (step % every == 0 or step in (1, last))


def token_values(
    sampled: Sequence[Group], updates: AppliedUpdates, tokenizer: PreTrainedTokenizerBase
) -> TokenValues:
    """Return the values of all tokens that a step has sampled, also of the groups that dynamic sampling dropped.

    Those and the groups of skipped updates have no advantage and no ratio.
    """
    completions = [rollout.completion for group in sampled for rollout in group.rollouts_G]
    lengths = np.array([len(completion.token_ids) for completion in completions])
    starts, tokens = np.cumsum(lengths) - lengths, lengths.sum()
    names = ("advantage", "ratio", "entropy", "lower", "upper", "importance")
    columns: dict[str, NDArray[Any]] = {name: np.full(tokens, np.nan, np.float32) for name in names}
    columns["old_logprob"] = np.concatenate([completion.logprobs for completion in completions])
    columns["clipped"] = np.zeros(tokens, np.uint8)
    ends = np.cumsum([len(group.rollouts_G) for group in sampled])[:-1]
    of_group = np.split(np.arange(tokens), starts[ends])
    places = {id(group): place for group, place in zip(sampled, of_group, strict=True)}

    def store(experience: Experience, forward: Forward | None) -> None:
        place = np.concatenate([places[id(group)] for group in experience.groups])
        for name, value in _known_values(experience, forward).items():
            if value is not None:
                columns[name][place] = value.numpy()

    for experience, forward in zip(updates.trained, updates.forwards, strict=True):
        store(experience, forward)
        if experience.left_out is not None:
            store(experience.left_out, None)
    with np.errstate(over="ignore"):  # values above 65,504 become infinite
        halves: dict[str, Any] = {name: columns.pop(name).astype(np.float16) for name in names[2:]}
    ids = np.concatenate([completion.token_ids for completion in completions])
    vocabulary, text_index = np.unique(ids, return_inverse=True)
    texts = token_texts(tokenizer, vocabulary.tolist())
    for start, completion in zip(starts, completions, strict=True):
        for position, token_ids in completion.inserted:  # shown before the token that follows
            text = f"⟦{tokenizer.decode(list(token_ids))}⟧{texts[text_index[start + position]]}"
            text_index[start + position] = len(texts)
            texts.append(text)
    advantage = columns.pop("advantage")[starts]
    return TokenValues(lengths, advantage, texts, text_index.astype(np.int32), **columns, **halves)


def _known_values(experience: Experience, forward: Forward | None) -> dict[str, Tensor | None]:
    """Return the values of an update's tokens, [N] each; without a forward pass, those under π_old."""
    values = {
        "advantage": experience.advantages,
        "old_logprob": experience.old_logprobs,
        "entropy": experience.entropy,
        "importance": experience.importance_weights,
    }
    if forward is None:
        return values
    ratios, state, interval = forward.ratios, _clip_state(experience, forward), experience.loss.interval
    lower, upper = (experience.columns.get(name) for name in ("lower", "upper"))
    if lower is None and interval is not None:
        lower, upper = (torch.full_like(ratios, bound) for bound in interval)
    clipped = state.at_upper.byte() + 2 * state.at_lower.byte()
    return {**values, "ratio": ratios, "lower": lower, "upper": upper, "clipped": clipped}


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text of each token as it is within a completion; the bytes of an incomplete character are U+FFFD.

    A token is decoded after itself, because some tokenizers remove the space before the first word of a text.
    """
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    single = tokenizer.batch_decode([[number] for number in ids], **options)
    double = tokenizer.batch_decode([[number, number] for number in ids], **options)
    return [pair[len(text) :] or text for text, pair in zip(single, double, strict=True)]
