"""Folders of runs and evaluations: their names, lookup by name or path, and the files that are written there.

The folder is the complete record of a run, with or without a tracker. Resume and reports read nothing else.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from bandpo_cli.errors import UserError, nearest
from bandpo_cli.paths import folders_containing, path_exists, read_json_object, relative_to_cwd, user_path
from bandpo_cli.storage import tables
from bandpo_cli.storage.files import (
    check_version,
    iterate_metrics,
    link_or_copy,
    parse_metrics,
    remove_temporary_files,
    replace_nonfinite,
    step_name,
    sync,
    write_json,
    write_text,
)
from bandpo_cli.types import Group

RECORD_FILE, SAMPLES_FILE = "eval.json", "samples.parquet"
"""The files of an evaluation: its metrics and settings, and every completion that they were computed from."""

VERL_FILE = "verl.json"  # of a run that verl trained and `bandpo import verl` brought here: its MLflow run
GRADER_ERRORS = "grader_errors"  # the folder with a file for each custom function that failed
RESERVED = ("mlartifacts", "mlflow.db", "mlruns")  # names that MLflow may use in the runs folder

_PART_NAME = re.compile(r"(\d+)-(\d+)\.parquet")
VALID_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=,@-]{0,199}(?<!\.)")
"""A single folder name that a shell, a URL and MLflow take as it is."""
_TIMESTAMP = re.compile(r"-\d{8}-\d{6}(-\d{1,4}){0,9}$")  # of `timestamped`, with suffixes of `unused_name`
_STEP_FOLDERS = ("samples", "tokens", "token_values", "evals", "bad_batches")  # each file belongs to one step
_OTHER_FOLDERS = {
    "eval.json": ("an evaluation", ("samples", "eval compare", "eval --resume")),
    "sweep.yaml": ("a sweep", ("runs", "report", "sweep --resume")),
}
"""What a folder with this file is if it is not a run, and the commands that take it."""


@dataclass(frozen=True)
class ExperimentFolder:
    """`runs/<name>/` of a run or an evaluation.

    Attributes:
        kind: what the folder holds, for messages.
        marker: the file that every such folder has.
        path: the folder.
    """

    kind: ClassVar[str]
    marker: ClassVar[str]

    path: Path

    @classmethod
    def create(cls, runs_dir: Path, name: str) -> Self:
        """Create the folder `name` in `runs_dir`. Raises UserError for a name that is taken or not valid."""
        return cls(create_folder(runs_dir, name))

    @classmethod
    def open(cls, runs_dir: Path, text: str) -> Self:
        """Return the existing folder that `text` names: a name in `runs_dir`, or the path of it or of its `marker`.

        Raises UserError, with the nearest name, when there is none.
        """
        if path := find_folder(text := str(text), runs_dir, cls.marker):
            return cls(path)
        raise not_found(cls.kind, text, runs_dir, cls.marker)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.name


class RunFolder(ExperimentFolder):
    """`runs/<name>/` of a run. Files are written atomically; `metrics.jsonl` grows by flushed lines."""

    kind, marker = "run", "config.yaml"

    @property
    def metrics_path(self) -> Path:
        """`metrics.jsonl`, one object per step."""
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

    def write_samples(self, step: int, groups: Sequence[Group]) -> Path:
        """Write every completion of `step` to `samples/step-000010.parquet`; see `write_sample_table`."""
        return tables.write_sample_table(self.path / "samples" / f"{step_name(step)}.parquet", groups)

    def write_tokens(self, step: int, columns: Mapping[str, Any]) -> Path:
        """Write the token columns of `step` to `tokens/step-000100.parquet`; see `write_token_table`."""
        return tables.write_token_table(self.path / "tokens" / f"{step_name(step)}.parquet", columns)

    def write_token_values(self, step: int, values: tables.TokenValues) -> Path:
        """Write `token_values/step-000100.parquet`, the data of `bandpo view`; see `write_token_values`."""
        return tables.write_token_values(self.path / "token_values" / f"{step_name(step)}.parquet", values)

    def write_eval(self, step: int, result: Mapping[str, object]) -> Path:
        """Write an evaluation to `evals/step-000100.json`."""
        return write_json(self.path / "evals" / f"{step_name(step)}.json", result)

    def checkpoint_dir(self, step: int) -> Path:
        """Return the path of the checkpoint of `step`; creates nothing."""
        return self.path / "checkpoints" / step_name(step)

    def append_metrics(self, record: Mapping[str, object]) -> None:
        """Append `record`, which has `step`, as a line of JSON, `step` first; NaN and infinities become null.

        The line is flushed to the system at once, so that a killed process truncates at most its last line.
        """
        ordered = {"step": record["step"], **record}
        line = json.dumps(replace_nonfinite(ordered), ensure_ascii=False, allow_nan=False)
        with self.metrics_path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(line + "\n")

    def sync_metrics(self) -> None:
        """Flush the lines of `metrics.jsonl` to the disk."""
        if self.metrics_path.exists():
            sync(self.metrics_path)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the records in file order; see `iterate_metrics`."""
        return [*iterate_metrics(self.metrics_path)]

    def read_records(self, steps: Iterable[int]) -> list[dict[str, Any]]:
        """Return the records of `steps`, in file order. Other lines are not parsed: they begin with another step."""
        if not path_exists(self.metrics_path):
            return []
        beginnings = tuple(f'{{"step": {step}{end}'.encode() for step in steps for end in ",}")
        with self.metrics_path.open("rb") as file:
            lines = [line for line in file if line.startswith(beginnings) and line.endswith(b"\n")]
        return [parse_metrics(line, self.metrics_path) for line in lines]

    def roll_back(self, step: int) -> None:
        """Remove the metrics and files of all steps after `step`, which a resume from its checkpoint does again.

        -1 removes all steps. Temporary files of a crash are removed too.
        """
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        if kept or self.metrics_path.exists():
            lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in kept]
            write_text(self.metrics_path, "".join(lines))
        for folder in _STEP_FOLDERS:
            for path in (self.path / folder).glob("step-*"):
                match = re.match(r"step-(\d+)[.-]", path.name)
                if match and int(match[1]) > step:
                    path.unlink()
        for folder in (".", *_STEP_FOLDERS):
            remove_temporary_files(self.path / folder)

    def begin_with(self, parent: RunFolder, step: int) -> None:
        """Fill the new folder with the metrics and files of the steps of `parent` up to `step`, flushed to the disk.

        The files are hard links if possible: no run changes such a file, and each run can be deleted.
        """
        for name in _STEP_FOLDERS:
            if (parent.path / name).is_dir():
                unfinished = shutil.ignore_patterns(".*")
                shutil.copytree(
                    parent.path / name, self.path / name, ignore=unfinished, copy_function=link_or_copy
                )
        shutil.copyfile(parent.metrics_path, self.metrics_path)
        self.roll_back(step)
        for path in (self.path, *self.path.rglob("*")):
            sync(path)

    def record_resume(self, about: Mapping[str, object], env: Mapping[str, object]) -> None:
        """Append `about` to the list `resumes` of `env.json`, with the entries of `env` that have changed.

        A missing or damaged `env.json` is replaced by `env`.
        """
        path = self.path / "env.json"
        try:
            first = read_json_object(path)
            resumes = list(first.get("resumes", []))
        except (UserError, TypeError):
            first, resumes = dict(env), []
        changed = {key: value for key, value in env.items() if replace_nonfinite(value) != first.get(key)}
        write_json(path, {**first, "resumes": [*resumes, {**about, **changed}]})


