"""Calculator task: the answer to `37*58+9=` is 2155, which a model of any size can get from its tool.

There is a problem for every pair of numbers of two digits from 11. A hash of the pair decides on the third number and
on whether the problem is held out, as in the countdown task.
"""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import product

from bandpo_cli.config.task import CalculatorTask
from bandpo_cli.types import Message, Problem

FACTORS = range(11, 100)
"""The factors of a product."""
HELDOUT = 0.1
"""Share of the problems held out for evaluation."""


class Calculator:
    """The 7,921 problems, with a fixed split into training and held-out problems."""

    name = "calculator"

    def __init__(self, config: CalculatorTask) -> None:
        ranked = sorted(_problems(), key=lambda pair: pair[0])
        split = sum(rank < HELDOUT for rank, _ in ranked)
        problems = [problem for _, problem in ranked]
        self._heldout, self._train = problems[:split], problems[split:]

    def train_problems(self) -> list[Problem]:
        """Return the training problems."""
        return self._train

    def heldout_sets(self) -> dict[str, list[Problem]]:
        """Return the held-out problems under one label."""
        return {self.name: self._heldout}

    def notes(self) -> list[str]:
        """Return no lines: no file is read, and no problem is dropped."""
        return []


def _problems() -> Iterator[tuple[float, Problem]]:
    """Yield the problems with their hashes in [0, 1)."""
    for first, second in product(FACTORS, FACTORS):
        digest = blake2b(f"{first}*{second}".encode(), digest_size=8).digest()
        third, is_plus = 1 + digest[6] % 99, digest[7] % 2 == 0
        expression = f"{first}*{second}{'+' if is_plus else '-'}{third}"
        answer = first * second + (third if is_plus else -third)
        prompt = (Message("user", f"{expression}="),)
        problem = Problem(f"calculator/{expression}", prompt, str(answer), "calculator", "gsm8k-flexible")
        yield int.from_bytes(digest[:6]) / 2**48, problem
