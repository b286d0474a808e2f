"""Sums of one and of two steps, as problems for a small pretrained model.

    python examples/sums.py                               # writes sums.jsonl and additions.jsonl
    bandpo train -c configs/sums.yaml --model ./SmolLM2-135M-Instruct
    bandpo train -c configs/additions.yaml --model ./SmolLM2-135M-Instruct

The prompts of `configs/sums.yaml` and `configs/additions.yaml` have solved problems. docs/results/pretrained.md and
docs/results/wide_ratios.md have the plans of two experiments.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path


def problems() -> list[dict[str, str]]:
    """Return all 1,984 problems a + b - c with a from 10 to 40, b and c from 2 to 9."""
    values = product(range(10, 41), range(2, 10), range(2, 10))
    return [{"question": f"{a} + {b} - {c}", "answer": str(a + b - c)} for a, b, c in values]


def additions() -> list[dict[str, str]]:
    """Return all 8,100 problems a + b with a and b from 10 to 99."""
    values = product(range(10, 100), repeat=2)
    return [{"question": f"{a} + {b}", "answer": str(a + b)} for a, b in values]


if __name__ == "__main__":
    for name, rows in (("sums.jsonl", problems()), ("additions.jsonl", additions())):
        Path(name).write_text("".join(json.dumps(problem) + "\n" for problem in rows), encoding="utf-8")