class PartKey(NamedTuple):
    """Position of a part: index of its evaluation set among the sets, and of its first problem in that set."""

    set_index: int
    start: int


class EvalFolder(ExperimentFolder):
    """`runs/<name>/` of an evaluation: `eval.json`, `samples.parquet`, and `parts/` until that file is complete."""

    kind, marker = "evaluation", RECORD_FILE

    @property
    def samples_path(self) -> Path:
        """`samples.parquet`, every completion; it exists once all of them do."""
        return self.path / SAMPLES_FILE

    def write_record(self, record: Mapping[str, object]) -> Path:
        """Write `eval.json`."""
        return write_json(self.path / RECORD_FILE, record)

    def write_part(self, key: PartKey, rows: Sequence[tables.EvalRow]) -> Path:
        """Store the completions of some problems until those of all problems exist."""
        return tables.write_eval_table(
            self.path / "parts" / f"{key.set_index:03d}-{key.start:08d}.parquet", rows
        )

    def read_parts(self) -> dict[PartKey, list[tables.EvalRow]]:
        """Return the stored parts. Raises UserError for a damaged one."""
        parts = {}
        for path in sorted((self.path / "parts").glob("*.parquet")):
            if match := _PART_NAME.fullmatch(path.name):
                try:
                    parts[PartKey(int(match[1]), int(match[2]))] = tables.read_eval_table(path)
                except UserError as error:
                    raise UserError(f"{error}; remove that file to sample its completions again") from None
        return parts

    def count_stored(self) -> int:
        """Return the number of stored completions, from the metadata of their files."""
        import pyarrow.parquet as pq

        parts = (path for path in (self.path / "parts").glob("*.parquet") if _PART_NAME.fullmatch(path.name))
        files = [self.samples_path] if self.samples_path.exists() else parts
        return sum(pq.read_metadata(path).num_rows for path in files)

    def write_samples(self, rows: Iterable[tables.EvalRow]) -> Path:
        """Write every completion to `samples.parquet`, then remove the parts, which it replaces."""
        path = tables.write_eval_table(self.samples_path, list(rows))
        self.drop_parts()
        return path

    def drop_parts(self) -> None:
        """Remove the parts, if there are any."""
        shutil.rmtree(self.path / "parts", ignore_errors=True)


