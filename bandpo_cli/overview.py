"""Overviews of runs: the line of `bandpo runs`, and the settings, metrics and files that `bandpo show` prints."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from bandpo_cli.config.hardware import with_dtype
from bandpo_cli.config.layers import flatten, resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.task import DataTask, TaskSettings
from bandpo_cli.errors import UserError
from bandpo_cli.methods import method_name
from bandpo_cli.metric_names import HELDOUT_ACCURACY, HELDOUT_REWARD, has_nonbinary_rewards, heldout_mean
from bandpo_cli.storage.checkpoints import complete_checkpoints
from bandpo_cli.storage.files import file_checksum, is_locked, step_of
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.run_record import (
    StoredRun,
    Summary,
    parent_of,
    read_stored_run,
    read_summary,
)
from bandpo_cli.storage.sweep_folder import find_runs
from bandpo_cli.types import RunStatus

Status = RunStatus | Literal["RUNNING"]
"""How a run ended, or RUNNING while a process writes it."""


@dataclass(frozen=True)
class RunOverview:
    """One run, as `bandpo runs` lists it. The fields, `path` as text, are keys of `bandpo runs --format json`.

    Attributes:
        name: path below the runs folder: a name, or `sweep/name`.
        method: the method with its divergence and radius, as in the names of runs.
        task: the task, or the names of the files of questions that it reads.
        status: how the run ended; None where the folder is damaged.
        heldout: mean of mean@n over the evaluation sets at the last evaluation, in [0, 1].
        heldout_reward: mean over the evaluation sets of the mean reward at the last evaluation.
        accuracy: training accuracy of the last step, in [0, 1].
        reward: mean reward of the last step.
        nonbinary_rewards: whether rewards are not just 1 for a correct answer and 0 for any other.
        entropy: entropy of the policy at the last step, nats per token.
        started_ms: start of the run, milliseconds since 1970.
        parent: of a fork, the checkpoint that it continues, as RUN@STEP.
        error: the exception that ended the run, or the defect of the folder.
        stopped_by: the criterion of `stop` that ended the run before its last step.
    """

    name: str
    path: Path
    method: str = ""
    task: str = ""
    model: str = ""
    seed: int | None = None
    status: Status | None = None
    step: int | None = None
    steps: int | None = None
    heldout: float | None = None
    heldout_reward: float | None = None
    accuracy: float | None = None
    reward: float | None = None
    nonbinary_rewards: bool = False
    entropy: float | None = None
    started_ms: int = 0
    parent: str | None = None
    error: str | None = None
    stopped_by: str | None = None


_OVERVIEW = TypeAdapter(RunOverview)
_NOT_STORED = {"name", "path", "status", "error", "stopped_by"}
"""Fields of an overview that follow from the folder and from other keys of its summary."""

MetricRange = tuple[tuple[int, float], tuple[int, float]]
"""The first and the last value of a metric in a run, each after its step."""


@dataclass(frozen=True)
class RunDescription:
    """What `bandpo show` prints of a run.

    Attributes:
        overview: the line of `bandpo runs`.
        task_settings: the settings of the task by dotted name, without those that are null or empty.
        changed: value and default of the settings that differ from the default of the run's task, model and method.
        metrics: first and last value of each metric.
        checkpoints: steps of the checkpoints that training can resume from.
        seconds: time of all steps, in seconds.
    """

    overview: RunOverview
    config: RunConfig
    task_settings: Mapping[str, Any]
    changed: Mapping[str, tuple[Any, Any]]
    metrics: Mapping[str, MetricRange]
    checkpoints: tuple[int, ...]
    sampled_steps: tuple[int, ...]
    plots: tuple[Path, ...]
    seconds: float


def list_runs(
    runs_dir: Path | str = "runs",
    patterns: Sequence[str] = (),
    *,
    method: str | None = None,
    task: str | None = None,
    status: str | None = None,
    sort: str = "time",
) -> list[RunOverview]:
    """Return the runs in a folder, those of its sweeps included.

    Args:
        patterns: shell patterns of names (`kl-*`, `deltas/*`); none for all runs. A sweep's name stands for its runs.
        method: only runs whose method begins with this: `band`, `band-kl`, `clip`, or its alias `grpo`.
        task: only runs of this task; a task of files has their names.
        status: only runs with this status, in any case: `running`, `finished`, `failed`, `killed`.
        sort: `time` or `name`, ascending; or `heldout`, `heldout_reward`, `accuracy`, `reward`, `entropy` or `step`,
            the largest first. Runs without the value come last.

    Raises UserError if there is no folder `runs_dir`, except the default one, which the first run makes.
    """
    root = Path(runs_dir)
    if not root.is_dir() and root != Path("runs"):
        raise UserError(f"--runs-dir {root}: there is no such folder; bandpo train makes it")
    method = None if method is None else method_name(method).replace(":", "-").replace(".", "-")
    matcher = re.compile("|".join(map(fnmatch.translate, patterns)) if patterns else "")
    runs = [
        run
        for run in (describe_line(path, root) for path in find_runs(root))
        if any(map(matcher.match, (run.name, run.name.split("/")[0])))
        and (method is None or run.method == method or run.method.startswith(f"{method}-"))
        and (task is None or run.task == task)
        and (status is None or (run.status or "DAMAGED") == status.upper())
    ]

    if sort in ("time", "name"):
        return sorted(runs, key=lambda run: (run.started_ms if sort == "time" else 0, run.name))
    return sorted(runs, key=lambda run: (getattr(run, sort) is None, -(getattr(run, sort) or 0), run.name))


def describe_line(path: Path, runs_dir: Path) -> RunOverview:
    """Return the overview of the run in the folder `path`; a damaged folder has `error` and no status.

    It is read from the summary, unless settings or metrics have changed since.
    """
    name = _name_in(runs_dir, path)
    try:
        summary = read_summary(path)
        if summary is not None and summary.status is not None and not is_locked(path):
            fields = summary.content.get("overview")
            ending = {"status": summary.status, "error": summary.error, "stopped_by": summary.stopped_by}
            about = {"name": name, "path": path, **ending}
            if isinstance(fields, dict) and summary.content.get("overview_of") == _state(path):
                with suppress(ValidationError):
                    return _OVERVIEW.validate_python(fields | about)
        run = read_stored_run(path, _listed)
        return _overview(name, run, resolve([run.config]), summary)
    except UserError as error:
        return RunOverview(name, path, error=str(error))


def summary_fields(path: Path) -> dict[str, Any]:
    """Return the keys of `summary.json` from which `describe_line` takes the overview of a run that has ended.

    Reading them takes a tenth of the time of reading settings and metrics.
    """
    fields = asdict(describe_line(path, path.parent)).items()
    overview = {key: value for key, value in fields if key not in _NOT_STORED}
    return {"overview": overview, "overview_of": _state(path)}


def _state(path: Path) -> str | None:
    """Return a text that changes with the settings and metrics of the run in `path`; None without one of the files."""
    try:
        return f"{file_checksum(path / 'config.yaml')}-{(path / 'metrics.jsonl').stat().st_size}"
    except OSError:
        return None


def _listed(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a line of metrics.jsonl that an overview needs."""
    return {key: line[key] for key in filter(_is_listed, line)}


