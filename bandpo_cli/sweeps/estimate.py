"""Estimates of a sweep: its time, from finished runs of the same shape or from a short trial, and its disk space."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from heapq import heapreplace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from bandpo_cli.config.layers import CHOSEN_AT_START, flatten, read_yaml, to_yaml
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import UserError
from bandpo_cli.paths import MAX_CONFIG_BYTES, given_path, path_exists, read_json_object, user_path
from bandpo_cli.registries import BUNDLED_MODELS
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.run_record import SUMMARY_FILE, read_summary
from bandpo_cli.storage.sweep_folder import find_runs
from bandpo_cli.sweeps.scheduler import TRAIN, rank_flags

if TYPE_CHECKING:
    from bandpo_cli.sweeps.sweep_run import SweepInfo

TRIAL_STEPS = 3
START_S = 8.0
"""Seconds of a run outside its training time: imports and loading before it, plots and MLflow after it."""

_MAX_RUNS = 5  # finished runs of which the median is taken

_WITHOUT_CHECK = ("seed", "steps", "bounds", "checkpoint", "stop")
"""Settings and sections that a dry run does not check beyond the plan of the sweep, as is `optim.lr`."""

_SHAPE = ("model", "task", "sampling", "evaluation", "objective")
"""Sections of the settings that the time of a run depends on, besides `optim.updates`."""


def total_seconds(seconds: Sequence[float], jobs: int) -> float:
    """Return the total time of runs of these lengths in `jobs` slots, where each free slot starts the next run."""
    slots = [0.0] * max(1, jobs)
    for length in seconds:
        heapreplace(slots, slots[0] + length)
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
        with suppress(Exception):  # of a run that is incomplete, damaged or from another version
            summary = read_summary(path)
            if summary is None or summary.status != "FINISHED":
                continue
            earlier = read_yaml(path / "config.yaml", "config")
            environment = read_json_object(path / "env.json", max_bytes=MAX_CONFIG_BYTES)
            hardware = environment["hardware"]
            is_as_fast = hardware["gpus"] or hardware["torch_threads"] == threads
            has_ranks = environment.get("ranks", 1) == ranks
            if has_ranks and is_as_fast and _shape(earlier, earlier) == _shape(own, earlier):
                trained = summary.content["time/train_s"] / summary.content["steps"] * config.steps
                seconds_by_time.append(((path / SUMMARY_FILE).stat().st_mtime, START_S + trained))
    latest = [seconds for _, seconds in sorted(seconds_by_time)[-_MAX_RUNS:]]
    return median(latest) if latest else None


def seconds_from_trial(config: RunConfig, variables: Mapping[str, str], ranks: int = 1) -> float:
    """Return the seconds of a run, extrapolated from a trial of `TRIAL_STEPS` steps in a temporary folder.

    The trial gets only the environment `variables`. Raises UserError with its last line of output if it fails.
    """
    steps = min(TRIAL_STEPS, config.steps)
    without = {"mlflow": False, "tensorboard": False, "trackers": (), "callbacks": ()}
    tracking = config.tracking.model_copy(update=without)
    short = config.model_copy(update={"steps": steps, "tracking": tracking})
    with tempfile.TemporaryDirectory(prefix="bandpo-trial-") as scratch:
        start = time.perf_counter()
        if error := _execute(short, scratch, rank_flags(ranks), variables):
            raise UserError(f"a trial of {steps} steps failed, {error}")
        wall = time.perf_counter() - start
        records = RunFolder(Path(scratch) / "t").read_metrics()
    evaluating = fmean([record["time/eval"] for record in records if "time/eval" in record] or [0.0])
    training = [line["time/step"] - line.get("time/eval", 0.0) for line in records if line["step"] > 0]
    # The first step includes the warm-up of caches; leave it out where there are others.
    step = median(training[1:] or training)
    count = 1 + -(-config.steps // config.evaluation.every) if config.evaluation.every else 0
    start_and_end = wall - sum(record["time/step"] for record in records)
    return float(start_and_end + config.steps * step + count * evaluating)


def _execute(
    config: RunConfig, scratch: str, words: Sequence[str], variables: Mapping[str, str]
) -> str | None:
    """Execute `bandpo train` with these settings as the run `t` in a folder; return its error, None without."""
    plan = Path(scratch) / "trial.yaml"
    plan.write_text(to_yaml(config), encoding="utf-8")
    command = [*TRAIN, "--config", str(plan), "--name", "t", "--runs-dir", scratch, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(variables))
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else None


def check_starts(info: SweepInfo, fork: str | None) -> None:
    """Raise UserError if a dry run refuses a pending run; runs that differ only in `_WITHOUT_CHECK` share one."""
    checked = set[str]()
    for run in info.pending:
        config = info.configs[run.name]
        kept = {key: value for key, value in vars(config).items() if key not in _WITHOUT_CHECK}
        key = repr({**kept, "optim": config.optim.model_copy(update={"lr": 0.0})})
        if key in checked:
            continue
        checked.add(key)
        words = ["--dry-run", *rank_flags(info.ranks), *([] if fork is None else ["--fork", fork])]
        with tempfile.TemporaryDirectory(prefix="bandpo-trial-") as scratch:
            if error := _execute(config, scratch, words, os.environ):
                raise UserError(f"run {run.name}: {error.removeprefix('error: ')}")


def _shape(config: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the time of a run depends on.

    The values of `CHOSEN_AT_START` that an earlier run has `chosen` replace those that are `auto` or null.
    """
    settings, values = flatten({section: config[section] for section in _SHAPE}), flatten(chosen)
    replaced = {key: values[key] for key in CHOSEN_AT_START if settings.get(key, "") in ("auto", None)}
    return settings | replaced | {"optim.updates": config["optim"]["updates"]}


