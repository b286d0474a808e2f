"""How far each run of a sweep has come, read from the run folders alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from bandpo_cli.errors import UserError
from bandpo_cli.sweeps.folder import SweepFolder
from bandpo_cli.tracking.run_folder import read_metrics

Status = Literal["waiting", "running", "whole", "failed", "stopped"]


@dataclass(frozen=True)
class RunState:
    """A run at a glance.

    Attributes:
        step, steps: the last that is whole, and how many there will be.
        accuracy, entropy: of that step; accuracy held-out where there was an evaluation, else in training.
        seconds_left: by the mean of its steps so far; None before the first.
        evaluations: held-out accuracy by step, the mean over evaluation sets.
    """

    status: Status
    step: int
    steps: int
    accuracy: float | None = None
    entropy: float | None = None
    seconds_left: float | None = None
    evaluations: Mapping[int, float] = field(default_factory=dict)


def read_state(folder: SweepFolder, name: str, steps: int, status: Status) -> RunState:
    """Read the state of a run whose status the caller knows."""
    try:
        records = read_metrics(folder.run_path(name) / "metrics.jsonl")
    except UserError:  # a damaged record: what the run is like now cannot be told
        records = []
    if not records:
        return RunState(status, 0, steps)
    trained = [record for record in records if record["step"] > 0]
    step = records[-1]["step"]
    evaluations = {record["step"]: fmean(means) for record in records if (means := _held_out(record))}
    in_training = trained[-1].get("train/accuracy") if trained else None
    accuracy = evaluations[max(evaluations)] if evaluations else in_training
    seconds = sum(record.get("time/step", 0.0) for record in trained)
    return RunState(
        status=status,
        step=step,
        steps=steps,
        accuracy=accuracy,
        entropy=trained[-1].get("train/entropy") if trained else None,
        seconds_left=seconds / len(trained) * (steps - step) if trained else None,
        evaluations=evaluations,
    )


def _held_out(record: Mapping[str, Any]) -> list[float]:
    return [
        value
        for key, value in record.items()
        if key.startswith("eval/") and "/mean_at_" in key and isinstance(value, float)
    ]
