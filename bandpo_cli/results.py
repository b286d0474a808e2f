"""Results of runs: lists and descriptions of runs, tables of their metrics, evaluations, completions and tokens.

    from bandpo_cli import results

    runs = results.runs("runs")
    results.metrics("runs/demo")["train/entropy"].plot()

The tables are pandas DataFrames. pandas is imported when a table is made: training does not need it.
"""

from __future__ import annotations

import fnmatch
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from bandpo_cli.config.layers import CHOSEN_AT_START, flatten, read_layer, resolve
from bandpo_cli.config.run import RunConfig, with_dtype
from bandpo_cli.config.task import DataTask, TaskSettings
from bandpo_cli.errors import UserError
from bandpo_cli.methods import method_name
from bandpo_cli.metric_names import (
    HELDOUT_ACCURACY,
    HELDOUT_REWARD,
    TOTAL_SECONDS,
    has_nonbinary_rewards,
    heldout_mean,
)
from bandpo_cli.paths import given_path, path_exists, read_json_object
from bandpo_cli.storage.checkpoints import complete_checkpoints
from bandpo_cli.storage.files import file_checksum, is_locked, iterate_metrics, step_of
from bandpo_cli.storage.run_folder import RECORD_FILE, RunFolder, find_folder
from bandpo_cli.storage.run_record import (
    EVALUATION_COLUMNS,
    completions_path,
    iterate_evaluations,
    last_change,
    parent_of,
    read_stored_run,
    read_summary,
    sampled_steps,
)
from bandpo_cli.storage.sweep_folder import find_runs
from bandpo_cli.storage.tables import read_table, read_token_values
from bandpo_cli.types import RunStatus

if TYPE_CHECKING:
    from pandas import DataFrame

_MAX_VALUE = 1e100  # larger than any measurement; a finite float64 when squared


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
        accuracy, reward, entropy: of the last step; the entropy of the policy in nats per token.
        nonbinary_rewards: whether rewards are not just 1 for a correct answer and 0 for any other.
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
    status: RunStatus | Literal["RUNNING"] | None = None
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

    @property
    def state(self) -> str:
        """The status in lower case: `stopped` by Ctrl-C or a signal, `killed` without a summary; or `damaged`."""
        return "stopped" if self.status == "KILLED" and self.error else (self.status or "damaged").lower()


