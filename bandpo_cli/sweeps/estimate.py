"""Estimate of the time that a sweep takes, from finished runs of the same shape or from a short trial."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bandpo_cli.config.files import read_yaml
from bandpo_cli.config.layers import to_yaml
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import UserError
from bandpo_cli.paths import MAX_CONFIG_BYTES, path_exists
from bandpo_cli.storage.files import read_json_object
from bandpo_cli.storage.run_folder import read_metrics
from bandpo_cli.storage.run_record import SUMMARY_FILE, read_summary
from bandpo_cli.sweeps.folder import find_runs

TRIAL_STEPS = 3
START_S = 8.0
"""Seconds of a run outside its training time: imports and loading before it, plots and MLflow after it."""

_MAX_RUNS = 5
"""Largest number of finished runs of which the median is taken."""

_SHAPE = ("model", "task", "sampling", "evaluation", "objective")
"""Sections of the settings that the time of a run depends on, besides `optim.updates`."""

_READ_ERRORS = (
    UserError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""Errors raised by the files of a run that is incomplete, damaged or from another version."""


def total_seconds(seconds: Sequence[float], jobs: int) -> float:
    """Return the total time of runs of these lengths in `jobs` slots, where each free slot starts the next run."""
    slots = [0.0] * max(1, jobs)
    for length in seconds:
        slots[slots.index(min(slots))] += length
    return max(slots)


def seconds_from_earlier_runs(
    config: RunConfig, runs_dir: Path, threads: int, ranks: int = 1
) -> float | None:
    """Return the median seconds of the latest finished runs in `runs_dir` with the shape of `config`.

    Training time is scaled to the number of steps. None if there is no such run. On a CPU only runs with the same
    number of `threads` count, and always only those with the same number of `ranks`.
    """
    own = config.model_dump(mode="json")
    seconds_by_time = []
    for path in find_runs(runs_dir) if path_exists(runs_dir) else ():
        try:
            summary = read_summary(path)
            if summary is None or summary.status != "FINISHED":
                continue
            earlier = read_yaml(path / "config.yaml", "config")
            environment = read_json_object(path / "env.json", max_bytes=MAX_CONFIG_BYTES)
            hardware = environment["hardware"]
            same_ranks = environment.get("ranks", 1) == ranks
            same_speed = hardware["gpus"] or hardware["torch_threads"] == threads
            if same_ranks and same_speed and _shape(earlier) == _shape(_with_choices_of(own, earlier)):
                trained = summary.content["time/train_s"] / summary.content["steps"] * config.steps
                seconds_by_time.append(((path / SUMMARY_FILE).stat().st_mtime, START_S + trained))
        except _READ_ERRORS:  # damaged runs are skipped
            continue
    latest = [seconds for _, seconds in sorted(seconds_by_time)[-_MAX_RUNS:]]
    return statistics.median(latest) if latest else None


def seconds_from_trial(config: RunConfig, variables: Mapping[str, str], ranks: int = 1) -> float:
    """Return the seconds of a run, extrapolated from a trial of `TRIAL_STEPS` steps in a temporary folder.

    Args:
        variables: all environment variables of the trial.
        ranks: processes of a run.

    Raises:
        UserError: the trial failed; the message contains its last line of output.
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
                *(sys.executable, "-m", "bandpo_cli", "train", "-c", str(plan), "--name", "t"),
                *("--runs-dir", scratch, *rank_flags(ranks)),
            ],
            capture_output=True,
            text=True,
            env=dict(variables),
        )
        wall = time.perf_counter() - start
        if done.returncode:
            line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise UserError(f"a trial of {steps} steps failed, {line}")
        records = read_metrics(Path(scratch) / "t" / "metrics.jsonl")
    evaluations = [record["time/eval"] for record in records if "time/eval" in record]
    training = [
        record["time/step"] - record.get("time/eval", 0.0) for record in records if record["step"] > 0
    ]
    # The first step includes the warm-up of caches; leave it out where there are others.
    step = statistics.median(training[1:] or training)
    evaluation = statistics.mean(evaluations) if evaluations else 0.0
    every = config.evaluation.every
    count = 1 + -(-config.steps // every) if every else 0
    start_and_end = wall - sum(record["time/step"] for record in records)
    return float(start_and_end + config.steps * step + count * evaluation)


def rank_flags(ranks: int) -> list[str]:
    """Return the flags of `bandpo train` for a run with this many processes; none for one."""
    return ["--nproc", str(ranks)] if ranks > 1 else []


def _with_choices_of(config: Mapping[str, Any], earlier: Any) -> Mapping[str, Any]:
    """Return `config` with what an earlier run chose for the dtype `auto` and vLLM's share null, as its file has it."""
    model, sampling = config["model"], config["sampling"]
    if model["dtype"] == "auto":
        model = {**model, "dtype": earlier["model"]["dtype"]}
    if sampling["vllm"]["memory_fraction"] is None:
        share = earlier["sampling"]["vllm"]["memory_fraction"]
        sampling = {**sampling, "vllm": {**sampling["vllm"], "memory_fraction": share}}
    return {**config, "model": model, "sampling": sampling}


def _shape(config: Mapping[str, Any]) -> Any:
    """Return the settings that the time of a run depends on."""
    return [*(config[section] for section in _SHAPE), config["optim"]["updates"]]
