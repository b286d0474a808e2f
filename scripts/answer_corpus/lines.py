"""Answer lines as chat models write them: templates, and the values that fill them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bandpo_cli.grading.answers import same_text
from bandpo_cli.grading.numbers import equal, read_number

VALUE, WORDS, CUT = "<value>", "<words>", "<cut>"
"""Placeholders of a template: the value, the value in words, and the first half of the characters of the value."""
_DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = [
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_SMALL_NUMBERS = [*_DIGITS, *_TEENS]


@dataclass(frozen=True)
class AnswerLine:
    """The end of a completion.

    Attributes:
        template: the text, with one of the placeholders.
        answers: whether a reader finds an answer to the question in the filled text.
    """

    template: str
    answers: bool = True

    def fill(self, value: str) -> str | None:
        """Return the text for this value; None for a value that cannot be written in the words of the template."""
        if WORDS in self.template and value not in map(str, range(len(_SMALL_NUMBERS))):
            return None
        words = _SMALL_NUMBERS[int(value)] if WORDS in self.template else ""
        cut = value[: max(1, len(value) // 2)]
        return self.template.replace(VALUE, value).replace(WORDS, words).replace(CUT, cut)


_ANSWERS = (
    "Answer: <value>",
    "Answer: <value> dollars per day.",
    "Answer: **<value>** dollars",
    "**Answer:** $\\boxed{<value>}$ eggs",
    "Answer: $<value>$ dollars",
    "Answer: $\\$<value>$",
    "Answer: $\\mathbf{<value>}$",
    "Answer: \\(<value>\\) dollars.",
    "\\[ \\boxed{\\text{<value> dollars}} \\]",
    "#### <value>",
    "#### <value> dollars at the farmers' market",
    "Answer: <value> dollars every day at the farmers’ market.",
    "Answer: <value>\n\nExplanation: Nine eggs are sold at $2 each.",
    "Answer: $<value> because 9 * 2 = 18",
    "Answer: <value>, because 9 * 2 = 18",
    "Answer: <value> dollars, since she sells 9 eggs at $2 each",
    "Answer: <value> (nine eggs at $2 each)",
    "Answer: 9 * 2 = <value>",
    "Answer: $x = <value>$",
    "Answer: approximately <value>",
    "Answer: USD <value>",
    "Answer: <value>\nAnswer: <value>",
    "```\nAnswer: <value>\n```",
    "Answer：<value>。",
    "答案：<value>",
    "Answer: <value>元",
    "The answer is <value>.",
    "Final Answer: The final answer is $<value>$. I hope it is correct.",
    "Answer: She makes $<value> every day.",
    "Answer: <value> dollars for 9 eggs",
    "Answer:\n```\n<value>\n```",
    "**Answer:**\n<value>",
    "| Answer: | <value> |",
    "| Answer | <value> |",
    "<answer><value></answer>",
    "Answer: <words>",
)
_UNCLEAR = ("Answer: <value> or 20", "Answer: not <value>", "\\boxed{<value>", "Answer: <cut>", "The ans")

LINES = (
    *map(AnswerLine, _ANSWERS),
    *(AnswerLine(template, answers=False) for template in _UNCLEAR),
)
"""Forms that models write, the instructed one first; the last ones are hedged or truncated, with no clear answer."""


def fill_any(value: str, rng: random.Random, lines: Sequence[AnswerLine] = LINES) -> tuple[int, str]:
    """Return the index of a random line that can state this value, and the line with the value."""
    index = rng.choice([index for index, line in enumerate(lines) if line.fill(value) is not None])
    return index, str(lines[index].fill(value))


def wrong_value(reference: str, others: Sequence[str], rng: random.Random) -> str:
    """Return a value that differs from the reference: a near miss of a whole number, or another reference.

    Raises:
        ValueError: If another reference is needed and all of `others` equal this one.
    """
    if not reference.isdecimal() or rng.random() < 0.5:
        different = (other for other in rng.sample(others, len(others)) if not _same(reference, other))
        if (value := next(different, None)) is None:
            raise ValueError(f"no other answer than {reference!r:.60}: give a file with several answers")
        return value
    whole = int(reference)
    misses = [whole + 1, abs(whole - 1), 10 * whole, -whole]
    return str(rng.choice([miss for miss in misses if miss != whole]))


def _same(first: str, second: str) -> bool:
    one, other = read_number(first), read_number(second)
    return same_text(first, second) if one is None or other is None else equal(one, other)
