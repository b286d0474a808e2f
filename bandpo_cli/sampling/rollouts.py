"""Rollouts: encoded prompts, prompts that are too long, tokens that end a completion, completions, graded groups."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from difflib import ndiff
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from bandpo_cli.config.run import RewardConfig, RunConfig
from bandpo_cli.config.task import DataTask, TaskSettings
from bandpo_cli.datasets import TEMPLATES
from bandpo_cli.errors import ConfigError, nearest
from bandpo_cli.grading.tools import tool_schemas
from bandpo_cli.models.load import Policy
from bandpo_cli.objective.advantages import shaped_reward
from bandpo_cli.sampling.sampler import (
    Sampler,
    SampleRequest,
    SamplingParams,
    StaleEngineError,
)
from bandpo_cli.tasks.prompts import build_prompt
from bandpo_cli.types import (
    ENVIRONMENT_REWARD,
    MESSAGES,
    Completion,
    Grade,
    Group,
    Message,
    Problem,
    Rollout,
)

if TYPE_CHECKING:
    from bandpo_cli.sampling.conversations import Conversations

_ANSWER = "It-is-2"
"""A message of the assistant that finds its place in a rendered template, which changes none of its characters."""

_CHECKED_PROMPTS = 64
"""Prompts that are encoded at a time until one is short enough; usually the first ones are."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as text and as token ids, as the model receives it."""

    text: str
    token_ids: tuple[int, ...]


