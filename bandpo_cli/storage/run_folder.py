"""Which files of a run folder go to MLflow beside the numbers."""

# MERGED: What a run may be called: one plain folder in the runs folder.
# MERGED: The folder of a run: the record that is complete without any tracker, and that resume and reports read.
from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bandpo_cli.errors import UserError, nearest
from bandpo_cli.paths import check_regular_file, folders_containing, path_exists, user_path
from bandpo_cli.storage.files import (
    remove_temporary_files,
    replace_nonfinite,
    step_name,
    step_of,
    sync_file,
    sync_folder,
    write_json,
    write_text,
)
from bandpo_cli.storage.tables import SampleRow, write_sample_table, write_token_table

RECORD_FILES = ("config.yaml", "env.json", "metrics.jsonl", "summary.json")
MAX_SAMPLE_FILES = 20


def run_artifacts(folder: Path) -> list[Path]:
    """Return the files of the run in `folder` that MLflow is to have; checkpoints and token tables stay here.

    They are the record's own files, the evaluations, the plots and the completions. Of more than 20 files of
    completions only those of the first, the last and the evaluated steps go, and of these the latest 20.
    """
    files = [folder / name for name in RECORD_FILES if (folder / name).is_file()]
    evaluations = sorted((folder / "evals").glob("step-*.json"))
    plots = sorted((folder / "plots").glob("*.png"))
    return files + evaluations + plots + _samples(folder, {step_of(path) for path in evaluations})


def _samples(folder: Path, evaluated: set[int | None]) -> list[Path]:
    samples = sorted((folder / "samples").glob("step-*.parquet"))
    if len(samples) <= MAX_SAMPLE_FILES:
        return samples
    chosen = [path for path in samples[1:-1] if step_of(path) in evaluated][2 - MAX_SAMPLE_FILES :]
    return [samples[0], *chosen, samples[-1]]