def estimate_time(
    info: SweepInfo, runs_dir: Path | str = "runs", on_trial: Callable[[], None] = lambda: None
) -> tuple[float, float, str] | None:
    """Estimate the time of the pending runs from earlier runs; without any, from a trial of the bundled model.

    Returns seconds in total, seconds of the first run and the method; None if no earlier run is similar. `on_trial` is
    called before the trial, three training steps in a process.
    """
    first = info.configs[info.pending[0].name]
    method = "by earlier runs"
    seconds = seconds_from_earlier_runs(first, given_path(runs_dir), info.threads, info.ranks)
    if seconds is None:
        if first.model.path not in BUNDLED_MODELS:
            return None
        on_trial()
        variables = {**os.environ, "OMP_NUM_THREADS": str(info.threads)}
        seconds = seconds_from_trial(first, variables, info.ranks)
        method = "by a trial of three steps, without other runs on the machine"
    steps = (info.configs[run.name].steps - info.forked_at for run in info.pending)
    lengths = [seconds / first.steps * count for count in steps]
    return total_seconds(lengths, info.slots), lengths[0], method


def estimate_disk_space(info: SweepInfo, runs_dir: Path) -> tuple[int, int]:
    """Estimate the bytes of the checkpoints that the pending runs keep, and return them with the free bytes.

    A weight takes 12 bytes in a checkpoint, with the moments of AdamW; in 16 bits 14, with a master. Models on the hub
    count as 0, and so do runs with LoRA, whose checkpoints are small.
    """
    needed = 0
    for config in (info.configs[run.name] for run in info.pending):
        settings, path = config.checkpoint, config.model.path
        if config.model.lora is None and path not in BUNDLED_MODELS:
            written = 1 + (config.steps - info.forked_at - 1) // (settings.every or config.steps)
            kept = written if settings.keep_last is None else settings.keep_last + settings.keep_best
            bytes_per_weight = 14 if config.model.dtype in ("bfloat16", "float16") else 12
            needed += bytes_per_weight * min(kept, written) * _count_weights(user_path(path))
    existing = next(folder for folder in (runs_dir, *runs_dir.absolute().parents) if folder.exists())
    return needed, shutil.disk_usage(existing).free


@cache
def _count_weights(folder: Path) -> int:
    """Return the number of weights in a model folder; 0 if its files are not there or damaged."""
    from safetensors import SafetensorError, safe_open

    count = 0
    with suppress(SafetensorError, OSError):
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "np") as weights:
                names = weights.keys()
                count += sum(math.prod(weights.get_slice(name).get_shape()) for name in names)
    return count
