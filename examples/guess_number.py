"""An environment: the model guesses a number and reads whether it is higher or lower.

    python examples/guess_number.py                     # writes guess.jsonl
    bandpo train --task guess.jsonl --set task.environment=guess_number:GuessNumber --model ./SmolLM2-135M-Instruct

Run both in examples/, or copy the file to your folder. docs/environments.md has the interface.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path


class GuessNumber:
    """A number from 1 to the highest of the problem; the reward is higher for fewer guesses."""

    def reset(self, problem: Mapping[str, object]) -> Sequence[str]:
        """Return the first message; the number is the same for all completions of the problem."""
        highest = int(str(problem["answer"]))
        self.number = random.Random(str(problem["seed"])).randint(1, highest)
        self.guesses, self.reward = 0, 0.0
        return [f"Guess my number from 1 to {highest}. Answer with a number only."]

    def step(self, message: Mapping[str, str]) -> Sequence[str] | None:
        """Return the answer to a guess; None if it was right."""
        self.guesses += 1
        match = re.search(r"\d+", message["content"])
        if match is None:
            return ["Answer with a number only."]
        if int(match[0]) == self.number:
            self.reward = 1 / self.guesses
            return None
        return ["higher" if int(match[0]) < self.number else "lower"]


if __name__ == "__main__":
    rows = [{"question": f"Game {number}", "answer": "10"} for number in range(500)]
    Path("guess.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