RESERVED = ("mlartifacts", "mlflow.db", "mlruns")
"""What MLflow may keep beside the runs."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=,@-]{0,199}")
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def is_valid_name(name: str) -> bool:
    """Tell whether `name` is one plain folder name, the same on every system that a runs folder may be copied to."""
    return _NAME.fullmatch(name) is not None and not _DEVICE.fullmatch(name) and not name.endswith(".")


def check_name(name: str, runs_dir: Path) -> str:
    """Return `name` if it is one plain folder name, else raise UserError with a name that would do.

    Refused: the empty name, what leads out of or deeper into the runs folder, blanks and characters that a
    shell or a file system takes for something else, and the names that MLflow uses there.
    """
    if is_valid_name(name) and name not in RESERVED:
        return name
    if name in RESERVED:
        why = f"MLflow keeps its files under that name in {runs_dir}"
    elif "/" in name or "\\" in name or name in (".", ".."):
        why = f"a run is one folder directly in {runs_dir}; give another place with --runs-dir"
    elif _NAME.fullmatch(name):
        why = "Windows has no folder of that name, and runs are copied"
    else:
        why = "a name is letters, digits and . _ - + = , @, at most 200, the first a letter or digit"
    raise UserError(f"--name {name!r} cannot be used: {why}. Try: --name {unused_name(slug(name), runs_dir)}")


def create_folder(runs_dir: Path, name: str) -> Path:
    """Make the folder `name` in `runs_dir`. Raises UserError for a name that is taken or not plain."""
    path = runs_dir / check_name(name, runs_dir)
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        path.mkdir()
    except FileExistsError:
        raise UserError(
            f"there is a run {name!r} in {runs_dir} already: start another by --name {unused_name(name, runs_dir)}"
        ) from None
    except OSError as error:
        raise UserError(f"--runs-dir {runs_dir}: no folder can be made there: {error.strerror}") from None
    sync_folder(runs_dir)
    return path


def unused_name(stem: str, runs_dir: Path) -> str:
    """Return `stem`, or `stem-2`, `stem-3`, ...: the first that no entry of `runs_dir` has."""
    name, count = stem, 1
    while path_exists(runs_dir / name) or name in RESERVED:
        count += 1
        name = f"{stem}-{count}"
    return name


def slug(name: str) -> str:
    """Return the nearest usable name: the last path part, with other characters as dashes."""
    last = re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    near = re.sub(r"[^A-Za-z0-9_.+=,@-]+", "-", last).lstrip(".+=,@-")[:190].rstrip(".-") or "run"
    return near if is_valid_name(near) else f"run-{near}"


_STEP_FOLDERS = ("samples", "tokens", "evals", "bad_batches")
"""The folders whose files each belong to a step."""


class RunFolder:
    """`runs/<name>/`. Whole files are atomic and durable; `metrics.jsonl` grows by flushed lines.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, runs_dir: Path, name: str) -> RunFolder:
        """Make the folder `name` in `runs_dir`. Raises UserError for a name that is taken or not plain."""
        return cls(create_folder(runs_dir, name))

    @classmethod
    def open(cls, runs_dir: Path, run: str) -> RunFolder:
        """Return the existing run that `run` names: a name in `runs_dir`, or the path of a run folder.

        Raises UserError, with the nearest name, when there is none.
        """
        for path in (runs_dir / run, user_path(run)):
            if run and path_exists(path / "config.yaml"):
                return cls(path if path.name.strip(".") else path.resolve())  # "." and ".." are no names
        for path in (runs_dir / run, user_path(run)):
            if run and path_exists(path):
                raise UserError(_not_a_run_message(path))
        names = folders_containing(runs_dir, "config.yaml")
        there = f"it has {', '.join(names[-5:])}" if names else "it has no runs"
        raise UserError(f"no run {run!r} in {runs_dir}{nearest(run, names)}; {there}")

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def metrics_path(self) -> Path:
        """`metrics.jsonl`, one object a step."""
        return self.path / "metrics.jsonl"

    def write_config(self, yaml_text: str) -> Path:
        """Write `config.yaml`."""
        return write_text(self.path / "config.yaml", yaml_text)

    def write_env(self, env: Mapping[str, object]) -> Path:
        """Write `env.json`."""
        return write_json(self.path / "env.json", env)

    def write_summary(self, summary: Mapping[str, object]) -> Path:
        """Write `summary.json`."""
        return write_json(self.path / "summary.json", summary)

    def write_samples(self, step: int, rows: Sequence[SampleRow]) -> Path:
        """Write every completion of `step` to `samples/step-000010.parquet`."""
        return write_sample_table(self.path / "samples" / f"{step_name(step)}.parquet", rows)

    def write_tokens(self, step: int, columns: Mapping[str, Any]) -> Path:
        """Write the token columns of `step` to `tokens/step-000100.parquet`; see `write_token_table`."""
        return write_token_table(self.path / "tokens" / f"{step_name(step)}.parquet", columns)

    def write_eval(self, step: int, result: Mapping[str, object]) -> Path:
        """Write an evaluation to `evals/step-000100.json`."""
        return write_json(self.path / "evals" / f"{step_name(step)}.json", result)

    def checkpoint_dir(self, step: int) -> Path:
        """Return where the checkpoint of `step` belongs; makes nothing."""
        return self.path / "checkpoints" / step_name(step)

    def checkpoints(self) -> dict[int, Path]:
        """Return the whole checkpoints by step, the earliest first."""
        folders = (self.path / "checkpoints").glob("step-*")
        found = {step_of(path): path for path in folders if (path / "config.json").is_file()}
        return {step: found[step] for step in sorted(step for step in found if step is not None)}

    def append_metrics(self, record: Mapping[str, object]) -> None:
        """Append `record`, which has `step`, as a line of JSON, `step` first; NaN and infinities become null.

        The line is flushed to the system at once, so a killed process leaves at most its last line torn.
        """
        ordered = {"step": record["step"], **record}
        line = json.dumps(replace_nonfinite(ordered), ensure_ascii=False, allow_nan=False)
        with self.metrics_path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(line + "\n")

    def sync_metrics(self) -> None:
        """Make the lines of `metrics.jsonl` durable."""
        if self.metrics_path.exists():
            sync_file(self.metrics_path)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the records in file order, [] before the first. A torn last line is left out."""
        return read_metrics(self.metrics_path)

    def roll_back(self, step: int) -> None:
        """Take back everything later than `step`: what a resume from the checkpoint of `step` does again.

        -1 takes back all steps. What a crash left of files that were being written goes too.
        """
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        if kept or self.metrics_path.exists():
            lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in kept]
            write_text(self.metrics_path, "".join(lines))
        for folder in _STEP_FOLDERS:
            for path in (self.path / folder).glob("step-*"):
                found = re.match(r"step-(\d+)[.-]", path.name)
                if found and int(found[1]) > step:
                    path.unlink()
        for folder in (".", *_STEP_FOLDERS):
            remove_temporary_files(self.path / folder)

    def record_resume(self, about: Mapping[str, object], env: Mapping[str, object]) -> None:
        """Add `about` to the list `resumes` of `env.json`, with what of `env` is not as it was when the run began."""
        path = self.path / "env.json"
        try:
            first = json.loads(path.read_text(encoding="utf-8"))
            resumes = list(first.get("resumes", []))
        except (OSError, ValueError, AttributeError, TypeError):
            first, resumes = dict(env), []
        changed = {key: value for key, value in env.items() if replace_nonfinite(value) != first.get(key)}
        write_json(path, {**first, "resumes": [*resumes, {**about, **changed}]})


def _not_a_run_message(path: Path) -> str:
    """Say why the folder `path`, which is there, is no run that can be opened."""
    for file, command in (("eval.json", "bandpo eval"), ("sweep.yaml", "bandpo sweep")):
        if (path / file).is_file():
            return f"{path} is no training run: go on with it by {command} --resume {path.name}"
    return f"{path} is no run: it has no config.yaml, with which its settings are lost; start a new run"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `metrics.jsonl`, [] when there is no such file; a torn last line is left out.

    Raises UserError when another line is not a JSON object with a step.
    """
    if not path_exists(path):
        return []
    check_regular_file(path, str(path))
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            record["step"]
        except (ValueError, TypeError, KeyError, RecursionError):
            problem = f"is not a JSON object with a step: {line[:80]!r}"
            raise UserError(f"{path}, line {number} {problem}") from None
        records.append(record)
    return records
