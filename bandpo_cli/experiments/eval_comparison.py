"""Comparison of two stored evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bandpo_cli.errors import UserError, nearest
from bandpo_cli.paths import folders_containing, user_path
from bandpo_cli.storage.eval_folder import RECORD_FILE, read_record
from bandpo_cli.storage.files import step_of
from bandpo_cli.storage.run_folder import find_folder, find_run

if TYPE_CHECKING:
    from bandpo_cli.evaluation.compare import Comparison


@dataclass(frozen=True)
class ComparisonResult:
    """Two evaluations compared: the files of their records, and the comparison by evaluation set."""

    path_a: Path
    path_b: Path
    sets: Mapping[str, Comparison]


def compare(a: str, b: str, runs_dir: Path | str = "runs") -> ComparisonResult:
    """Compare two evaluations problem by problem: B − A, with paired 95% intervals.

    Args:
        a: an evaluation's name in `runs_dir`, its folder or its eval.json; or RUN or RUN@STEP as evaluated in training.
        b: another one.
        runs_dir: the folder of evaluations and runs.

    Raises:
        UserError: there is no such evaluation, or the two share no problem.
    """
    from bandpo_cli.evaluation.compare import compare as compare_records

    path_a, path_b = find_record(a, Path(runs_dir)), find_record(b, Path(runs_dir))
    return ComparisonResult(path_a, path_b, compare_records(read_record(path_a), read_record(path_b)))


def find_record(text: str, runs_dir: Path) -> Path:
    """Return the record that `text` names: an evaluation, a JSON file, or RUN or RUN@STEP as evaluated in training.

    Raises:
        UserError: there is none.
    """
    folder = find_folder(text, runs_dir, RECORD_FILE)
    if folder is not None:
        return folder / RECORD_FILE
    if Path(text).suffix == ".json":
        return user_path(text)
    found = find_run(text, runs_dir)
    if found is None:
        names = sorted(
            [*folders_containing(runs_dir, RECORD_FILE), *folders_containing(runs_dir, "config.yaml")]
        )
        raise UserError(
            f"no evaluation {text[:200]!r} in {runs_dir}{nearest(text, names)}; give an evaluation's name, folder or "
            f"{RECORD_FILE}, or RUN@STEP"
        )
    run, step = found
    steps: dict[int, Path] = {
        number: path
        for path in sorted((run.path / "evals").glob("step-*.json"))
        if (number := step_of(path)) is not None
    }
    if not steps:
        raise UserError(f"{text}: the run in {run.path} was not evaluated in training")
    step = max(steps) if step is None else step
    if step not in steps:
        raise UserError(f"{text}: not evaluated at that step; evaluated at: {', '.join(map(str, steps))}")
    return steps[step]
