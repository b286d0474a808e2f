"""The text of a model: stop strings, and tool calls with their limits and their form in a message of the assistant."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from bandpo_cli.errors import first_line

MAX_CALLS = 32  # Calls of a message that are made; a single error answers the others

MAX_CALL_CHARS, MAX_CALL_DEPTH = 1 << 16, 64
"""Characters of a call as JSON, and levels of its lists and objects. Python's json fails at about 1,000 levels."""

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
"""A call in the Hermes format, that of Qwen and others: a JSON object with `name` and `arguments`."""

_BARE_CALL = re.compile(r"\s*(?:```(?:json)?\s*(\{.*\})\s*```|(\{.*\}))\s*", re.DOTALL)
"""A message that is one JSON object, in a fenced block or not: Qwen2.5-Coder leaves out the tags of its template."""


class StopStrings:
    """Texts that end a completion (`sampling.stop`), found in its tokens alone: all engines end at the same token.

    The text has special tokens too, and not the prompt. Its last `tail` tokens decide.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, strings
        self.tail = 4 * max(map(len, strings)) + 8  # a character has at most four tokens
        self._last_characters = {"\ufffd", *(text[-1] for text in strings)}  # or a part of a character
        self._may_end: dict[int, bool] = {}

    def end(self, token_ids: Sequence[int], checked: int = 0) -> int | None:
        """Return the number of tokens up to the first that completes a string, or None; the first `checked` do not."""
        for count in range(checked + 1, len(token_ids) + 1):
            token = token_ids[count - 1]
            if token not in self._may_end:
                # Twice, since some tokenizers write the space before a word only within a text.
                self._may_end[token] = not self._last_characters.isdisjoint(self._text([token, token]))
            if self._may_end[token]:
                text = self._text(token_ids[max(0, count - self.tail) : count])
                if any(string in text for string in self._strings):
                    return count
        return None

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([*token_ids], clean_up_tokenization_spaces=False))


def read_message(
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    prefix: Sequence[int],
    schemas: Sequence[Any],
) -> dict[str, Any]:
    """Return a turn of the model as a message, with its calls where the task has tools (`schemas`).

    A tokenizer with a `response_template` finds the calls itself; `prefix` are all tokens before the turn.
    """
    text = str(tokenizer.decode(list(token_ids), skip_special_tokens=True))
    if not schemas:
        return {"role": "assistant", "content": text}
    if getattr(tokenizer, "response_template", None) is None:
        return parse_calls(text)
    try:
        message = tokenizer.parse_response(list(token_ids), prefix=prefix, tools=schemas)
        calls = [_read_call(call.get("function", call)) for call in message.get("tool_calls") or ()]
        return _message(str(message.get("content") or ""), calls)
    except Exception as error:  # noqa: BLE001 - of the parser of the model's author, on any text
        return _message(text, [_call(None, f"the message is not readable: {first_line(error)}")])


def parse_calls(text: str) -> dict[str, Any]:
    """Return a message of the assistant in the Hermes format, with `tool_calls` if there are any.

    A message without tags that is nothing but the object of a call is a call too. The name of a call that is not
    readable is None, and its arguments are the error.
    """

    def read(call: str) -> dict[str, Any]:
        try:
            return _read_call(json.loads(call))
        except (ValueError, RecursionError) as error:
            return _call(None, f"the call is not JSON: {first_line(error)}")

    calls = [read(match[1]) for match in _CALL.finditer(text)]
    if not calls and '"arguments"' in text and (bare := _BARE_CALL.fullmatch(text)):
        call = read(bare[1] or bare[2])
        return _message("", [call]) if call["function"]["name"] is not None else _message(text, [])
    return _message(_CALL.sub("", text).strip() if calls else text, calls)


def _read_call(call: Any) -> dict[str, Any]:
    """Return a call in the form of a message; its arguments may be JSON in a text."""
    try:
        name, arguments = call["name"], call.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        name = arguments = None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return _call(None, "a call is an object with name, a text, and arguments, an object")
    if _is_deeper(arguments, MAX_CALL_DEPTH):
        return _call(None, f"the lists and objects of a call have at most {MAX_CALL_DEPTH} levels")
    if len(name) + len(json.dumps(arguments, default=str)) > MAX_CALL_CHARS:
        return _call(None, f"a call has at most {MAX_CALL_CHARS:,} characters")
    return _call(name, dict(arguments))


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether a value of JSON has more than `levels` levels of lists and objects."""
    if not isinstance(value, (Mapping, list, tuple)):
        return False
    items = value.values() if isinstance(value, Mapping) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in items)


def _call(name: str | None, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _message(content: str, calls: Sequence[Any]) -> dict[str, Any]:
    if len(calls) > MAX_CALLS:
        error = f"a message has at most {MAX_CALLS} calls; the other {len(calls) - MAX_CALLS:,} were not made"
        calls = [*calls[:MAX_CALLS], _call(None, error)]
    return {"role": "assistant", "content": content, **({"tool_calls": [*calls]} if calls else {})}
