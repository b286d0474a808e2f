"""Prompts as tokens: the encoder, the inserted turns of a conversation, end tokens, and the checks of prompts.

What is certain to be wrong is an error, what may be meant a line for the user.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import ndiff
from itertools import chain, groupby, islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.task import DataTask, TaskSettings
from bandpo_cli.errors import ConfigError, nearest, plural
from bandpo_cli.grading.tools import tool_schemas
from bandpo_cli.models.load import Policy
from bandpo_cli.registries import TEMPLATES
from bandpo_cli.tasks.task import build_prompt, compatibility_form
from bandpo_cli.types import Message, Problem

COMPARED = 32  # First problems of a set whose prompts are compared with their questions
_ANSWER, _RESULT = "7-2-9-4-1", "5-8-3-6-0"
"""Messages that are found in a rendered template, which changes none of their characters, nor their case."""
_BREAK = "\ufdd0"
"""A place between two tokens: one of the code points that Unicode reserves for uses inside of a program."""
_NO_TURNS = (
    "task.tools and task.environment need a chat template, which the model's tokenizer does not have, or "
    "model.prompts = 'raw' leaves out; use a model with a template"
)


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
        rows: int | None = None,
    ) -> None:
        """Set how chat messages are converted to text.

        Raise ConfigError if `prompts` is `chat` or there are `arguments`, but the tokenizer has no chat template.

        Args:
            prompts: `chat` applies the tokenizer's chat template, `raw` joins the messages with blank lines, `auto`
                applies the template if the tokenizer has one.
            arguments: further arguments of the template (`model.chat_template_kwargs`), and the schemas of `tools`.
            rows: number of the model's embeddings, which limits the ids; None if the ids do not go into the model.
        """
        has_template = getattr(tokenizer, "chat_template", None) is not None
        self.tokenizer, self._arguments, self._are_arguments_checked = tokenizer, dict(arguments or {}), False
        self._chat = has_template and prompts != "raw"
        self._lacks_template = not has_template and prompts == "auto"
        if "tools" in self._arguments and not self._chat:
            raise ConfigError(_NO_TURNS)
        if (prompts == "chat" or arguments) and not has_template:
            setting, other = "prompts = 'chat'", "use model.prompts=raw"
            if arguments:
                setting, other = f"chat_template_kwargs = {arguments}", "leave it out"
            problem = "the model's tokenizer has no chat template; add chat_template.jinja to its folder"
            raise ConfigError(f"model.{setting}: {problem}, or {other}")
        self._appended: tuple[int, ...] = ()
        if not self._chat:  # the special tokens that the tokenizer adds after a text
            plain, full = (tokenizer("?", add_special_tokens=added)["input_ids"] for added in (False, True))
            ends = [end for end in range(len(plain), len(full) + 1) if full[end - len(plain) : end] == plain]
            self._appended = tuple(full[max(ends) :]) if plain and ends else ()
        vocabulary, added = ({} if rows is None else tokenizer.get_vocab()), tokenizer.added_tokens_decoder
        self._rows, self._unembedded = rows, {i: name for name, i in vocabulary.items() if i >= (rows or 0)}
        self.special = {i: token.content for i, token in added.items() if token.special}
        template = str(tokenizer.chat_template) if self._chat else ""
        written = [token.content for token in added.values() if token.content.strip() in template]
        control = {*self.special.values(), *self._unembedded.values(), *written}
        names = "|".join(re.escape(name) for name in control if len(name) > 1) or "(?!)"
        # Every place is looked at, since a token may begin inside of another one.
        self._control = re.compile(f"(?={names})(.)", re.DOTALL)

    @classmethod
    def of_run(
        cls, tokenizer: PreTrainedTokenizerBase, config: RunConfig, rows: int | None = None
    ) -> PromptEncoder:
        """Return the encoder of a run, with the schemas of its tools; `rows` and errors as for the class."""
        arguments: dict[str, Any] = {**(config.model.chat_template_kwargs or {})}
        functions, of_environment = config.task.functions, config.task.environment is not None
        if functions and (schemas := tool_schemas(functions, of_environment)):
            arguments["tools"] = schemas
        return cls(tokenizer, config.model.prompts, arguments, rows)

    def encode(self, problems_P: Sequence[Problem]) -> list[EncodedPrompt]:
        """Return the prompts of `problems_P` as text and tokens.

        Raises:
            ConfigError: the chat template refuses the messages or ignores an argument, or a token has no embedding.
        """
        texts = [self._text(problem) for problem in problems_P]
        # A plain-text prompt is in the task's own format, and a chat template writes special tokens itself. Only raw
        # joined messages get the special tokens that the tokenizer adds before a text (a beginning-of-sequence token).
        joined = [not self._chat and not isinstance(problem.prompt, str) for problem in problems_P]
        ids = {}
        for special in {*joined}:
            of_kind = [text for text, is_joined in zip(texts, joined, strict=True) if is_joined == special]
            options = dict.fromkeys(("return_attention_mask", "return_token_type_ids"), False)
            tokens = self.tokenizer(of_kind, add_special_tokens=special, **options)["input_ids"]
            # A completion continues a joined text, which must not end with a token for the end of a text.
            end = -len(self._appended) if special and self._appended else None
            ids[special] = iter([tuple(row[:end]) for row in tokens])
        encoded = []
        for problem, text, is_joined in zip(problems_P, texts, joined, strict=True):
            encoded.append(EncodedPrompt(text, next(ids[is_joined])))
            if self._unembedded:
                self._check_ids(encoded[-1].token_ids, f"problem {problem.id}")
        return encoded

    def pieces(self, ids: Sequence[int]) -> Iterator[tuple[str, int | None]]:
        """Yield tokens as texts: each special token with its id, and the tokens between them together, with None."""
        for is_special, run in groupby(ids, self.special.__contains__):
            if is_special:
                yield from ((self.special[token], token) for token in run)
            else:
                yield str(self.tokenizer.decode([*run])), None

    def applies_template(self, problem: Problem) -> bool:
        """Return whether the chat template formats the problem's prompt."""
        return self._chat and not isinstance(problem.prompt, str)

    def effect_of_arguments(self, problem: Problem) -> list[str]:
        """Return the lines of a chat prompt that the arguments of the template remove (`- `) and add (`+ `)."""
        assert not isinstance(problem.prompt, str)
        plain = self._try_render(problem.prompt, {}) or ""
        lines = ndiff(plain.splitlines(), self._render(problem.prompt, self._arguments).splitlines())
        return [line for line in lines if line.startswith(("- ", "+ "))]

    def turn_ids(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens between the end token of the assistant's turn and its next turn, with `messages` in them.

        The turns before are not tokenized again. A special token or a mark of the template in a message stays text: a
        tool cannot end the turn and continue as another role. Raise ConfigError if there is no chat template, it
        refuses the messages, or the model has no embedding for a token.
        """
        rows = self.tokenizer(self._turn_text(messages).split(_BREAK), add_special_tokens=False)["input_ids"]
        ids = [*chain.from_iterable(rows)]
        self._check_ids(ids, "a turn of a conversation")
        return tuple(ids)

    def check_turn(self) -> None:
        """Raise ConfigError if the model cannot read what follows its turn: a tool's result or a user's message."""
        setting, role = ("tools", "tool") if "tools" in self._arguments else ("environment", "user")
        self.turn_ids([message := {"role": role, "name": "f", "content": _RESULT}])
        if _RESULT not in self._turn_text([message]):
            raise ConfigError(
                f"task.{setting}: the model's chat template writes no message with the role '{role}' after the end "
                "token of an answer; use a model whose template does"
            )

    def _turn_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text that `turn_ids` tokenizes, with a break inside of each control token of the messages."""
        if not self._chat:
            raise ConfigError(_NO_TURNS)
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        for message in messages:
            texts = {key: value for key, value in message.items() if isinstance(value, str)}
            broken = {key: self._control.sub(rf"\1{_BREAK}", text) for key, text in texts.items()}
            turns.append({**message, **broken})
        try:
            text = self._render(turns, self._arguments)
        except Exception as error:  # noqa: BLE001 - a template is a program that the model's author wrote
            roles = ", ".join(sorted({str(message.get("role")) for message in messages}))
            refuses = f"refuses a conversation with messages of {roles} ({error!s:.300})"
            raise ConfigError(f"the model's chat template {refuses}") from None
        after = text.partition(_ANSWER)[2]  # a result may have the same words
        end = end_of_turn_id(self.tokenizer)
        return after if end is None else after.partition(str(self.tokenizer.convert_ids_to_tokens(end)))[2]

    def _check_ids(self, ids: Sequence[int], place: str) -> None:
        """Raise ConfigError if the model has no embedding for one of the ids."""
        if (token := next((i for i in ids if i in self._unembedded), None)) is not None:
            raise ConfigError(
                f"{place}: the token {self._unembedded[token]!r} has the id {token}, the model has {self._rows} "
                "embeddings; take this text out of the question or the chat template, or use a model with more"
            )

    def notes(self, problems_P: Sequence[Problem]) -> list[str]:
        """Return lines for the user where the form of the chat messages in prompts may be a mistake."""
        chats, notes = [item.prompt for item in problems_P if not isinstance(item.prompt, str)], []
        if chats and self._lacks_template:
            notes.append(
                "the model's tokenizer has no chat template, so it gets the messages as plain text; a chat model needs "
                "chat_template.jinja in its folder; --set model.prompts=raw removes this warning"
            )
        if chats and self._appended:
            names = " ".join(text for text, _ in self.pieces(self._appended))
            notes.append(f"the model's tokenizer ends every text with {names}; the prompts are without it")
        if chats and (header := self._missing_header(chats[0])):
            notes.append(
                f"the model's chat template does not end a prompt with {header!r}, which begins an answer: the model "
                "may continue as the user; chat_template.jinja must write it for add_generation_prompt"
            )
        return notes

    def _missing_header(self, messages: Sequence[Message]) -> str:
        """Return what the template writes between a prompt and its answer, if it ignores `add_generation_prompt`."""
        with suppress(Exception):
            prompt, plain = (self._render(messages, self._arguments, begin) for begin in (True, False))
            answered = self._render([*messages, Message("assistant", _ANSWER)], self._arguments, False)
            if self._chat and prompt == plain and answered.startswith(prompt):
                return answered[len(prompt) :].partition(_ANSWER)[0].strip()
        return ""

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

    def _render(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        arguments: Mapping[str, Any],
        begin: bool = True,
    ) -> str:
        """Return chat messages as the template formats them; with `begin` the template begins an answer."""
        options = {**arguments, "tokenize": False, "add_generation_prompt": begin}
        turns = [vars(message) if isinstance(message, Message) else dict(message) for message in messages]
        return str(self.tokenizer.apply_chat_template(turns, **options))

    def _try_render(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> str | None:
        """Return what `_render` returns; None if the template refuses the arguments, which it has therefore read."""
        with suppress(Exception):
            return self._render(messages, arguments)
        return None

    def _check_arguments(self, messages: Sequence[Message]) -> None:
        """Raise ConfigError if no value of an argument changes the prompt; the given one may be the default."""
        for name, value in self._arguments.items():
            others = {key: other for key, other in self._arguments.items() if key != name}
            without = self._try_render(messages, others)
            values = (value,) if name == "tools" else (value, True, False)
            tried = (self._try_render(messages, {**others, name: other}) for other in values)
            if any(text != without for text in tried):
                continue
            if name == "tools":
                raise ConfigError(
                    "task.tools: the model's chat template has no place for tools; use a model whose template has, "
                    "or describe them in task.system and answer in task.environment"
                )
            near = nearest(name, re.findall(r"[a-z]\w*", str(self.tokenizer.chat_template)))
            problem = f"the model's chat template ignores this argument{near}; leave it out"
            raise ConfigError(f"model.chat_template_kwargs.{name} = {value!r}: {problem}")


def completion_stop_ids(
    policy: Policy, encoder: PromptEncoder, problems: Sequence[Problem]
) -> tuple[int, ...]:
    """Return the ids of the tokens that end a completion; with a template, the end of a turn is one of them.

    A base model (such as Qwen2.5) may end turns with another token than a text, and would else continue.
    """
    token = end_of_turn_id(policy.tokenizer) if any(map(encoder.applies_template, problems)) else None
    # A token that was added to the tokenizer alone is never sampled.
    end = [] if token is None or token >= policy.rows else [token]
    return tuple(dict.fromkeys([*policy.stop_ids, *end]))


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the token that the chat template writes after an assistant's message; None if it is not one."""
    turns = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception:  # noqa: BLE001 - a template is a program that the model's author wrote
        return None
    _, match, after = text.rpartition(_ANSWER)
    tokens: dict[str, int] = tokenizer.get_added_vocab()
    following = [name for name in tokens if name.strip() and after.lstrip().startswith(name.strip())]
    return tokens[max(following, key=len)] if match and following else None


def drop_long_prompts(
    encoder: PromptEncoder, label: str, problems: Sequence[Problem], config: RunConfig, notes: list[str]
) -> Sequence[Problem]:
    """Return the problems whose prompts are not empty and not too long; add lines on them to `notes`.

    Raises:
        ConfigError: there are no problems, all prompts are too long, or two questions have the same prompt.
    """
    limit = config.sampling.max_prompt_tokens
    if not problems:
        raise ConfigError(f"'{label}' has no problems")
    prompts = encoder.encode(problems)
    notes += _check_questions(encoder, label, problems, prompts)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    fitting = [problem for problem, length in zip(problems, lengths, strict=True) if 1 <= length <= limit]
    if not fitting:
        longest = max(lengths)
        template = _template_tokens(encoder, problems[lengths.index(longest)], config.task)
        share = "" if template is None else f", of which the template takes {template:,}"
        raise ConfigError(
            f"sampling.max_prompt_tokens = {limit}: all {len(problems):,} prompts of '{label}' are longer: "
            f"{min(lengths):,} to {longest:,} tokens{share}; --set sampling.max_prompt_tokens={longest} "
            "keeps all of them"
        )
    if len(fitting) < len(problems):
        notes.append(
            f"{label}: {len(problems) - len(fitting):,} of {len(problems):,} problems left out, their prompts have "
            f"more than {limit:,} tokens (sampling.max_prompt_tokens)"
        )
    return fitting


def _check_questions(
    encoder: PromptEncoder, label: str, problems: Sequence[Problem], prompts: Sequence[EncodedPrompt]
) -> list[str]:
    """Return warnings of texts that are not in their prompts or that the model reads as special tokens."""
    warnings, missing, first = list[str](), list[str](), dict[tuple[int, ...], tuple[str, str]]()
    sample, all_texts = problems[:COMPARED], [_texts(problem) for problem in problems[:COMPARED]]
    decoded = ["".join(text for text, _ in encoder.pieces(item.token_ids)) for item in prompts[:COMPARED]]
    # Tokenizers may change spaces and forms of characters.
    compared = (*decoded, *chain.from_iterable(all_texts))
    plain = ["".join(compatibility_form(text).split()) for text in compared]
    read, written = plain[: len(decoded)], iter(plain[len(decoded) :])
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
    # What the template of the task writes is meant.
    matches = ((item.id, special.search(item.question or "\n".join(_texts(item)))) for item in chats)
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
