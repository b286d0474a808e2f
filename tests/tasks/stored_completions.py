"""Stored completions for tests: rows, files and mutations of both."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.errors import ConfigError
from bandpo_cli.storage.tables import EvalRow
from bandpo_cli.tasks.completions import read_completions

ROW = EvalRow(
    task="aime24", problem_id="p1", question="1+1?", prompt="1+1?", reference="2", grader="number",
    extra='{"level": 3}', text="Answer: 2", answer="2", reward=1.0, accuracy=1.0, verdict="correct", length=5,
    finish_reason="stop",
    logprob_sum=-1.25,
)  # fmt: skip
"""A row of the table of an evaluation."""

FOREIGN = [
    {"question": "1+1?", "answer": "2", "completions": ["Answer: 2", "\\boxed{3}"], "data_source": "x"},
    {"question": "2+2?", "answer": 4, "completions": "#### 4"},
]
"""Rows in the layout with a question, an answer and completions."""


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def error_of(path: Path, grader: str | None = None) -> str:
    """Return the message of the expected ConfigError, which must be short."""
    with pytest.raises(ConfigError) as caught:
        read_completions(path, grader)
    message = str(caught.value)
    assert len(message) < 600 + len(str(path))
    return message


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def mutations(content: bytes, seed: int, count: int) -> Iterator[bytes]:
    """Yield `content` with flipped bits, truncated, and with pieces repeated, deleted or overwritten."""
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8, 64))):
            if not data:
                break
            start = rng.randrange(len(data))
            stop = min(len(data), start + rng.choice((1, 2, 8, 200)))
            kind = rng.randrange(6)
            if kind == 0:
                data[start] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[start:] = b""
            elif kind == 2:
                data[start:start] = data[start:stop]
            elif kind == 3:
                del data[start:stop]
            elif kind == 4:
                data[start:stop] = rng.randbytes(stop - start)
            else:
                data[start:stop] = bytes(stop - start)
        yield bytes(data)
