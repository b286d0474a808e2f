"""A grader and a data set of your own: reverse a word.

    python examples/custom_grader.py                      # writes words.jsonl
    bandpo train --task words.jsonl --grader examples.custom_grader:reversed_word --model ./my-model
    bandpo eval --samples answers.jsonl --grader examples.custom_grader:reversed_word

A data set is a file with a question and an answer in each row; further fields reach the grader as `extra`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

WORDS = ["band", "ratio", "token", "policy", "reward", "sample", "update", "region"]


def reversed_word(text: str, answer: str, extra: Mapping[str, object]) -> dict[str, object]:
    """Grade a completion: 1 for the reference, partial credit for letters in their place.

    Args:
        text: the completion.
        answer: the reference answer.
        extra: the other fields of the row, unused here.

    Returns:
        `score` from 0 to 1, `correct` (what accuracy counts) and a short `verdict`.
    """
    given = text.strip().lower()
    if not given.isalpha():
        return {"score": 0.0, "correct": False, "verdict": "malformed"}
    in_place = sum(a == b for a, b in zip(given, answer, strict=False))
    share = in_place / max(len(given), len(answer))
    return {"score": share, "correct": given == answer, "verdict": "correct" if given == answer else "wrong"}


def write_problems(path: Path) -> Path:
    """Write one problem per word as JSON Lines."""
    rows = [{"question": f"Reverse: {word}", "answer": word[::-1]} for word in WORDS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


if __name__ == "__main__":
    print(write_problems(Path("words.jsonl")))
