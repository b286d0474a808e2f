"""Results as tables: pandas DataFrames of runs, metrics, evaluations, completions and tokens.

    from bandpo_cli import results

    runs = results.runs("runs")
    results.metrics("runs/demo")["train/entropy"].plot()

pandas is imported when a table is made: the plots of a run, which it writes at its end, do not need it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandpo_cli.errors import UserError
from bandpo_cli.overview import RunOverview, list_runs, sampled_steps
from bandpo_cli.storage.eval_folder import RECORD_FILE, EvalFolder, read_record
from bandpo_cli.storage.files import step_name, step_of
from bandpo_cli.storage.run_folder import RunFolder, find_folder, iterate_metrics
from bandpo_cli.storage.tables import (
    read_table,
    read_token_values,
)

if TYPE_CHECKING:
    from pandas import DataFrame

_MAX_STEPS, _MAX_VALUE = 10**12, 1e100  # larger than any measurement; a finite float64 when squared


def runs(folder: Path | str = "runs") -> DataFrame:
    """Return a row per run in a runs folder, those of its sweeps included, the oldest first.

    The columns are the attributes of `RunOverview`: `name`, `path`, `method`, `task`, `model`, `seed`, `status`,
    `step`, `steps`, the scores of the last evaluation and of the last step, `started_ms`, `parent`, `error` and
    `stopped_by`.

    Raises:
        UserError: there is no such folder.
    """
    import pandas as pd

    names = [field.name for field in fields(RunOverview)]
    return pd.DataFrame([asdict(run) for run in list_runs(folder)], columns=names)


def metrics(run: Path | str, runs_dir: Path | str = "runs") -> DataFrame:
    """Return the metrics of a run, a row per step; a metric that a step does not have, or that is no number, is NaN.

    The index is `step`, the columns are the names of docs/metrics.md, such as `train/accuracy`.

    Args:
        run: the folder of a run, or its name in `runs_dir`.

    Raises:
        UserError: there is no such run, or metrics.jsonl is damaged.
    """
    return read_metrics_table(RunFolder.open(Path(runs_dir), str(run)).metrics_path)


def read_metrics_table(path: Path) -> DataFrame:
    """Return a `metrics.jsonl` as the table of `metrics`: ascending steps, of two lines of a step the last one.

    Values that are no numbers, and numbers from `_MAX_VALUE` on, are NaN. There are no rows if there is no file.

    Raises:
        UserError: a line is not a JSON object with a step that is a natural number below `_MAX_STEPS`.
    """
    import pandas as pd

    rows: dict[int, dict[str, float]] = {}
    for line in iterate_metrics(path):
        step = line.pop("step")
        if type(step) is not int or not 0 <= step < _MAX_STEPS:
            raise UserError(f"{path} has a step {json.dumps(step)[:40]}")
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
        rows[step] = {key: float(value) for key, value in numbers.items() if abs(value) < _MAX_VALUE}
    columns = dict.fromkeys(key for row in rows.values() for key in row)
    index = pd.Index(sorted(rows), name="step", dtype="int64")
    return pd.DataFrame([rows[step] for step in sorted(rows)], index, list(columns), dtype="float64")


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

    root = Path(runs_dir)
    if find_folder(str(run), root, RECORD_FILE) is not None:
        return pd.DataFrame(read_table(completions_path(str(run), root, step)).to_pandas())
    folder = RunFolder.open(root, str(run))
    steps = sampled_steps(folder) if step is None else [step]
    tables = {number: read_table(completions_path(str(run), root, number)).to_pandas() for number in steps}
    if not tables:
        return pd.DataFrame(columns=["step"])
    joined: DataFrame = pd.concat(tables, names=["step", None])
    return joined.reset_index("step").reset_index(drop=True)


def evaluations(run: Path | str, runs_dir: Path | str = "runs") -> DataFrame:
    """Return the held-out metrics of a run, a row per step, evaluation set and metric.

    The columns are `step`, `set`, `metric` (`mean_at_16`, `pass_at_4`, `response_length`, ...), `value`, `low` and
    `high`, the ends of the 95% interval over problems (NaN for one problem), `problems` and `completions`.

    Raises:
        UserError: there is no such run, or a file of `evals/` is damaged.
    """
    import pandas as pd

    rows = list(iterate_evaluations(RunFolder.open(Path(runs_dir), str(run)).path))
    names = ["step", "set", "metric", "value", "low", "high", "problems", "completions"]
    return pd.DataFrame(rows, columns=names).astype({"value": float, "low": float, "high": float})


def iterate_evaluations(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of `evaluations` of the run in `folder`; raise UserError if a file of `evals/` is damaged."""
    for path in sorted((folder / "evals").glob("step-*.json")):
        sets = read_record(path)["sets"]
        try:
            for label, scores in sets.items():
                counts = {name: scores.get(name) for name in ("problems", "completions")}
                for name, value in scores["metrics"].items():
                    ends = {end: value[end] for end in ("value", "low", "high")}
                    yield {"step": step_of(path), "set": label, "metric": name, **ends, **counts}
        except (AttributeError, KeyError, TypeError):
            raise UserError(f"{path}: not the record of an evaluation: a metric has no interval") from None


def tokens(run: Path | str, step: int, runs_dir: Path | str = "runs") -> DataFrame:
    """Return the tokens of the completions of a step, a row per token, in their order.

    The columns are `completion` (its row among those of `samples(run, step)`), `token` (its text), `advantage` and the
    other values of `storage.tables.TokenValues`; log-probs and entropies are in nats.

    Raises:
        UserError: there is no such run, the tokens of the step are not stored (`tracking.tokens_every`), or the table
            is damaged.
    """
    import numpy as np
    import pandas as pd

    folder = RunFolder.open(Path(runs_dir), str(run))
    values = read_token_values(folder.path / "token_values" / f"{step_name(step)}.parquet")
    completion = np.repeat(np.arange(len(values.lengths)), values.lengths)
    texts = np.asarray(values.texts, dtype=object)
    columns = {"completion": completion, "token": texts[values.text_index]}
    columns["advantage"] = values.advantage[completion]
    numbers = ("old_logprob", "ratio", "entropy", "lower", "upper", "importance", "clipped")
    return pd.DataFrame(columns | {name: getattr(values, name) for name in numbers})


def completions_path(name: str, runs_dir: Path, step: int | None = None) -> Path:
    """Return the table with the completions of a step of a run, or of an evaluation.

    Args:
        name: a run or an evaluation: its name in `runs_dir`, or its folder.
        step: a step of the run; None for the last one whose completions are stored.

    Raises UserError if there is no such run or step.
    """
    evaluation = find_folder(name, runs_dir, RECORD_FILE)
    if evaluation is not None:
        if step is not None:
            raise UserError(f"--step {step}: {evaluation.name} is an evaluation, which has no steps")
        path = EvalFolder(evaluation).samples_path
        if not path.exists():
            raise UserError(f"{evaluation} has no {path.name}: the evaluation has not finished")
        return path
    folder = RunFolder.open(runs_dir, name)
    steps = sampled_steps(folder)
    if not steps:
        raise UserError(f"{folder.path} has no completions: the run has completed no step")
    step = steps[-1] if step is None else step
    if step not in steps:
        near = min(steps, key=lambda stored: abs(stored - step))
        raise UserError(f"--step {step}: its completions are not stored; the nearest is --step {near}")
    return folder.path / "samples" / f"{step_name(step)}.parquet"
