"""Defaults that depend on the task: those of the settings classes are made for countdown and a model of a million
parameters, and would be wrong for worked answers of a language model.
"""

from __future__ import annotations

from typing import Any

_COUNTDOWN = "countdown"

_WORKED_ANSWERS: dict[str, Any] = {
    "sampling": {"max_tokens": 1024, "max_prompt_tokens": 1024},
    "optim": {"lr": 1e-6},  # the paper's, and usual for full fine-tuning of 0.5B to 8B parameters
    "evaluation": {"samples": 4, "k": [4]},
}


def task_defaults(task: Any) -> dict[str, Any]:
    """Return a layer of defaults for the `task` section as the user wrote it, whatever it is."""
    name = task.get("name", _COUNTDOWN) if isinstance(task, dict) else _COUNTDOWN
    return {} if name == _COUNTDOWN else _WORKED_ANSWERS
