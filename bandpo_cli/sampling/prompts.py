"""From a problem's prompt to the tokens that the model is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from bandpo_cli.errors import ConfigError
from bandpo_cli.types import Message, Problem


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model gets it."""

    text: str
    token_ids: tuple[int, ...]


class PromptEncoder:
    """Turns prompts into tokens; the same for training and evaluation, so that their templates cannot differ."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompts: str = "auto") -> None:
        """Choose how chat messages become text.

        Args:
            prompts: `chat` applies the tokenizer's chat template, `raw` joins the messages by blank lines, `auto`
                takes the template where the tokenizer has one.

        Raises:
            ConfigError: `chat` is asked for and the tokenizer has no chat template.
        """
        has_template = getattr(tokenizer, "chat_template", None) is not None
        if prompts == "chat" and not has_template:
            raise ConfigError(
                "model.prompts = 'chat': the model's tokenizer has no chat template; use model.prompts=raw"
            )
        self.tokenizer = tokenizer
        self._chat = has_template and prompts != "raw"

    def encode(self, problems_P: Sequence[Problem]) -> list[EncodedPrompt]:
        """Return the prompts of `problems_P` as text and tokens.

        Raises:
            ConfigError: the chat template refuses the messages (some know no system role, say).
        """
        # Plain text is the task's own format; a chat template writes its special tokens itself. Only messages that
        # are joined as they are get what the tokenizer puts before a text (a beginning-of-sequence token).
        texts = [self._text(problem) for problem in problems_P]
        joined = [not self._chat and not isinstance(problem.prompt, str) for problem in problems_P]
        ids: list[tuple[int, ...]] = [()] * len(texts)
        for special in (False, True):
            places = [place for place, has in enumerate(joined) if has is special]
            if places:
                encoded = self.tokenizer([texts[place] for place in places], add_special_tokens=special)
                for place, tokens in zip(places, encoded["input_ids"], strict=True):
                    ids[place] = tuple(tokens)
        return [EncodedPrompt(text, tokens) for text, tokens in zip(texts, ids, strict=True)]

    def fitting(self, problems_P: Sequence[Problem], max_tokens: int) -> list[Problem]:
        """Return the problems whose prompts have 1 to `max_tokens` tokens, in their order."""
        encoded = self.encode(problems_P)
        return [
            problem
            for problem, prompt in zip(problems_P, encoded, strict=True)
            if 1 <= len(prompt.token_ids) <= max_tokens
        ]

    def _text(self, problem: Problem) -> str:
        if isinstance(problem.prompt, str):
            return problem.prompt
        if not self._chat:
            return "\n\n".join(message.content for message in problem.prompt)
        turns = [_as_dict(message) for message in problem.prompt]
        try:
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # noqa: BLE001 - a template is a program, of the model's maker
            raise ConfigError(
                f"problem {problem.id}: the model's chat template refuses its messages ({error!s:.300}); "
                "change them or use model.prompts=raw"
            ) from None
        return str(text)


def _as_dict(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}
