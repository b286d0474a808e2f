"""Checks of prompts before a run, an evaluation, and in a dry run: their lengths, and the questions in them.

What is certain to be wrong is an error, what may be meant a line for the user. `PromptEncoder` checks all ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING

from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.task import DataTask, TaskSettings
from bandpo_cli.datasets import TEMPLATES
from bandpo_cli.errors import ConfigError, plural
from bandpo_cli.sampling.rollouts import EncodedPrompt, PromptEncoder
from bandpo_cli.tasks.task import build_prompt, without_spaces
from bandpo_cli.types import Message, Problem

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SAMPLE = 32
"""First problems of a set whose prompts are compared with their questions."""


def check_context_length(model: PretrainedConfig, config: RunConfig) -> None:
    """Raise ConfigError if a prompt and its completion can exceed the context length of a model with these settings."""
    context_length = getattr(model.get_text_config(), "max_position_embeddings", None)
    prompt, completion = config.sampling.max_prompt_tokens, config.sampling.max_tokens
    if context_length is not None and prompt + completion > context_length:
        raise ConfigError(
            f"sampling.max_prompt_tokens = {prompt:,} and sampling.max_tokens = {completion:,} come to "
            f"{prompt + completion:,} tokens; the model reads at most {context_length:,}; lower one of them"
        )


def drop_long_prompts_in_sets(
    encoder: PromptEncoder, sets: Mapping[str, Sequence[Problem]], config: RunConfig, notes: list[str]
) -> dict[str, Sequence[Problem]]:
    """Return the first `evaluation.problems` of each set by name, as `drop_long_prompts` returns them."""
    return {
        label: drop_long_prompts(encoder, label, problems[: config.evaluation.problems], config, notes)
        for label, problems in sets.items()
    }


def drop_long_prompts(
    encoder: PromptEncoder, label: str, problems: Sequence[Problem], config: RunConfig, notes: list[str]
) -> Sequence[Problem]:
    """Return the problems whose prompts are not empty and not too long; add lines on them to `notes`.

    Raises:
        ConfigError: there are no problems, all prompts are too long, or `check_questions` finds an error.
    """
    limit = config.sampling.max_prompt_tokens
    if not problems:
        raise ConfigError(f"'{label}' has no problems")
    prompts = encoder.encode(problems)
    notes += check_questions(encoder, label, problems, prompts)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    fitting = [problem for problem, length in zip(problems, lengths, strict=True) if 1 <= length <= limit]
    if not fitting:
        raise _long_prompts_error(encoder, label, problems, lengths, config)
    if len(fitting) < len(problems):
        notes.append(
            f"{label}: {len(problems) - len(fitting):,} of {len(problems):,} problems left out, their prompts have "
            f"more than {limit:,} tokens (sampling.max_prompt_tokens)"
        )
    return fitting


def check_questions(
    encoder: PromptEncoder, label: str, problems: Sequence[Problem], prompts: Sequence[EncodedPrompt]
) -> list[str]:
    """Return warnings of texts that are not in their prompts, and of texts that the model reads as special tokens.

    Raises:
        ConfigError: two different questions have the same prompt.
    """
    warnings, missing = list[str](), list[str]()
    first: dict[tuple[int, ...], tuple[str, str]] = {}
    sample, all_texts = problems[:_SAMPLE], [_texts(problem) for problem in problems[:_SAMPLE]]
    written = iter(without_spaces(chain.from_iterable(all_texts)))
    read = without_spaces(encoder.decode(prompts[:_SAMPLE]))
    for problem, prompt, texts, text_read in zip(sample, prompts, all_texts, read, strict=False):
        texts = [*islice(written, len(texts))]
        question = "".join(texts).casefold()
        other, its_question = first.setdefault(prompt.token_ids, (problem.id, question))
        if question != its_question:
            raise ConfigError(
                f"{label}: the different questions of {other} and {problem.id} have the same prompt: the model's chat "
                "template or tokenizer drops them; correct chat_template.jinja in its folder (the content of a message "
                "is a text, not a list of parts), or use model.prompts=raw"
            )
        missing += [problem.id for text in texts if text not in text_read]
    if missing:
        warnings.append(
            f"{label}: the chat template or the tokenizer changes or drops {plural(len(missing), 'text')} of the first "
            f"{len(sample)} prompts, first in problem {missing[0]}; look at the prompt of --dry-run"
        )
    special = re.compile("|".join(map(re.escape, encoder.special.values())) or "(?!)")
    chats = (problem for problem in problems if not isinstance(problem.prompt, str))
    matches = ((problem.id, special.search("\n".join(_texts(problem)))) for problem in chats)
    if marked := [(problem_id, match[0]) for problem_id, match in matches if match]:
        warnings.append(
            f"{label}: {len(marked):,} of {plural(len(problems), 'prompt')} with a text that the model reads as a "
            f"special token, the first {marked[0][1]!r} in problem {marked[0][0]}"
        )
    return warnings


def _texts(problem: Problem) -> list[str]:
    """Return the texts that a prompt must contain; templates remove thoughts from messages of the assistant."""
    if isinstance(problem.prompt, str):
        return [problem.prompt]
    return [message.content for message in problem.prompt if message.role != "assistant"]


def _long_prompts_error(
    encoder: PromptEncoder, label: str, problems: Sequence[Problem], lengths: Sequence[int], config: RunConfig
) -> ConfigError:
    """Return the error for a set whose prompts are all too long: their lengths, and the share of the template."""
    longest = max(lengths)
    template = _template_tokens(encoder, problems[lengths.index(longest)], config.task)
    share = "" if template is None else f", of which the template takes {template:,}"
    return ConfigError(
        f"sampling.max_prompt_tokens = {config.sampling.max_prompt_tokens}: all {len(problems):,} prompts of '{label}' "
        f"are longer: {min(lengths):,} to {longest:,} tokens{share}; --set sampling.max_prompt_tokens={longest} "
        "keeps all of them"
    )


def _template_tokens(encoder: PromptEncoder, problem: Problem, task: TaskSettings) -> int | None:
    """Return the length of a prompt with an empty question; None where `task.template` did not make the prompt."""
    if not isinstance(task, DataTask):
        return None
    empty = build_prompt("", task.template, task.system)
    before, _, after = TEMPLATES.get(task.template, task.template).partition("{question}")
    user = problem.prompt[-1].content if isinstance(problem.prompt[-1], Message) else ""
    if len(problem.prompt) != len(empty) or not (user.startswith(before) and user.endswith(after)):
        return None  # chat messages of the data set, which no template changes
    return len(encoder.encode([replace(problem, prompt=empty)])[0].token_ids)
