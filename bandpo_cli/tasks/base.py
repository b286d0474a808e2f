"""What a task is: problems to learn from, problems kept apart, and a verdict on any text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bandpo_cli.types import Grade, Problem


class Task(Protocol):
    """A source of problems with its grader.

    Both sequences are the same on every machine and in every process, share no problem id, and are in an
    order of which any prefix is a fair sample.
    """

    @property
    def name(self) -> str:
        """The name in the config; also the `<task>` of the metric names `eval/<task>/...`."""

    def train_problems(self) -> Sequence[Problem]:
        """The problems that training may see."""

    def heldout_problems(self) -> Sequence[Problem]:
        """The problems that training never sees."""

    def grade(self, problem: Problem, text: str) -> Grade:
        """Judge a completion's text, special tokens removed. Never raises, whatever the text is."""