def find_folder(text: str, runs_dir: Path, marker: str) -> Path | None:
    """Return the folder that `text` names and that contains the file `marker`, None where there is none.

    `text` is a name in `runs_dir`, else the path of the folder or of the file; ~ is the user's home. Raises UserError
    if a later version of the package has written the folder.
    """
    folders = (path.parent if path.name == marker else path for path in _candidates(text, runs_dir))
    paths = (path for path in folders if path_exists(path / marker))
    path = next(map(resolve_dots, paths), None)
    if path is not None:
        check_version(path)
    return path


def not_found(kind: str, text: str, runs_dir: Path, marker: str) -> UserError:
    """Return the error for a `text` that names no folder with the file `marker`, which an existing `kind` has.

    The message has the nearest name, and the last five in alphabetical order; for an existing folder, what it is.
    """
    existing = next(filter(path_exists, _candidates(text, runs_dir)), None)
    if kind == "run" and existing is not None:
        if other := other_folder(text, runs_dir):
            return other
        for folder in filter(is_run_folder, existing.absolute().parents):
            return UserError(f"{existing} is in the folder of a run; name the run: {relative_to_cwd(folder)}")
        return UserError(f"{existing} is not a run: it has no config.yaml; start a new run")
    if kind == "run" and (found := find_run(text, runs_dir)):
        return UserError(f"{text}: name the run alone; samples and view have --step {found[1]}")
    if not path_exists(runs_dir):
        return UserError(f"no {kind} {text[:200]!r}: there is no folder {runs_dir}; --runs-dir names another")
    names = folders_containing(runs_dir, marker)
    others = ", ".join(names[-5:]) or f"no {kind}s"
    listed = "; `bandpo runs` lists all" if kind == "run" and names else ""
    return UserError(f"no {kind} {text[:200]!r} in {runs_dir}{nearest(text, names)}; it has {others}{listed}")


def other_folder(text: str, runs_dir: Path) -> UserError | None:
    """Return the error for a `text` that should name a run and names an evaluation or a sweep; None for any other."""
    for folder in _candidates(text, runs_dir):
        for file, (what, commands) in _OTHER_FOLDERS.items():
            if path_exists(folder / file):
                choices = " or ".join(shell_command(words, folder, runs_dir) for words in commands)
                return UserError(f"{folder} is {what}, not a run; type {choices}")
    return None


