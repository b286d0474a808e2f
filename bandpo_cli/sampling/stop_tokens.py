"""Tokens that end a completion: the model's end-of-sequence tokens, and the chat template's end-of-turn token."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from bandpo_cli.models.load import Policy
from bandpo_cli.sampling.rollouts import PromptEncoder
from bandpo_cli.types import Problem

_QUESTION, _ANSWER = "What is 1+1?", "It-is-2"
"""A turn of each role; the answer has no character that a template changes, and occurs nowhere else."""


def completion_stop_ids(
    policy: Policy, encoder: PromptEncoder, problems: Sequence[Problem]
) -> tuple[int, ...]:
    """Return the ids of the tokens that end a completion of these problems.

    Where the chat template formats a prompt, its end-of-turn token is one of them. A base model with a template (such
    as Qwen2.5) ends its turns with a token, <|im_end|>, that is not its end-of-sequence token, <|endoftext|>, and would
    continue up to `sampling.max_tokens`.
    """
    if not any(encoder.applies_template(problem) for problem in problems):
        return policy.stop_ids
    token = end_of_turn_id(policy.tokenizer)
    rows = policy.model.get_input_embeddings().weight.shape[0]
    if token is None or token >= rows:  # a token that was added to the tokenizer alone is never sampled
        return policy.stop_ids
    return tuple(dict.fromkeys([*policy.stop_ids, token]))


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the token that the chat template writes after an assistant's message.

    Returns:
        None if the template writes nothing there or a text that is not one token, or refuses these messages.
    """
    turns = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # noqa: BLE001 - a template is a program that the model's author wrote
        return None
    _, answer, after = text.rpartition(_ANSWER)
    if not answer:
        return None
    tokens: dict[str, int] = tokenizer.get_added_vocab()
    following = [name for name in tokens if name.strip() and after.lstrip().startswith(name.strip())]
    return tokens[max(following, key=len)] if following else None
