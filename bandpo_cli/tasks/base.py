"""What a task is: problems to learn from, and sets of problems kept apart. Graders are a room of their own."""

from __future__ import annotations

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
