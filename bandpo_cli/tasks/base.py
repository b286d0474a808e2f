"""What a task is: problems to learn from, and sets of problems kept apart. Graders are a room of their own."""

# MERGED: The endless order in which training meets its problems. One integer is all that a resume needs.
from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from bandpo_cli.types import Problem


class Task(Protocol):
    """A source of problems.

    Its sequences are the same on every machine and in every process, and are in an order of which any prefix is a
    fair sample. No evaluation set shares a problem id with the training problems.
    """

    @property
    def name(self) -> str:
        """The name in the config."""

    def train_problems(self) -> Sequence[Problem]:
        """The problems that training may see."""

    def heldout_sets(self) -> Mapping[str, Sequence[Problem]]:
        """Evaluation sets by label, the `<task>` of the metric names `eval/<task>/...`; training never sees them."""

    def notes(self) -> list[str]:
        """What a user should know of the problems that were read: a line each, on counts and on what was left out."""


class ProblemStream:
    """Shuffled epochs without end: position i is a pure function of (problems, seed, i).

    `position` is where `next` goes on; a checkpoint keeps it, and a resumed run sets it.
    """

    def __init__(self, problems: Sequence[Problem], seed: int, position: int = 0) -> None:
        """Raise ValueError when there is no problem to give, or `position` is negative."""
        if not problems:
            raise ValueError("a stream needs at least one problem")
        self._problems = problems
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []
        self.position = position

    @property
    def position(self) -> int:
        """How many problems have been given, all epochs together."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        if position < 0:
            raise ValueError(f"position {position} must not be negative")
        self._position = position

    def next(self, count: int) -> list[Problem]:
        """Return the following `count` problems and move on; raise ValueError if `count` is negative."""
        problems = self.take(self._position, count)
        self._position += count
        return problems

    def take(self, position: int, count: int) -> list[Problem]:
        """Return the problems at `position`, ..., `position + count - 1`, across epochs if need be.

        Raises:
            ValueError: if `position` or `count` is negative.
        """
        if position < 0 or count < 0:
            raise ValueError(f"position {position} and count {count} must not be negative")
        return [self._at(index) for index in range(position, position + count)]

    def _at(self, position: int) -> Problem:
        epoch, offset = divmod(position, len(self._problems))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._permutation(epoch)
        return self._problems[self._order[offset]]

    def _permutation(self, epoch: int) -> list[int]:
        # Python promises the same random() for a seed in every version, and of shuffle() it does not.
        rng = random.Random(f"{self._seed}/{epoch}")
        keys = [rng.random() for _ in self._problems]
        return sorted(range(len(keys)), key=keys.__getitem__)
