"""Countdown: "1 3 7 8=28:" is answered with an expression that uses each number once, as "3*7+8-1".

Every problem that the settings allow is enumerated, in the canonical form of sorted numbers, and a hash of
that form alone says whether it is held out. So a problem is on the same side in every run, on every machine,
under all other settings, and no training (a warm start's included) can meet a held-out one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from itertools import combinations, combinations_with_replacement
from math import prod

from bandpo_cli.config.task import CountdownTask
from bandpo_cli.errors import ConfigError
from bandpo_cli.types import Problem

Numbers = tuple[int, ...]


class Countdown:
    """All problems that the settings allow, split for good into training and held-out ones."""

    name = "countdown"

    def __init__(self, config: CountdownTask) -> None:
        """Enumerate the problems; raise ConfigError when the settings leave one side without any."""
        ranked = sorted(
            (_hash_fraction(key), numbers, target) for key, numbers, target in _solvable_problems(config)
        )
        split = sum(rank < config.heldout_fraction for rank, _, _ in ranked)
        problems = [_problem(numbers, target) for _, numbers, target in ranked]
        self._heldout, self._train = problems[:split], problems[split:]
        if not self._heldout or not self._train:
            raise ConfigError(
                f"task: numbers={config.numbers}, max_number={config.max_number}, "
                f"min_target={config.min_target}, max_target={config.max_target} "
                f"allow {len(problems)} problems, of which "
                f"heldout_fraction={config.heldout_fraction} holds out {split}; "
                "neither training nor evaluation may be left without any"
            )

    def train_problems(self) -> list[Problem]:
        """The problems to learn from."""
        return self._train

    def heldout_sets(self) -> dict[str, list[Problem]]:
        """The problems kept apart, under one label; those of a smaller `heldout_fraction` come first."""
        return {self.name: self._heldout}

    def notes(self) -> list[str]:
        """Nothing is read, and nothing left out."""
        return []


def _problem(numbers: Numbers, target: int) -> Problem:
    key = _key(numbers, target)
    given = key.partition("=")[0]
    return Problem(
        id=f"countdown/{key}",
        prompt=f"{key}:",
        answer=str(target),
        source="countdown",
        grader="countdown",
        extra={"numbers": given},
    )


def _key(numbers: Numbers, target: int) -> str:
    return f"{' '.join(map(str, numbers))}={target}"


def _hash_fraction(key: str) -> float:
    """A number in [0, 1) that is the same everywhere, as Python's own hash() is not."""
    return int.from_bytes(blake2b(key.encode(), digest_size=6).digest()) / 2**48


def _solvable_problems(config: CountdownTask) -> Iterator[tuple[str, Numbers, int]]:
    """All problems with an answer that needs no parentheses, which keeps answers to 2·numbers − 1 symbols."""
    for numbers in combinations_with_replacement(range(1, config.max_number + 1), config.numbers):
        for target in sorted({value for value, has_plus in _signed_sums(numbers) if has_plus}):
            if config.min_target <= target <= config.max_target:
                yield _key(numbers, target), numbers, target


@cache
def _signed_sums(numbers: Numbers) -> frozenset[tuple[int, bool]]:
    """All values of ±product ±product ..., each number in one product, and whether some product has a plus.

    Without parentheses an expression is such a sum. Its first product has no sign, so one plus is needed,
    and then the order is free. The product with the first number is chosen here, recursion does the rest.
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
