"""The folder of an evaluation: its figures and settings, and every completion that they were computed from."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bandpo_cli.errors import UserError, nearest
from bandpo_cli.paths import folders_containing, path_exists
from bandpo_cli.storage.files import write_json
from bandpo_cli.storage.run_folder import create_folder
from bandpo_cli.storage.tables import EvalRow, read_eval_table, write_eval_table

RECORD_FILE, SAMPLES_FILE = "eval.json", "samples.parquet"
_PART_NAME = re.compile(r"(\d+)-(\d+)\.parquet")


class PartKey(NamedTuple):
    """Where a part belongs: the evaluation set's place among the sets, and its first problem's among the problems."""

    set_index: int
    start: int


class EvalFolder:
    """`runs/<name>/` of an evaluation: `eval.json`, `samples.parquet`, and `parts/` until that one is whole.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, runs_dir: Path, name: str) -> EvalFolder:
        """Make the folder `name` in `runs_dir`. Raises UserError for a name that is taken or not plain."""
        return cls(create_folder(runs_dir, name))

    @classmethod
    def open(cls, runs_dir: Path, name: str) -> EvalFolder:
        """Return the existing evaluation that `name` names: a name in `runs_dir`, or a path.

        Raises UserError, with the nearest name, when there is none.
        """
        given = Path(name)
        for path in (runs_dir / name, given, *([given.parent] if given.name == RECORD_FILE else [])):
            if name and path_exists(path / RECORD_FILE):
                return cls(path if path.name.strip(".") else path.resolve())  # "." and ".." are no names
        names = folders_containing(runs_dir, RECORD_FILE)
        there = f"it has {', '.join(names[-5:])}" if names else "it has none"
        raise UserError(f"no evaluation {name[:200]!r} in {runs_dir}{nearest(name, names)}; {there}")

    @property
    def name(self) -> str:
        """The evaluation's name."""
        return self.path.name

    @property
    def samples_path(self) -> Path:
        """`samples.parquet`, every completion; there once all of them are."""
        return self.path / SAMPLES_FILE

    def write_record(self, record: Mapping[str, object]) -> Path:
        """Write `eval.json`."""
        return write_json(self.path / RECORD_FILE, record)

    def read_record(self) -> dict[str, Any]:
        """Return what `eval.json` holds. Raises UserError when it is damaged."""
        return read_record(self.path / RECORD_FILE)

    def write_part(self, key: PartKey, rows: Sequence[EvalRow]) -> Path:
        """Keep the completions of some problems until all of them are there."""
        return write_eval_table(self.path / "parts" / f"{key.set_index:03d}-{key.start:08d}.parquet", rows)

    def read_parts(self) -> dict[PartKey, list[EvalRow]]:
        """Return the parts that are there. Raises UserError for one that is damaged."""
        found = {}
        for path in sorted((self.path / "parts").glob("*.parquet")):
            if place := _PART_NAME.fullmatch(path.name):
                try:
                    found[PartKey(int(place[1]), int(place[2]))] = read_eval_table(path)
                except UserError as error:
                    raise UserError(f"{error}; remove that file to have its completions made anew") from None
        return found

    def count_stored(self) -> int:
        """Return how many completions are there, from what their files say of themselves."""
        import pyarrow.parquet as pq

        parts = (path for path in (self.path / "parts").glob("*.parquet") if _PART_NAME.fullmatch(path.name))
        files = [self.samples_path] if self.samples_path.exists() else parts
        return sum(pq.read_metadata(path).num_rows for path in files)

    def write_samples(self, rows: Iterable[EvalRow]) -> Path:
        """Write every completion to `samples.parquet`, then drop the parts, which it replaces."""
        path = write_eval_table(self.samples_path, list(rows))
        self.drop_parts()
        return path

    def drop_parts(self) -> None:
        """Remove the parts, if there are any."""
        shutil.rmtree(self.path / "parts", ignore_errors=True)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of an evaluation. Raises UserError when the file is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not readable as JSON: {(str(error).splitlines() or [''])[0][:200]}"
        ) from None
    if not isinstance(record, dict) or not isinstance(record.get("sets"), dict):
        raise UserError(f"{path}: this is not the record of an evaluation")
    return record