def find_run(text: str, runs_dir: Path) -> tuple[RunFolder, int | None] | None:
    """Return the run that RUN or RUN@STEP names, with its step; None where there is no such run.

    RUN is a name in `runs_dir` or a path. Raises UserError if the step is not a number.
    """
    name, _, step = (text := str(text)).rpartition("@")  # a script may give the path of the folder
    for run in (text, name):  # a name may contain @
        for path in filter(is_run_folder, _candidates(run, runs_dir)):
            folder = RunFolder(resolve_dots(path))
            check_version(folder.path)
            if run == text:
                return folder, None
            if step.isdecimal() and len(step) <= 12:  # Python refuses to convert thousands of digits
                return folder, int(step)
            raise UserError(f"{text[:200]}: expected a step after @, as in {name}@100; not {step[:20]!r}")
    return None


def is_run_folder(path: Path) -> bool:
    """Return whether `path` is a run folder, which has config.yaml; the folder of a model has config.json."""
    return path_exists(path / "config.yaml") and not path_exists(path / "config.json")


def resolve_dots(path: Path) -> Path:
    """Return `path`, resolved where it ends in "." or "..", which are not names."""
    return path if path.name.strip(".") else path.resolve()


def shell_command(words: str, folder: Path, runs_dir: Path) -> str:
    """Return the shell command `bandpo WORDS FOLDER` for words such as `train --resume`, with a name or a path."""
    named = [folder.name, *([] if runs_dir == Path("runs") else ["--runs-dir", str(runs_dir)])]
    is_there = (runs_dir / folder.name).absolute() == folder.absolute()
    return shlex.join(["bandpo", *words.split(), *(named if is_there else [str(relative_to_cwd(folder))])])


def check_name(name: str, runs_dir: Path) -> str:
    """Return `name` if it is a valid name for a new folder, else raise UserError with a name that is.

    Refused: the empty name, paths into or out of the runs folder, blanks and characters with a meaning in a shell
    or file system, and the names that MLflow uses there.
    """
    if VALID_NAME.fullmatch(name := str(name)) and name not in RESERVED:
        return name
    raise UserError(
        f"--name {name!r} cannot be used: a run is a folder directly in {runs_dir}, and its name has at most 200 "
        "letters, digits and ._-+=,@, starts with a letter, a digit or _, and is not one that MLflow uses "
        f"({', '.join(RESERVED)}). Try: --name {unused_name(slug(name), runs_dir)}"
    )


def create_folder(runs_dir: Path, name: str) -> Path:
    """Create the folder `name` in `runs_dir` and return its path.

    A name of `timestamped` that another process has taken since gets a suffix: that process started in the same second.
    Raises UserError if another name is taken, the name is not valid, or the folder cannot be created.
    """
    path = runs_dir / check_name(name, runs_dir)
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        path.mkdir()
    except FileExistsError:
        if _TIMESTAMP.search(name):
            return create_folder(runs_dir, unused_name(name, runs_dir))
        raise UserError(
            f"{name!r} already exists in {runs_dir}: choose another name, --name {unused_name(name, runs_dir)}"
        ) from None
    except OSError as error:
        raise UserError(f"--runs-dir {runs_dir}: cannot create a folder there: {error.strerror}") from None
    sync(runs_dir)
    return path


def timestamped(stem: str) -> str:
    """Return the default name of a new folder: `stem` and the time, to the second."""
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def unused_name(stem: str, runs_dir: Path) -> str:
    """Return the first of `stem`, `stem-2`, `stem-3`, ... that does not exist in `runs_dir`."""
    name, count = stem, 1
    while path_exists(runs_dir / name) or name in RESERVED:
        count += 1
        name = f"{stem}-{count}"
    return name


def slug(name: str) -> str:
    """Return the valid name that is nearest to `name`: its last path part, with dashes for other characters."""
    last = re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    near = re.sub(r"[^A-Za-z0-9_.+=,@-]+", "-", last).lstrip(".+=,@-")[:190].rstrip(".-") or "run"
    return near if VALID_NAME.fullmatch(near) else f"run-{near}"


def _candidates(text: str, runs_dir: Path) -> list[Path]:
    """Return the paths that `text` can mean, in the order in which they are tried; none for an empty text."""
    return [runs_dir / text, user_path(text)] if text else []
