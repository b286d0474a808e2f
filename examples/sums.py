"""Sums of two steps, as problems for a small pretrained model.

    python examples/sums.py                               # writes sums.jsonl
    bandpo train -c configs/sums.yaml --model ./SmolLM2-135M-Instruct

The prompt of `configs/sums.yaml` has three solved problems. docs/results/pretrained.md has the plan of an experiment.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path


def problems() -> list[dict[str, str]]:
    """Return all 1,984 problems a + b - c with a from 10 to 40, b and c from 2 to 9."""
    values = product(range(10, 41), range(2, 10), range(2, 10))
    return [{"question": f"{a} + {b} - {c}", "answer": str(a + b - c)} for a, b, c in values]


if __name__ == "__main__":
    Path("sums.jsonl").write_text(
        "".join(json.dumps(problem) + "\n" for problem in problems()), encoding="utf-8"
    )
