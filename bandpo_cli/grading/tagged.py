"""Answers in <answer> tags, as the users of reasoning-gym prompt for them: extraction, first stage of grading, votes.

`grading.reasoning_gym` scores the extracted answers in worker processes.
"""

from __future__ import annotations

from bandpo_cli.types import MALFORMED, Grade, Problem

MAX_ANSWER_CHARS = 20_000
"""Longer answers are malformed. The longest reference with default options, of tower_of_hanoi, has about 4,000."""

_OPEN, _CLOSE = "<answer>", "</answer>"


def tagged_answer(text: str) -> str | None:
    """Return the content of the last <answer>...</answer> pair without surrounding space; None if there is no pair.

    The pairs are those of `reasoning_gym.utils.extract_answer`: from left to right, an opening tag and the first
    closing tag after it. Its regular expression takes quadratic time for many opening tags, this function linear time.
    """
    found, position = None, 0
    while (start := text.find(_OPEN, position)) >= 0:
        start += len(_OPEN)
        end = text.find(_CLOSE, start)
        if end < 0:
            break
        found, position = text[start:end], end + len(_CLOSE)
    return None if found is None else found.strip()


def grade_tagged(problem: Problem, text: str) -> Grade | tuple[str, str, str, str]:
    """Return the arguments of `reasoning_gym.score` for a completion, or `malformed` if it has no answer to score.

    Raises:
        KeyError: The problem was not made by the task reasoning-gym.
    """
    extra = problem.extra
    name, options, entry = (str(extra[field]) for field in ("generator", "options", "entry"))
    answer = tagged_answer(text)
    if answer is None or len(answer) > MAX_ANSWER_CHARS:
        return MALFORMED
    return (name, options, entry, answer)


def vote_tagged(text: str) -> str | None:
    """Return the vote of a completion: its answer with single spaces; None if it has none of a permitted length."""
    answer = tagged_answer(text)
    return None if answer is None or len(answer) > MAX_ANSWER_CHARS else " ".join(answer.split()) or None