_LISTED = {
    "step", "time/step", "time/checkpoint", "train/accuracy", "train/reward", "train/entropy",
    "train/ungraded_fraction", "grade/not_applicable_fraction",
}  # fmt: skip


@cache
def _is_listed(key: str) -> bool:
    heldout = HELDOUT_ACCURACY.fullmatch(key) or HELDOUT_REWARD.fullmatch(key)
    return key in _LISTED or heldout is not None


def _overview(name: str, run: StoredRun, config: RunConfig, summary: Summary | None) -> RunOverview:
    lines = run.records

    def last(name: str | re.Pattern[str]) -> float | None:
        values = (
            line.get(name) if isinstance(name, str) else heldout_mean(line, name) for line in reversed(lines)
        )
        return next((float(value) for value in values if isinstance(value, int | float)), None)

    return RunOverview(
        name=name,
        path=run.path,
        method=config.bounds.slug(),
        task=config.task.title,
        model=config.model.path,
        seed=config.seed,
        status=run.status or "RUNNING",
        step=int(lines[-1]["step"]) if lines else 0,
        steps=config.steps,
        heldout=last(HELDOUT_ACCURACY),
        heldout_reward=last(HELDOUT_REWARD),
        accuracy=last("train/accuracy"),
        reward=last("train/reward"),
        nonbinary_rewards=any(map(has_nonbinary_rewards, lines)),
        entropy=last("train/entropy"),
        started_ms=run.start_ms,
        parent=parent_of(run.env),
        error=None if summary is None or run.status is None else summary.error,
        stopped_by=None if summary is None or run.status is None else summary.stopped_by,
    )


