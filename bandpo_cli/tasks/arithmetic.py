"""Tasks of generated arithmetic: `countdown` and `calculator`.

All problems that the settings allow are enumerated. A hash of a problem alone decides whether it is held out, so that
it is on the same side in every run, on every machine and under all other settings, and no training (including a warm
start) can use a held-out problem.
"""

from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from itertools import combinations, combinations_with_replacement, product
from math import prod

from bandpo_cli.config.task import CalculatorTask, CountdownTask
from bandpo_cli.errors import ConfigError
from bandpo_cli.types import Message, Problem

CALCULATOR_FACTORS = range(11, 100)
"""The factors of a product in the task `calculator`."""
CALCULATOR_HELDOUT = 0.1
"""Share of the problems of `calculator` that are held out."""


class ArithmeticTask:
    """Generated problems, with a fixed split into training and held-out problems."""

    def __init__(self, name: str, ranked: list[tuple[float, Problem]], heldout_fraction: float) -> None:
        """Hold out the problems with a hash below `heldout_fraction`; `ranked` has the hashes in [0, 1)."""
        self.name = name
        ranked = sorted(ranked, key=lambda pair: (pair[0], pair[1].id))
        split = sum(rank < heldout_fraction for rank, _ in ranked)
        problems = [problem for _, problem in ranked]
        self._heldout, self._train = problems[:split], problems[split:]

    def train_problems(self) -> list[Problem]:
        """Return the training problems."""
        return self._train

    def heldout_sets(self) -> dict[str, list[Problem]]:
        """Return the held-out problems under one label; those of a smaller `heldout_fraction` come first."""
        return {self.name: self._heldout}

    def notes(self) -> list[str]:
        """Return no lines: no file is read, and no problem is dropped."""
        return []


def countdown(config: CountdownTask) -> ArithmeticTask:
    """Return the task whose answer to "1 3 7 8=28:" is an expression that uses each number once, as "3*7+8-1".

    Raise ConfigError if the settings leave no training or no held-out problem.
    """
    ranked = []
    for key in _solvable_problems(config):
        numbers, _, target = key.partition("=")
        extra = {"numbers": numbers}
        problem = Problem(f"countdown/{key}", f"{key}:", target, "countdown", "countdown", extra)
        digest = blake2b(key.encode(), digest_size=6).digest()
        ranked.append((int.from_bytes(digest) / 2**48, problem))
    task = ArithmeticTask("countdown", ranked, config.heldout_fraction)
    heldout = task.heldout_sets()["countdown"]
    if not heldout or not task.train_problems():
        raise ConfigError(
            f"task: numbers={config.numbers}, max_number={config.max_number}, min_target={config.min_target}, "
            f"max_target={config.max_target} allow {len(ranked)} problems, of which heldout_fraction="
            f"{config.heldout_fraction} holds out {len(heldout)}; training and evaluation need at least one each"
        )
    return task


def calculator(config: CalculatorTask) -> ArithmeticTask:
    """Return the task whose answer to `37*58+9=` is 2155, which a model of any size can get from its tool.

    There is a problem for every pair of factors. The hash of the pair also decides on the third number.
    """
    ranked = []
    for first, second in product(CALCULATOR_FACTORS, CALCULATOR_FACTORS):
        digest = blake2b(f"{first}*{second}".encode(), digest_size=8).digest()
        third, is_plus = 1 + digest[6] % 99, digest[7] % 2 == 0
        expression = f"{first}*{second}{'+' if is_plus else '-'}{third}"
        answer = first * second + (third if is_plus else -third)
        prompt = (Message("user", f"{expression}="),)
        problem = Problem(f"calculator/{expression}", prompt, str(answer), "calculator", "gsm8k-flexible")
        ranked.append((int.from_bytes(digest[:6]) / 2**48, problem))
    return ArithmeticTask("calculator", ranked, CALCULATOR_HELDOUT)


def _solvable_problems(config: CountdownTask) -> Iterator[str]:
    """Yield "1 3 7 8=28" and such, all with an answer without parentheses, which has 2·numbers − 1 symbols."""
    for numbers in combinations_with_replacement(range(1, config.max_number + 1), config.numbers):
        for target in sorted({value for value, has_plus in _signed_sums(numbers) if has_plus}):
            if config.min_target <= target <= config.max_target:
                yield f"{' '.join(map(str, numbers))}={target}"


@cache
def _signed_sums(numbers: tuple[int, ...]) -> frozenset[tuple[int, bool]]:
    """Return all values of ±product ±product ..., each number in one product, and whether a product has a plus.

    An expression without parentheses is such a sum with at least one plus, because its first product has no sign. The
    function chooses the product with the first number, and recursion does the rest.
    """
    if not numbers:
        return frozenset({(0, False)})
    first, others = numbers[0], range(1, len(numbers))
    sums = set()
    for size in range(len(numbers)):
        for chosen in combinations(others, size):
            term = first * prod(numbers[i] for i in chosen)
            rest = tuple(numbers[i] for i in others if i not in chosen)
            for value, has_plus in _signed_sums(rest):
                sums.add((value + term, True))
                sums.add((value - term, has_plus))
    return frozenset(sums)
