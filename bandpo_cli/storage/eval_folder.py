"""Evaluation folder: metrics and settings in `eval.json`, and every completion that they were computed from."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bandpo_cli.errors import UserError
from bandpo_cli.paths import read_json_object
from bandpo_cli.storage.files import step_of, write_json
from bandpo_cli.storage.run_folder import ExperimentFolder
from bandpo_cli.storage.tables import EvalRow, read_eval_table, write_eval_table

RECORD_FILE, SAMPLES_FILE = "eval.json", "samples.parquet"
EVALUATION_COLUMNS = ("step", "set", "metric", "value", "low", "high", "problems", "completions")
_PART_NAME = re.compile(r"(\d+)-(\d+)\.parquet")


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

    def write_part(self, key: PartKey, rows: Sequence[EvalRow]) -> Path:
        """Store the completions of some problems until those of all problems exist."""
        return write_eval_table(self.path / "parts" / f"{key.set_index:03d}-{key.start:08d}.parquet", rows)

    def read_parts(self) -> dict[PartKey, list[EvalRow]]:
        """Return the stored parts. Raises UserError for a damaged one."""
        parts = {}
        for path in sorted((self.path / "parts").glob("*.parquet")):
            if match := _PART_NAME.fullmatch(path.name):
                try:
                    parts[PartKey(int(match[1]), int(match[2]))] = read_eval_table(path)
                except UserError as error:
                    raise UserError(f"{error}; remove that file to sample its completions again") from None
        return parts

    def count_stored(self) -> int:
        """Return the number of stored completions, from the metadata of their files."""
        import pyarrow.parquet as pq

        parts = (path for path in (self.path / "parts").glob("*.parquet") if _PART_NAME.fullmatch(path.name))
        files = [self.samples_path] if self.samples_path.exists() else parts
        return sum(pq.read_metadata(path).num_rows for path in files)

    def write_samples(self, rows: Iterable[EvalRow]) -> Path:
        """Write every completion to `samples.parquet`, then remove the parts, which it replaces."""
        path = write_eval_table(self.samples_path, list(rows))
        self.drop_parts()
        return path

    def drop_parts(self) -> None:
        """Remove the parts, if there are any."""
        shutil.rmtree(self.path / "parts", ignore_errors=True)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of an evaluation, the content of `eval.json`. Raises UserError for any other file."""
    record = read_json_object(path)
    if not isinstance(record.get("sets"), dict):
        raise UserError(f"{path}: this is not the record of an evaluation: it has no sets")
    return record


def iterate_evaluations(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the `EVALUATION_COLUMNS` of each metric in `evals/` of a run. Raises UserError if a file is damaged."""
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
