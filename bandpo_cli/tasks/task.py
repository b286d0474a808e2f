"""Tasks: the `Task` protocol, the function that builds the task of a config, and the stream of shuffled problems.

A task has training problems and held-out evaluation sets. Graders are in `bandpo_cli.grading`.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

from bandpo_cli.config.task import TaskSettings, check_package
from bandpo_cli.datasets import TASKS, task_kind
from bandpo_cli.registries import load_attribute
from bandpo_cli.types import Problem


class Task(Protocol):
    """A source of training problems and evaluation sets.

    The sequences are the same on every machine and in every process, and any prefix of one is a fair sample of it. No
    evaluation set shares a problem id with the training problems.
    """

    @property
    def name(self) -> str:
        """The name of the task in the config."""

    def train_problems(self) -> Sequence[Problem]:
        """Return the problems to train on."""

    def heldout_sets(self) -> Mapping[str, Sequence[Problem]]:
        """Return the evaluation sets by label, the `<task>` of the metric names `eval/<task>/...`.

        Training never uses these problems.
        """

    def notes(self) -> list[str]:
        """Return lines for the user on the problems read so far: counts, and what was dropped and why."""


def build_task(config: TaskSettings) -> Task:
    """Return the task of these settings; raise ConfigError if they leave it no problems, or its package is missing.

    Files and data sets are read when their problems are first needed, and raise ConfigError then.
    """
    check_package(config.name)
    task: Task = load_attribute(TASKS[task_kind(config.name)].build)(config)
    return task


def text_hash(text: str) -> str:
    """Return a hash of a text (16 hex digits) that is the same on every machine, unlike the built-in hash()."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def hash_order(problems: Iterable[Problem]) -> list[Problem]:
    """Sort by a hash of the id, so that any prefix is a fair sample, independent of the order of the rows."""
    return sorted(problems, key=lambda problem: (text_hash(problem.id), problem.id))


class ProblemStream:
    """An endless stream of shuffled epochs: the problem at position i is a pure function of (problems, seed, i).

    `position`, the number of problems returned so far, over all epochs, is the only state: a checkpoint stores it, and
    a resumed run sets it.
    """

    def __init__(self, problems: Sequence[Problem], seed: int, position: int = 0) -> None:
        """Create a stream; raise ValueError if `problems` is empty."""
        if not problems:
            raise ValueError("a stream needs at least one problem")
        self._problems, self._seed, self.position = problems, seed, position
        self._epoch, self._order = -1, [0]

    def next(self, count: int) -> list[Problem]:
        """Return the next `count` problems and advance the position; raise the same error as `take`."""
        problems = self.take(self.position, count)
        self.position += count
        return problems

    def take(self, position: int, count: int) -> list[Problem]:
        """Return the problems at `position`, ..., `position + count - 1`, which may span epochs.

        Raises:
            ValueError: If `position` or `count` is negative.
        """
        if position < 0 or count < 0:
            raise ValueError(f"position {position} and count {count} must not be negative")
        problems = []
        for index in range(position, position + count):
            epoch, offset = divmod(index, len(self._problems))
            if epoch != self._epoch:
                # Python guarantees the same random() for a seed in every version, but not the same shuffle().
                rng = random.Random(f"{self._seed}/{epoch}")
                keys = [rng.random() for _ in self._problems]
                self._epoch, self._order = epoch, sorted(range(len(keys)), key=keys.__getitem__)
            problems.append(self._problems[self._order[offset]])
        return problems
