"""Values per token of a step, for `bandpo view`: collected from the rollouts and the applied updates.

Nothing is computed by the model: all values exist at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from bandpo_cli.config.run import RunConfig
from bandpo_cli.storage.tables import TokenValues
from bandpo_cli.training.experience import Experience
from bandpo_cli.training.update import AppliedUpdates, Forward
from bandpo_cli.types import Group


def is_recorded(config: RunConfig, step: int) -> bool:
    """Return whether the values per token of `step` are recorded: of the first, every n-th and the last step."""
    every = config.tracking.tokens_every
    return every > 0 and (step % every == 0 or step in (1, config.steps))


def token_values(
    sampled: Sequence[Group], updates: AppliedUpdates, tokenizer: PreTrainedTokenizerBase
) -> TokenValues:
    """Return the values of all tokens that a step has sampled.

    Args:
        sampled: all groups of the step, those that dynamic sampling dropped included; they and the groups of skipped
            updates have no advantage and no ratio.
        updates: the applied updates of the step.
    """
    completions = [rollout.completion for group in sampled for rollout in group.rollouts_G]
    lengths = np.array([len(completion.token_ids) for completion in completions])
    ids = np.concatenate([np.asarray(completion.token_ids) for completion in completions])
    vocabulary, text_index = np.unique(ids, return_inverse=True)
    unknown = np.full(len(ids), np.nan, np.float32)
    columns: dict[str, NDArray[Any]] = {
        name: unknown.copy() for name in ("ratio", "entropy", "lower", "upper", "importance")
    }
    columns["old_logprob"] = np.concatenate([np.asarray(completion.logprobs) for completion in completions])
    columns["clipped"] = np.zeros(len(ids), np.uint8)
    advantage = np.full(len(completions), np.nan, np.float32)
    sizes = np.array([len(group.rollouts_G) for group in sampled])
    first = np.cumsum(sizes) - sizes
    first_tokens = (np.cumsum(lengths) - lengths)[first]
    places = {id(group): place for group, *place in zip(sampled, first, first_tokens, strict=True)}

    def store(groups: Sequence[Group], values: dict[str, torch.Tensor | None]) -> None:
        """Copy the values of groups, flat and in their order, to the places of these groups."""
        known = {name: value.cpu().numpy() for name, value in values.items() if value is not None}
        start = 0
        for group in groups:
            completion, token = places[id(group)]
            of_group = lengths[completion : completion + len(group.rollouts_G)]
            end = start + of_group.sum()
            for name in columns.keys() & known.keys():
                columns[name][token : token + end - start] = known[name][start:end]
            starts = start + np.cumsum(of_group) - of_group
            advantage[completion : completion + len(of_group)] = known["advantage"][starts]
            start = end

    for experience, forward in zip(updates.trained, updates.forwards, strict=True):
        store(experience.groups, _trained_values(experience, forward))
        if (left_out := experience.left_out) is not None:
            store(
                left_out.groups,
                {
                    "advantage": left_out.advantages,
                    "old_logprob": left_out.old_logprobs,
                    "entropy": left_out.entropy,
                    "importance": left_out.importance_weights,
                },
            )
    halves: dict[str, Any] = {
        name: _half(columns.pop(name)) for name in ("entropy", "lower", "upper", "importance")
    }
    texts = token_texts(tokenizer, vocabulary.tolist())
    for start, completion in zip(np.cumsum(lengths) - lengths, completions, strict=True):
        for position, token_ids in completion.inserted:  # shown before the token that follows
            text = f"⟦{tokenizer.decode(list(token_ids))}⟧{texts[text_index[start + position]]}"
            text_index[start + position] = len(texts)
            texts.append(text)
    return TokenValues(lengths, advantage, texts, text_index.astype(np.int32), **columns, **halves)


def _trained_values(experience: Experience, forward: Forward) -> dict[str, torch.Tensor | None]:
    """Return the values of the tokens that went through the model in an update, [N] each."""
    loss, ratios, advantages = experience.loss, forward.ratios, experience.trained_advantages
    state = loss.clip_state(experience.columns, ratios, advantages, forward.gradient_weights)
    lower, upper = (experience.columns.get(name) for name in ("lower", "upper"))
    if lower is None and loss.interval is not None:
        lower, upper = (torch.full_like(ratios, bound) for bound in loss.interval)
    return {
        "advantage": experience.advantages,
        "old_logprob": experience.old_logprobs,
        "ratio": ratios,
        "entropy": experience.entropy,
        "lower": lower,
        "upper": upper,
        "importance": experience.importance_weights,
        "clipped": state.at_upper.byte() + 2 * state.at_lower.byte(),
    }


def _half(values: NDArray[Any]) -> NDArray[np.float16]:
    """Return values as float16, which has 3 digits; values above 65,504 become infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text of each token as it is within a completion, special tokens included.

    A token is decoded after itself, because some tokenizers remove the space before the first word of a text. The bytes
    of an incomplete character are U+FFFD.
    """
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    single = tokenizer.batch_decode([[number] for number in ids], **options)
    double = tokenizer.batch_decode([[number, number] for number in ids], **options)
    return [pair[len(text) :] or text for text, pair in zip(single, double, strict=True)]
