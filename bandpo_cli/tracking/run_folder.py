"""The folder of a run: the record that is complete without any tracker, and that resume and reports read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bandpo_cli.errors import UserError, nearest
from bandpo_cli.paths import check_regular, is_there, names_with, user_path
from bandpo_cli.tracking.files import finite, remove_temporary, sync_file, write_json, write_text
from bandpo_cli.tracking.run_names import make_folder
from bandpo_cli.tracking.tables import SampleRow, write_sample_table, write_token_table

_OF_STEPS = ("samples", "tokens", "evals", "bad_batches")
"""The folders whose files each belong to a step."""


def step_name(step: int) -> str:
    """Return `step-000010` for step 10: names that sort by step."""
    return f"step-{step:06d}"


def step_of(path: Path) -> int | None:
    """Return the step of a file or folder named by `step_name`, None for any other."""
    match = re.match(r"step-(\d+)(\.|$)", path.name)
    return int(match[1]) if match else None


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
        return cls(make_folder(runs_dir, name))

    @classmethod
    def open(cls, runs_dir: Path, run: str) -> RunFolder:
        """Return the existing run that `run` names: a name in `runs_dir`, or the path of a run folder.

        Raises UserError, with the nearest name, when there is none.
        """
        for path in (runs_dir / run, user_path(run)):
            if run and is_there(path / "config.yaml"):
                return cls(path if path.name.strip(".") else path.resolve())  # "." and ".." are no names
        for path in (runs_dir / run, user_path(run)):
            if run and is_there(path):
                raise UserError(_why_no_run(path))
        names = names_with(runs_dir, "config.yaml")
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
        line = json.dumps(finite(ordered), ensure_ascii=False, allow_nan=False)
        with self.metrics_path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(line + "\n")

    def sync_metrics(self) -> None:
        """Make the lines of `metrics.jsonl` durable."""
        if self.metrics_path.exists():
            sync_file(self.metrics_path)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the records in file order, [] before the first. A torn last line is left out."""
        return read_metrics(self.metrics_path)

    def rewind(self, step: int) -> None:
        """Take back everything later than `step`: what a resume from the checkpoint of `step` does again.

        -1 takes back all steps. What a crash left of files that were being written goes too.
        """
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        if kept or self.metrics_path.exists():
            lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in kept]
            write_text(self.metrics_path, "".join(lines))
        for folder in _OF_STEPS:
            for path in (self.path / folder).glob("step-*"):
                found = re.match(r"step-(\d+)[.-]", path.name)
                if found and int(found[1]) > step:
                    path.unlink()
        for folder in (".", *_OF_STEPS):
            remove_temporary(self.path / folder)

    def note_resume(self, about: Mapping[str, object], env: Mapping[str, object]) -> None:
        """Add `about` to the list `resumes` of `env.json`, with what of `env` is not as it was when the run began."""
        path = self.path / "env.json"
        try:
            first = json.loads(path.read_text(encoding="utf-8"))
            resumes = list(first.get("resumes", []))
        except (OSError, ValueError, AttributeError, TypeError):
            first, resumes = dict(env), []
        changed = {key: value for key, value in env.items() if finite(value) != first.get(key)}
        write_json(path, {**first, "resumes": [*resumes, {**about, **changed}]})


def _why_no_run(path: Path) -> str:
    """Say why the folder `path`, which is there, is no run that can be opened."""
    for file, command in (("eval.json", "bandpo eval"), ("sweep.yaml", "bandpo sweep")):
        if (path / file).is_file():
            return f"{path} is no training run: go on with it by {command} --resume {path.name}"
    return f"{path} is no run: it has no config.yaml, with which its settings are lost; start a new run"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `metrics.jsonl`, [] when there is no such file; a torn last line is left out.

    Raises UserError when another line is not a JSON object with a step.
    """
    if not is_there(path):
        return []
    check_regular(path, str(path))
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
