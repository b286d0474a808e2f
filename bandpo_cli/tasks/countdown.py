"""Countdown task: the answer to "1 3 7 8=28:" is an expression that uses each number once, as "3*7+8-1".

All problems that the settings allow are enumerated, in the canonical form of sorted numbers. A hash of this form alone
decides whether a problem is held out, so that it is on the same side in every run, on every machine and under all other
settings, and no training (including a warm start) can use a held-out problem.
"""

from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from itertools import combinations, combinations_with_replacement
from math import prod

from bandpo_cli.config.task import CountdownTask
from bandpo_cli.errors import ConfigError
from bandpo_cli.types import Problem


class Countdown:
    """All problems that the settings allow, with a fixed split into training and held-out problems."""

    name = "countdown"

    def __init__(self, config: CountdownTask) -> None:
        """Enumerate the problems; raise ConfigError if the settings leave no training or no held-out problem."""
        hashes = {key: blake2b(key.encode(), digest_size=6).digest() for key in _solvable_problems(config)}
        ranked = sorted((int.from_bytes(digest) / 2**48, key) for key, digest in hashes.items())
        split = sum(rank < config.heldout_fraction for rank, _ in ranked)
        problems = []
        for _, key in ranked:
            numbers, _, target = key.partition("=")
            extra = {"numbers": numbers}
            problems.append(Problem(f"countdown/{key}", f"{key}:", target, "countdown", "countdown", extra))
        self._heldout, self._train = problems[:split], problems[split:]
        if not self._heldout or not self._train:
            raise ConfigError(
                f"task: numbers={config.numbers}, max_number={config.max_number}, min_target={config.min_target}, "
                f"max_target={config.max_target} allow {len(problems)} problems, of which heldout_fraction="
                f"{config.heldout_fraction} holds out {split}; training and evaluation need at least one each"
            )

    def train_problems(self) -> list[Problem]:
        """Return the training problems."""
        return self._train

    def heldout_sets(self) -> dict[str, list[Problem]]:
        """Return the held-out problems under one label; those of a smaller `heldout_fraction` come first."""
        return {self.name: self._heldout}

    def notes(self) -> list[str]:
        """Return no lines: no file is read, and no problem is dropped."""
        return []


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