def describe_run(run: str, runs_dir: Path | str = "runs") -> RunDescription:
    """Return settings, metrics and files of a run.

    Raises UserError if there is no such run, or its folder is damaged.
    """
    root = Path(runs_dir)
    folder = RunFolder.open(root, run)
    metrics: dict[str, MetricRange] = {}

    def note(line: Mapping[str, Any]) -> dict[str, Any]:
        for key, value in line.items():
            if type(value) in (int, float, bool) and key != "step":
                point = line["step"], float(value)
                metrics[key] = metrics[key][0] if key in metrics else point, point
        return _listed(line)

    stored = read_stored_run(folder.path, note)
    config, hardware = resolve([stored.config]), stored.env.get("hardware")

    return RunDescription(
        overview=_overview(_name_in(root, folder.path), stored, config, read_summary(folder.path)),
        config=config,
        task_settings=task_settings(config.task),
        changed=changed_settings(config, on_gpu=isinstance(hardware, Mapping) and bool(hardware.get("gpus"))),
        metrics=metrics,
        checkpoints=tuple(sorted(complete_checkpoints(folder).complete)),
        sampled_steps=tuple(sampled_steps(folder)),
        plots=tuple(sorted((folder.path / "plots").glob("*.*"))),
        seconds=sum(float(line.get("time/step") or 0) for line in stored.records),
    )


def _name_in(runs_dir: Path, path: Path) -> str:
    """Return the path of a run below `runs_dir`, else its path."""
    return path.relative_to(runs_dir).as_posix() if path.is_relative_to(runs_dir) else str(path)


def task_settings(task: TaskSettings) -> dict[str, Any]:
    """Return the settings of a task by dotted name, without its name and those that are null or empty.

    Of the sources (`task.train.0.path`), only the settings that differ from their default are included.
    """
    values = task.model_dump(mode="json") | task.model_dump(mode="json", exclude_defaults=True)
    settings = flatten({"task": values}, expand_lists=True).items()
    left_out = {"task.name"} | (set() if task.functions else {"task.max_turns", "task.max_result_chars"})
    return {key: value for key, value in settings if key not in left_out and value not in (None, [])}


def changed_settings(config: RunConfig, on_gpu: bool = False) -> dict[str, tuple[Any, Any]]:
    """Return value and default of the settings that differ from the defaults of the run's task, model and method.

    Method, divergence, radius, task and model are left out: they are the first thing that an overview shows.

    With `on_gpu`, the run's machine has a GPU, and the default dtype is the one that `auto` is there.
    """
    values, task = config.model_dump(mode="json"), config.task.model_dump(mode="json")
    if isinstance(config.task, DataTask):  # which questions, not how they are put and graded
        task = {key: task[key] for key in ("name", "train", "heldout", "revisions")}
    named = ("method", "divergence", "delta")
    bounds = {key: value for key, value in values["bounds"].items() if key in named}
    model = {"path": config.model.path}
    default = resolve([{"task": task, "bounds": bounds, "model": model, "seed": values["seed"]}])
    default = with_dtype(default, on_gpu and config.model.device.startswith(("auto", "cuda")))
    defaults = flatten(default.model_dump(mode="json"))
    return {
        key: (value, defaults.get(key))
        for key, value in flatten(values).items()
        if key != "model.path" and defaults.get(key) != value
    }


def sampled_steps(folder: RunFolder) -> list[int]:
    """Return the steps whose completions are stored, ascending."""
    steps = (step_of(path) for path in (folder.path / "samples").glob("step-*.parquet"))
    return sorted(step for step in steps if step is not None)