_OVERVIEW = TypeAdapter(RunOverview)


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
        status: only runs in this state, in any case: `running`, `finished`, `failed`, `stopped`, `killed`, `damaged`.
        sort: `time` or `name`, ascending; or `heldout`, `heldout_reward`, `accuracy`, `reward`, `entropy` or `step`,
            the largest first. Runs without the value come last.

    Raises UserError if there is no folder `runs_dir`, except the default one, which the first run makes.
    """
    root = given_path(runs_dir)
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
        and (status is None or run.state == status.lower())
    ]
    if sort in ("time", "name"):
        return sorted(runs, key=lambda run: (run.started_ms if sort == "time" else 0, run.name))
    return sorted(runs, key=lambda run: (getattr(run, sort) is None, -(getattr(run, sort) or 0), run.name))


def describe_line(path: Path, runs_dir: Path) -> RunOverview:
    """Return the overview of the run in the folder `path`; a damaged folder has `error` and no status."""
    try:
        return _read_overview(path, runs_dir)
    except UserError as error:
        return RunOverview(_name_in(runs_dir, path), path, error=str(error))


def _read_overview(path: Path, runs_dir: Path) -> RunOverview:
    """Return the overview of a run, from its summary unless settings or metrics have changed since; raise UserError if
    damaged.
    """
    summary = read_summary(path)
    about: dict[str, Any] = {"name": _name_in(runs_dir, path), "path": path}
    if summary is not None and summary.status is not None and not is_locked(path):
        ending = {"status": summary.status, "error": summary.error, "stopped_by": summary.stopped_by}
        if summary.content.get("overview_of") == _state(path):
            with suppress(ValidationError, TypeError, KeyError):
                return _OVERVIEW.validate_python(summary.content["overview"] | about | ending)
    run = read_stored_run(path, _is_listed)
    config, lines = resolve([run.config]), run.records

    def last(value_of: Callable[[Mapping[str, Any]], Any]) -> float | None:
        values = map(value_of, reversed(lines))
        return next((float(value) for value in values if isinstance(value, int | float)), None)

    ended = summary if run.status is not None else None
    return RunOverview(
        **about,
        method=config.bounds.slug(),
        task=config.task.title,
        model=config.model.path,
        seed=config.seed,
        status=run.status or "RUNNING",
        step=int(lines[-1]["step"]) if lines else 0,
        steps=config.steps,
        heldout=last(lambda line: heldout_mean(line, HELDOUT_ACCURACY)),
        heldout_reward=last(lambda line: heldout_mean(line, HELDOUT_REWARD)),
        accuracy=last(lambda line: line.get("train/accuracy")),
        reward=last(lambda line: line.get("train/reward")),
        nonbinary_rewards=any(map(has_nonbinary_rewards, lines)),
        entropy=last(lambda line: line.get("train/entropy")),
        started_ms=run.start_ms,
        parent=parent_of(run.env),
        error=None if ended is None else ended.error,
        stopped_by=None if ended is None else ended.stopped_by,
    )


def summary_fields(path: Path) -> dict[str, Any]:
    """Return the keys of `summary.json` from which the overview of a run that has ended is read, 10 times faster."""
    overview = asdict(describe_line(path, path.parent))
    for key in ("name", "path", "status", "error", "stopped_by"):  # follow from the folder and the summary
        del overview[key]
    return {"overview": overview, "overview_of": _state(path)}


def _state(path: Path) -> str | None:
    """Return a text that changes with the settings and metrics of the run in `path`; None without one of the files."""
    try:
        return f"{file_checksum(path / 'config.yaml')}-{(path / 'metrics.jsonl').stat().st_size}"
    except OSError:
        return None


_is_listed = cache(
    re.compile(
        "step|time/step|time/checkpoint|train/accuracy|train/reward|train/entropy|train/ungraded_fraction|"
        f"grade/not_applicable_fraction|{HELDOUT_ACCURACY.pattern}|{HELDOUT_REWARD.pattern}"
    ).fullmatch
)
"""The metrics that an overview needs."""


def describe_run(run: str, runs_dir: Path | str = "runs") -> dict[str, Any]:
    """Return settings, metrics and files of a run, the content of `bandpo show --format json`.

    It has the fields of `RunOverview`, its `state`, and `config`; `task_settings`, the settings of the task by dotted
    name, without those that are null or empty; `changed`, `value` and `default` of the settings that differ from the
    default of the run's task, model and method; `metrics`, `first` and `last` value of each metric after its step;
    `checkpoints`, the steps that training can resume from; `sampled_steps`; `plots`; `seconds`, the time of all steps;
    `times`, the sums of the metrics `time/…` but for `time/total`; and `trained_steps`, how many steps trained. Raises
    UserError if there is no such run, or its folder is damaged.
    """
    folder = RunFolder.open(given_path(runs_dir), run)
    path = folder.path
    overview = _read_overview(path, given_path(runs_dir))
    config = resolve([read_layer(path / "config.yaml", "run settings")])
    env = read_json_object(path / "env.json") if path_exists(path / "env.json") else {}
    hardware = env.get("hardware")
    changed = changed_settings(config, on_gpu=isinstance(hardware, Mapping) and bool(hardware.get("gpus")))
    table = read_metrics_table(folder.metrics_path, comparable=True)
    points = {str(name): [*column.dropna().items()] for name, column in table.items()}
    times = {
        key: sum(seconds for _, seconds in values)
        for key, values in points.items()
        if key.startswith("time/") and key != TOTAL_SECONDS
    }
    return {
        **asdict(overview),
        "state": overview.state,
        "config": config.model_dump(mode="json"),
        "task_settings": task_settings(config.task),
        "changed": {key: {"value": value, "default": default} for key, (value, default) in changed.items()},
        "metrics": {key: {"first": of[0], "last": of[-1]} for key, of in points.items() if of},
        "checkpoints": sorted(complete_checkpoints(folder).complete),
        "sampled_steps": sampled_steps(folder),
        "plots": sorted((path / "plots").glob("*.*")),
        "seconds": times.get("time/step", 0),
        "times": times,
        "trained_steps": len(points.get("time/update", ())),
    }


def _name_in(runs_dir: Path, path: Path) -> str:
    """Return the path of a run below `runs_dir`, else its path."""
    return path.relative_to(runs_dir).as_posix() if path.is_relative_to(runs_dir) else str(path)


def task_settings(task: TaskSettings) -> dict[str, Any]:
    """Return the settings of a task that are not null or empty, those of its sources that are not the default."""
    values = task.model_dump(mode="json") | task.model_dump(mode="json", exclude_defaults=True)
    settings = flatten({"task": values}, expand_lists=True).items()
    left_out = {"task.name"} | (set() if task.functions else {"task.max_turns", "task.max_result_chars"})
    return {key: value for key, value in settings if key not in left_out and value not in (None, [])}


def changed_settings(config: RunConfig, on_gpu: bool = False) -> dict[str, tuple[Any, Any]]:
    """Return value and default of the settings that differ from the defaults of the run's task, model and method.

    Method, divergence, radius, task and model are not included. `on_gpu`: whether the run's machine has a GPU.
    """
    values, task = config.model_dump(mode="json"), config.task.model_dump(mode="json")
    if isinstance(config.task, DataTask):  # which questions, not how they are put and graded
        task = {key: task[key] for key in ("name", "train", "heldout", "revisions")}
    named = ("method", "divergence", "delta")
    bounds = {key: value for key, value in values["bounds"].items() if key in named}
    model = {"path": config.model.path}
    default = resolve([{"task": task, "bounds": bounds, "model": model, "seed": values["seed"]}])
    if config.model.dtype != "auto":  # of a run that has started
        default = with_dtype(default, on_gpu and config.model.device.startswith(("auto", "cuda")))
    defaults = flatten(default.model_dump(mode="json"))
    return {
        key: (value, defaults.get(key))
        for key, value in flatten(values).items()
        if key != "model.path"
        and defaults.get(key) != value
        and not (key in CHOSEN_AT_START and defaults.get(key) == "auto")
    }


def runs(folder: Path | str = "runs") -> DataFrame:
    """Return a row per run in a runs folder, those of its sweeps included, the oldest first.

    The columns are the attributes of `RunOverview`. Raises UserError if there is no such folder.
    """
    import pandas as pd

    return pd.DataFrame([asdict(run) for run in list_runs(folder)], columns=[*RunOverview.__annotations__])


def metrics(run: Path | str, runs_dir: Path | str = "runs") -> DataFrame:
    """Return the metrics of a run, a row per step; a metric that a step does not have, or that is no number, is NaN.

    The index is `step`, the columns are the names of docs/metrics.md, such as `train/accuracy`. `run` is the folder of
    a run, or its name in `runs_dir`. Raises UserError if there is no such run, or metrics.jsonl is damaged.
    """
    return read_metrics_table(RunFolder.open(given_path(runs_dir), str(run)).metrics_path)


def read_metrics_table(path: Path, comparable: bool = False) -> DataFrame:
    """Return a `metrics.jsonl` as the table of `metrics`: ascending steps, of two lines of a step the last one.

    Values that are no numbers, and numbers from `_MAX_VALUE` on, are NaN, and with `comparable` evaluations before a
    fork that changed what they measure. There are no rows if there is no file. Raises UserError if a line is damaged.
    """
    import pandas as pd

    steps: list[int] = []
    columns: dict[str, array[float]] = defaultdict(lambda: array("d"))
    for line in iterate_metrics(path):
        step = line.pop("step")
        for key, value in line.items():
            if isinstance(value, int | float) and abs(value) < _MAX_VALUE:
                missing = len(steps) - len(columns[key])
                columns[key].extend([math.nan] * missing + [value])
        steps.append(step)
    series = {key: pd.Series(column, dtype="float64") for key, column in columns.items()}
    table = pd.DataFrame(series, range(len(steps)), dtype="float64")
    table.index = pd.Index(steps, name="step", dtype="int64")
    table = table[~table.index.duplicated(keep="last")].sort_index()
    if comparable:
        scores = [name for name in columns if name.startswith("eval/")]
        table.loc[: last_change(path.parent)[0], scores] = math.nan
    return table


def samples(run: Path | str, step: int | None = None, runs_dir: Path | str = "runs") -> DataFrame:
    """Return the completions of a run, a row per completion, with the column `step`; or those of an evaluation.

    The other columns are those of `samples/` (docs/metrics.md): `problem_id`, `prompt`, `reference`, `text`, `reward`,
    `accuracy`, `length` in tokens, `finish_reason`, `verdict`, `logprob_sum` in nats, and `reward/<name>`.

    Args:
        run: the folder of a run or an evaluation, or its name in `runs_dir`.
        step: a step of the run; None for all steps.

    Raises:
        UserError: there is no such run or step, or a table is damaged.
    """
    import pandas as pd

    root, name = given_path(runs_dir), str(run)
    if find_folder(name, root, RECORD_FILE) is not None:
        return pd.DataFrame(read_table(completions_path(name, root, step)).to_pandas())
    steps = [step] if step is not None else sampled_steps(RunFolder.open(root, name))
    tables = [read_table(completions_path(name, root, number)).to_pandas() for number in steps]
    for number, table in zip(steps, tables, strict=True):
        table.insert(0, "step", number)
    return pd.DataFrame(pd.concat(tables or [pd.DataFrame(columns=["step"])], ignore_index=True))


def evaluations(run: Path | str, runs_dir: Path | str = "runs") -> DataFrame:
    """Return the held-out metrics of a run, a row per step, evaluation set and metric.

    The columns are `step`, `set`, `metric` (`mean_at_16`, `pass_at_4`, `response_length`, ...), `value`, `low` and
    `high`, the ends of the 95% interval over problems (NaN for one problem), `problems` and `completions`. Raises
    UserError if there is no such run, or a file of `evals/` is damaged.
    """
    import pandas as pd

    rows = list(iterate_evaluations(RunFolder.open(given_path(runs_dir), str(run)).path))
    types = dict.fromkeys(("value", "low", "high"), float)
    return pd.DataFrame(rows, columns=[*EVALUATION_COLUMNS]).astype(types)


def tokens(run: Path | str, step: int, runs_dir: Path | str = "runs") -> DataFrame:
    """Return the tokens of the completions of a step, a row per token, in their order.

    The columns are `completion` (its row among those of `samples(run, step)`), `token` (its text), `advantage` and the
    other values of `storage.tables.TokenValues`; log-probs and entropies are in nats. Raises UserError if there is no
    such run, or no undamaged table of the step (`tracking.tokens_every`).
    """
    import numpy as np
    import pandas as pd

    folder = RunFolder.open(given_path(runs_dir), str(run))
    tables = {step_of(path): path for path in sorted(folder.path.glob("token_values/step-*.parquet"))}
    if step not in tables:
        recorded = ", ".join(map(str, tables)) or "none (tracking.tokens_every)"
        raise UserError(f"step {step}: its tokens are not recorded in {folder.path}; recorded: {recorded}")
    values = read_token_values(tables[step])
    completion = np.repeat(np.arange(len(values.lengths)), values.lengths)
    columns = {"completion": completion, "token": np.asarray(values.texts, dtype=object)[values.text_index]}
    columns["advantage"] = values.advantage[completion]
    for name in ("old_logprob", "ratio", "entropy", "lower", "upper", "importance"):
        columns[name] = getattr(values, name).astype(np.float32)  # in float16 pandas counts up to 65,504
    return pd.DataFrame(columns | {"clipped": values.clipped})
