"""How long a sweep will take, told by runs of the same shape that are there already, or else by a short trial."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bandpo_cli.config.layers import to_yaml
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.yaml_loader import read_yaml
from bandpo_cli.errors import UserError
from bandpo_cli.paths import MAX_CONFIG_BYTES, path_exists
from bandpo_cli.storage.files import read_json_object
from bandpo_cli.storage.run_folder import read_metrics
from bandpo_cli.storage.run_record import read_summary

TRIAL_STEPS = 3
START_S = 8.0
"""Seconds of a run that its record does not tell: imports and loading before it, plots and MLflow after it."""
_LATEST = 5  # finished runs that an estimate is the median of
_SHAPE = ("model", "task", "sampling", "evaluation", "objective")


def total_seconds(seconds: Sequence[float], jobs: int) -> float:
    """Return how long runs of these lengths take when each free one of `jobs` slots takes the next."""
    slots = [0.0] * max(1, jobs)
    for each in seconds:
        slots[slots.index(min(slots))] += each
    return max(slots)


_READ_ERRORS = (
    UserError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""What the files of a run raise that is not whole, or not of this version."""


def seconds_from_earlier_runs(config: RunConfig, runs_dir: Path, threads: int) -> float | None:
    """Return the seconds of a run, by the latest finished runs of its shape in `runs_dir`; None where there is none.

    On a CPU a run with another number of threads says nothing of one with `threads`.
    """
    shape = _shape(config.model_dump(mode="json"))
    found = []
    for path in (
        [*runs_dir.glob("*/summary.json"), *runs_dir.glob("*/*/summary.json")]
        if path_exists(runs_dir)
        else []
    ):
        try:
            summary = read_summary(path.parent)
            there = read_yaml(path.parent / "config.yaml", "config")
            hardware = read_json_object(path.parent / "env.json", max_bytes=MAX_CONFIG_BYTES)["hardware"]
            alike = hardware["gpus"] or hardware["torch_threads"] == threads
            if alike and summary is not None and summary.status == "FINISHED" and _shape(there) == shape:
                trained = summary.content["time/train_s"] / summary.content["steps"] * config.steps
                found.append((path.stat().st_mtime, START_S + trained))
        except _READ_ERRORS:  # an estimate needs no damaged run
            continue
    latest = [seconds for _, seconds in sorted(found)[-_LATEST:]]
    return statistics.median(latest) if latest else None


def seconds_from_trial(config: RunConfig, variables: Mapping[str, str]) -> float:
    """Return the seconds of a run, by a trial of a few steps in a folder of its own.

    Raises:
        UserError: the trial failed, and so would the run; the line says why.
    """
    steps = min(TRIAL_STEPS, config.steps)
    short = config.model_copy(
        update={"steps": steps, "tracking": config.tracking.model_copy(update={"mlflow": False})}
    )
    with tempfile.TemporaryDirectory(prefix="bandpo-trial-") as scratch:
        plan = Path(scratch) / "trial.yaml"
        plan.write_text(to_yaml(short), encoding="utf-8")
        start = time.perf_counter()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "bandpo_cli",
                "train",
                "-c",
                str(plan),
                "--name",
                "t",
                "--runs-dir",
                scratch,
            ],
            capture_output=True,
            text=True,
            env={**variables},
        )
        wall = time.perf_counter() - start
        if done.returncode:
            line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise UserError(f"a trial of {steps} steps failed, {line}")
        records = read_metrics(Path(scratch) / "t" / "metrics.jsonl")
    evaluations = [record["time/eval"] for record in records if "time/eval" in record]
    parts = [record["time/step"] - record.get("time/eval", 0.0) for record in records if record["step"] > 0]
    # The first step warms caches up; where there are others it says nothing of them.
    step = statistics.median(parts[1:] or parts)
    evaluation = statistics.mean(evaluations) if evaluations else 0.0
    every = config.evaluation.every
    count = 1 + -(-config.steps // every) if every else 0
    start_and_end = wall - sum(record["time/step"] for record in records)
    return float(start_and_end + config.steps * step + count * evaluation)


def _shape(config: Mapping[str, Any]) -> Any:
    return [*(config[section] for section in _SHAPE), config["optim"]["updates"]]