class PromptEncoder:
    """Converts prompts to tokens. Training and evaluation share one, so that their templates cannot differ."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompts: str = "auto",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Set how chat messages are converted to text.

        Args:
            tokenizer: the model's tokenizer.
            prompts: `chat` applies the tokenizer's chat template, `raw` joins the messages with blank lines, `auto`
                applies the template if the tokenizer has one.
            arguments: further arguments of the template (`model.chat_template_kwargs`).

        Raises:
            ConfigError: `prompts` is `chat` or there are `arguments`, but the tokenizer has no chat template.
        """
        has_template = getattr(tokenizer, "chat_template", None) is not None
        if (prompts == "chat" or arguments) and not has_template:
            setting, other = "prompts = 'chat'", "use model.prompts=raw"
            if arguments:
                setting, other = f"chat_template_kwargs = {arguments}", "leave it out"
            raise ConfigError(
                f"model.{setting}: the model's tokenizer has no chat template; add chat_template.jinja to its folder, "
                f"or {other}"
            )
        self.tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        self._are_arguments_checked = False
        self._chat = has_template and prompts != "raw"
        self._lacks_template = not has_template and prompts == "auto"

    @classmethod
    def of_run(cls, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> PromptEncoder:
        """Return the encoder of a run's prompts, which contain the schemas of its tools.

        Raises:
            ConfigError: as for the class, or a tool cannot be used.
        """
        arguments: dict[str, Any] = {**(config.model.chat_template_kwargs or {})}
        if schemas := tool_schemas(config.task.functions, config.task.environment is not None):
            arguments["tools"] = schemas
        return cls(tokenizer, config.model.prompts, arguments)

    def encode(self, problems_P: Sequence[Problem]) -> list[EncodedPrompt]:
        """Return the prompts of `problems_P` as text and tokens.

        Raises:
            ConfigError: the chat template refuses the messages (some templates have no system role, for example), or
                ignores one of its arguments.
        """
        texts = [self._text(problem) for problem in problems_P]
        # A plain-text prompt is in the task's own format, and a chat template writes special tokens itself. Only raw
        # joined messages get the special tokens that the tokenizer adds to a text (a beginning-of-sequence token).
        joined = [not self._chat and not isinstance(problem.prompt, str) for problem in problems_P]
        ids = {}
        for special in {*joined}:
            of_kind = [text for text, is_joined in zip(texts, joined, strict=True) if is_joined == special]
            ids[special] = iter(
                self.tokenizer(
                    of_kind,
                    add_special_tokens=special,
                    return_attention_mask=False,
                    return_token_type_ids=False,
                )["input_ids"]
            )
        pairs = zip(texts, joined, strict=True)
        return [EncodedPrompt(text, tuple(next(ids[special]))) for text, special in pairs]

    def applies_template(self, problem: Problem) -> bool:
        """Return whether the chat template formats the problem's prompt."""
        return self._chat and not isinstance(problem.prompt, str)

    def effect_of_arguments(self, problem: Problem) -> list[str]:
        """Return the lines of a prompt that the arguments of the chat template remove (`- `) and add (`+ `)."""
        assert not isinstance(problem.prompt, str)
        plain = self._try_render(problem.prompt, {}) or ""
        lines = ndiff(plain.splitlines(), self._render(problem.prompt, self._arguments).splitlines())
        return [line for line in lines if line.startswith(("- ", "+ "))]

    def turn_ids(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens between the end token of the assistant's turn and its next turn, with `messages` in them.

        It is the end of what the template makes of a conversation, tokenized by itself: the turns before, as sampled,
        are never tokenized again.

        Raises:
            ConfigError: the tokenizer has no chat template, or it refuses the messages.
        """
        if not self._chat:
            raise ConfigError(
                "task.tools and task.environment need a chat template, which the model's tokenizer does not have, or "
                "model.prompts = 'raw' leaves out"
            )
        earlier = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        options = {**self._arguments, "tokenize": False, "add_generation_prompt": True}
        try:
            text = str(self.tokenizer.apply_chat_template([*earlier, *messages], **options))
        except Exception as error:  # noqa: BLE001 - a template is a program that the model's author wrote
            roles = ", ".join(sorted({str(message.get("role")) for message in messages}))
            raise ConfigError(
                f"the model's chat template refuses a conversation with messages of {roles} ({error!s:.300})"
            ) from None
        _, _, after = text.partition(_ANSWER)  # a result may have the same words
        end = end_of_turn_id(self.tokenizer)
        if end is not None:
            after = after.partition(str(self.tokenizer.convert_ids_to_tokens(end)))[2]
        return tuple(self.tokenizer(after, add_special_tokens=False)["input_ids"])

    def notes(self, problems_P: Sequence[Problem]) -> list[str]:
        """Return a line for the user where a missing chat template may be a mistake: a chat model expects one."""
        if not self._lacks_template or all(isinstance(problem.prompt, str) for problem in problems_P):
            return []
        return [
            "the model's tokenizer has no chat template, so it gets the messages as plain text; a chat model needs "
            "chat_template.jinja in its folder; --set model.prompts=raw removes this note"
        ]

    def filter_by_length(self, problems_P: Sequence[Problem], max_tokens: int) -> list[Problem]:
        """Return the problems whose prompts have 1 to `max_tokens` tokens, in order."""
        lengths = [len(prompt.token_ids) for prompt in self.encode(problems_P)]
        return [item for item, length in zip(problems_P, lengths, strict=True) if 1 <= length <= max_tokens]

    def _text(self, problem: Problem) -> str:
        """Return the prompt of a problem as the text that is tokenized."""
        if isinstance(problem.prompt, str):
            return problem.prompt
        if not self._chat:
            return "\n\n".join(message.content for message in problem.prompt)
        try:
            text = self._render(problem.prompt, self._arguments)
        except Exception as error:  # noqa: BLE001 - a template is a program that the model's author wrote
            raise ConfigError(
                f"problem {problem.id}: the model's chat template refuses its messages ({error!s:.300}); "
                "change them or use model.prompts=raw"
            ) from None
        if not self._are_arguments_checked:
            self._check_arguments(problem.prompt)
            self._are_arguments_checked = True
        return text

    def _render(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> str:
        """Return chat messages as the template formats them."""
        options = {**arguments, "tokenize": False, "add_generation_prompt": True}
        return str(self.tokenizer.apply_chat_template([vars(message) for message in messages], **options))

    def _try_render(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> str | None:
        """Return what `_render` returns; None if the template refuses the arguments, which it has therefore read."""
        with suppress(Exception):
            return self._render(messages, arguments)
        return None

    def _check_arguments(self, messages: Sequence[Message]) -> None:
        """Raise ConfigError if the template ignores one of its arguments: no value of it changes the prompt.

        A value may be the template's default, as true is for Qwen3's enable_thinking. Another value then has an effect.
        """
        for name, value in self._arguments.items():
            others = {key: other for key, other in self._arguments.items() if key != name}
            without = self._try_render(messages, others)
            values = (value,) if name == "tools" else (value, True, False)
            tried = (self._try_render(messages, {**others, name: other}) for other in values)
            if all(text == without for text in tried):
                if name == "tools":
                    raise ConfigError(
                        "task.tools: the model's chat template has no place for tools; use a model whose template has, "
                        "or describe them in task.system and answer in task.environment"
                    )
                near = nearest(name, re.findall(r"[a-z]\w*", str(self.tokenizer.chat_template)))
                raise ConfigError(
                    f"model.chat_template_kwargs.{name} = {value!r}: the model's chat template ignores this "
                    f"argument{near}; leave it out"
                )


def check_context_length(policy: Policy, config: RunConfig) -> None:
    """Raise ConfigError if a prompt and its completion can exceed the model's context length."""
    context_length = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
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
    """Return the problems whose prompts are not empty and not too long; add a line on the others to `notes`.

    Raises:
        ConfigError: there are no problems, or all prompts are too long.
    """
    limit = config.sampling.max_prompt_tokens
    if not problems:
        raise ConfigError(f"'{label}' has no problems")
    fitting = encoder.filter_by_length(problems, limit)
    if not fitting:
        raise _long_prompts_error(encoder, label, problems, config)
    if len(fitting) < len(problems):
        notes.append(
            f"{label}: {len(problems) - len(fitting):,} of {len(problems):,} problems left out, their prompts have "
            f"more than {limit:,} tokens (sampling.max_prompt_tokens)"
        )
    return fitting


def check_some_prompt_fits(
    encoder: PromptEncoder, label: str, problems: Sequence[Problem], config: RunConfig
) -> None:
    """Raise ConfigError if all prompts are longer than `sampling.max_prompt_tokens`; stop at the first that is not."""
    limit, starts = config.sampling.max_prompt_tokens, range(0, len(problems), _CHECKED_PROMPTS)
    if not any(
        encoder.filter_by_length(problems[start : start + _CHECKED_PROMPTS], limit) for start in starts
    ):
        raise _long_prompts_error(encoder, label, problems, config)


def _long_prompts_error(
    encoder: PromptEncoder, label: str, problems: Sequence[Problem], config: RunConfig
) -> ConfigError:
    """Return the error for a set whose prompts are all too long: their lengths, and the share of the template."""
    lengths = [len(prompt.token_ids) for prompt in encoder.encode(problems)]
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


def completion_stop_ids(
    policy: Policy, encoder: PromptEncoder, problems: Sequence[Problem]
) -> tuple[int, ...]:
    """Return the ids of the tokens that end a completion of these problems.

    Where the chat template formats a prompt, its end-of-turn token is one of them. A base model with a template (such
    as Qwen2.5) ends its turns with a token, <|im_end|>, that is not its end-of-sequence token, <|endoftext|>, and would
    continue up to `sampling.max_tokens`.
    """
    token = end_of_turn_id(policy.tokenizer) if any(map(encoder.applies_template, problems)) else None
    rows = policy.model.get_input_embeddings().weight.shape[0]
    if token is None or token >= rows:  # a token that was added to the tokenizer alone is never sampled
        return policy.stop_ids
    return tuple(dict.fromkeys([*policy.stop_ids, token]))


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the token that the chat template writes after an assistant's message.

    None if the template writes nothing there or several tokens, or refuses the messages.
    """
    turns = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # noqa: BLE001 - a template is a program that the model's author wrote
        return None
    _, match, after = text.rpartition(_ANSWER)
    tokens: dict[str, int] = tokenizer.get_added_vocab()
    following = [name for name in tokens if name.strip() and after.lstrip().startswith(name.strip())]
    return tokens[max(following, key=len)] if match and following else None


def stream_completions(
    sampler: Sampler,
    requests: Iterable[tuple[Sequence[Problem], SampleRequest]],
    params: SamplingParams,
    version: int,
    conversations: Conversations | None = None,
) -> Generator[list[list[Completion]], None, None]:
    """Yield the completions [P][n] of each request in order, sampled at the same time if the sampler can.

    Args:
        requests: each with its problems [P].
        conversations: samples several turns per completion; None for one.

    Raises:
        StaleEngineError: the engine has other weights than those after `version` optimizer updates.
    """
    if conversations is not None:
        yield from conversations.stream(sampler, requests, params, version)
        return
    without_problems = (request for _, request in requests)
    with closing(sampler.sample_stream(without_problems, params)) as stream:
        for completions_PG in stream:
            check_version(completions_PG, version)
            yield completions_PG


def check_version(completions_PG: Sequence[Sequence[Completion]], version: int) -> None:
    """Raise StaleEngineError if completions are from other weights than those after `version` optimizer updates."""
    others = {item.policy_version for group in completions_PG for item in group} - {version}
    if others:
        raise StaleEngineError(
            f"the engine sampled from the weights of update {min(others)}, the policy is at {version}"
        )


def decode_completions(
    tokenizer: PreTrainedTokenizerBase, completions_PG: Sequence[Sequence[Completion]]
) -> list[str]:
    """Return the text of each completion, [P·G], without special tokens; of a conversation, that of the last turn."""
    ids = [list(completion.last_turn_ids) for group in completions_PG for completion in group]
    # transformers decodes no sequences as one empty sequence
    return [*tokenizer.batch_decode(ids, skip_special_tokens=True)] if ids else []


def problem_per_completion(
    problems_P: Sequence[Problem], completions_PG: Sequence[Sequence[Completion]]
) -> list[Problem]:
    """Return the problem of each completion, [P·G], with the turns of a conversation in `extra`, for its grader."""
    pairs = zip(problems_P, completions_PG, strict=True)
    return [with_turns(problem, completion) for problem, group in pairs for completion in group]


def with_turns(problem: Problem, completion: Completion) -> Problem:
    """Return the problem with the messages of a conversation, and the reward of its environment, in `extra`."""
    if (turns := completion.conversation) is None:
        return problem
    reward = {} if turns.reward is None else {ENVIRONMENT_REWARD: turns.reward}
    return replace(problem, extra={**problem.extra, MESSAGES: turns.messages, **reward})


def graded_groups(
    problems_P: Sequence[Problem],
    prompts_P: Sequence[EncodedPrompt],
    completions_PG: Sequence[Sequence[Completion]],
    texts: Sequence[str],
    grades: Sequence[Grade],
    reward: RewardConfig,
    max_tokens: int,
) -> list[Group]:
    """Return one group per problem with the graded completions and their shaped rewards.

    Args:
        texts, grades: of all completions, [P·G].
        reward: range of the reward and penalty for long completions.
        max_tokens: maximum tokens per completion, from which the penalty for long completions counts.
    """
    graded = iter(zip(texts, grades, strict=True))

    def rollout(problem: Problem, prompt: EncodedPrompt, completion: Completion) -> Rollout:
        text, unshaped = next(graded)
        shaped = shaped_reward(unshaped, len(completion.token_ids), max_tokens, reward)
        rollout_grade = replace(unshaped, reward=shaped)
        about = prompt.text, prompt.token_ids, completion, text, rollout_grade
        return Rollout(with_turns(problem, completion), *about)

    return [
        Group(problem, tuple(rollout(problem, prompt, completion) for completion in completions))
        for problem, prompt, completions in zip(problems_P, prompts_P, completions_PG, strict=True)
    ]
