"""Settings of the tasks (`task:` in a config file): one class a task, chosen by `name`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bandpo_cli.config.base import Section

TASKS = ("countdown",)


class CountdownTask(Section):
    """Reach a target with +, − and *, using each of the given numbers exactly once.

    The sizes are bounded so that all problems can be enumerated in a few seconds, without a table of them.
    """

    name: Literal["countdown"] = "countdown"
    numbers: int = Field(4, ge=2, le=5, description="how many numbers a problem gives")
    max_number: int = Field(9, ge=2, le=10, description="numbers are drawn from 1 to this")
    max_target: int = Field(99, ge=0, le=999, description="targets run from 0 to this")
    heldout_fraction: float = Field(
        0.1,
        gt=0,
        le=0.1,
        description="share of the problems kept for evaluation; no more than 0.1, because the embedded model "
        "was warm-started on the other nine tenths",
    )


TaskConfig = CountdownTask  # a second task makes it Annotated[A | B, Field(discriminator="name")]
