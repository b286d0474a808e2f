"""The endless order in which training meets its problems. One integer is all that a resume needs."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bandpo_cli.types import Problem


class ProblemStream:
    """Shuffled epochs without end: position i is a pure function of (problems, seed, i)."""

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        """Raise ValueError when there is no problem to give."""
        if not problems:
            raise ValueError("a stream needs at least one problem")
        self._problems = problems
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

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
