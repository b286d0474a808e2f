"""Which runs a report is of: those of a sweep's folder, or any run folders, told apart by their settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bandpo_cli.config.yaml_text import read_yaml
from bandpo_cli.errors import UserError, nearest
from bandpo_cli.paths import is_there
from bandpo_cli.reports.sweep.settings import arm_names, chosen_keys, differing, read_settings, text
from bandpo_cli.tracking.run_names import is_name

PLAN = "sweep.yaml"


@dataclass(frozen=True)
class ArmRun:
    """A run, and what it is a repetition of.

    Attributes:
        arm: the name of the settings that it shares with the arm's other runs.
        seed: what it is paired with the baseline's run by.
        folder: its run folder; one that is not there is listed in the report.
    """

    arm: str
    seed: int
    folder: Path


@dataclass(frozen=True)
class Selection:
    """What the user asked a report of.

    Attributes:
        title: what is compared, in a word.
        baseline: the arm that the others are compared with; None for none.
        runs: in the order of the plan, or as they were given.
        notes: what a reader must know about how the arms were made.
        sweep: the sweep's folder; None for runs from anywhere.
    """

    title: str
    baseline: str | None
    runs: list[ArmRun]
    notes: tuple[str, ...] = ()
    sweep: Path | None = None


def read_sweep(folder: Path) -> tuple[str, str | None, list[ArmRun]]:
    """Return a sweep's name, its baseline arm and its runs, those without a folder included.

    Raises:
        UserError: its sweep.yaml is damaged; the line says where.
    """
    path = folder / PLAN
    plan = read_yaml(path, str(path))
    if not isinstance(plan, dict) or not isinstance(plan.get("runs"), list) or not plan["runs"]:
        raise UserError(
            f"{path}: lists no runs; expected `runs:` with `- {{name: ..., arm: ..., seed: ...}}`"
        )
    runs = [_planned(path, number, each) for number, each in enumerate(plan["runs"], start=1)]
    baseline = plan.get("baseline")
    known = dict.fromkeys(run.arm for run in runs)
    if baseline is not None and str(baseline) not in known:
        raise UserError(
            f"{path}: baseline = {str(baseline)!r}: no arm of that name{nearest(str(baseline), known)}; "
            f"arms: {', '.join(known)}"
        )
    title = str(plan.get("name") or folder.resolve().name)
    return title, None if baseline is None else str(baseline), runs


def _planned(path: Path, number: int, entry: Any) -> ArmRun:
    keys = entry if isinstance(entry, dict) else {}
    missing = [key for key in ("name", "arm", "seed") if keys.get(key) is None]
    if missing:
        raise UserError(
            f"{path}: run {number} has no {missing[0]}; expected {{name: ..., arm: ..., seed: ...}}"
        )
    name, seed = str(keys["name"]), keys["seed"]
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UserError(f"{path}: run {number}: seed = {seed!r} is no whole number")
    if not is_name(name):
        raise UserError(f"{path}: run {number}: name = {name!r} is no folder's name")
    return ArmRun(str(keys["arm"]), seed, path.parent / name)


def select_runs(
    paths: Sequence[Path], runs_dir: Path, baseline: str | None = None, by: Sequence[str] = ()
) -> Selection:
    """Return the runs that `paths` name: one sweep's folder, or run folders and folders that hold them.

    A path that does not exist is looked for in `runs_dir`. The arms of a sweep are as its plan names them; of anything
    else, and with `by`, they are made of the settings that differ, or of those that `by` names.

    Raises:
        UserError: a path is nothing of the kind, or leads to a run twice; `baseline` or `by` name what is not there.
    """
    found = [_locate(path, runs_dir) for path in paths]
    if len(found) == 1 and os.path.isfile(found[0] / PLAN):
        title, planned, runs = read_sweep(found[0])
        selection = Selection(title, planned, runs, sweep=found[0])
        if by:
            selection = _by_settings(selection, by)
    else:
        runs = [run for path in found for run in _runs_at(path)]
        title = found[0].resolve().name if len(found) == 1 else f"{len(runs)} runs"
        selection = _by_settings(Selection(title, None, runs), by)
    _refuse_twice(run.folder for run in selection.runs)
    if baseline is not None:
        arms = dict.fromkeys(run.arm for run in selection.runs if run.arm)
        if baseline not in arms:
            raise UserError(
                f"--baseline {baseline}: no arm of that name{nearest(baseline, arms)}; arms: {', '.join(arms)}"
            )
        selection = replace(selection, baseline=baseline)
    return selection


def _locate(path: Path, runs_dir: Path) -> Path:
    """Return the folder that `path` names, on its own or in `runs_dir`."""
    for folder in (path, runs_dir / path):
        if os.path.isdir(folder):  # pathlib raises for a name that no file system could hold
            return folder
        if os.path.exists(folder):
            raise UserError(f"{folder}: is a file; give a sweep's folder, run folders, or a folder of runs")
    here = [path.parent, runs_dir] if len(path.parts) == 1 else [path.parent]
    names = [each.name for parent in here if is_there(parent) for each in parent.glob("*/")]
    raise UserError(
        f"{str(path)[:200]}: no such folder{nearest(path.name, names)}; give a sweep's folder, run folders, "
        "or a folder of runs"
    )


def _runs_at(path: Path) -> list[ArmRun]:
    """Return the runs in a folder; arm and seed are filled in where nobody has named them."""
    if os.path.isfile(path / "config.yaml"):
        return [ArmRun("", 0, path)]
    if os.path.isfile(path / PLAN):
        return read_sweep(path)[2]
    folders = sorted(each.parent for each in path.glob("*/config.yaml"))
    if not folders:
        sweeps = sorted(each.parent.name for each in path.glob(f"*/{PLAN}"))
        there = f"; it holds sweeps, give one: {', '.join(sweeps[-5:])}" if sweeps else ""
        raise UserError(f"{path}: no runs here (no config.yaml, no {PLAN}, and none a folder below){there}")
    return [ArmRun("", 0, folder) for folder in folders]


def _by_settings(selection: Selection, by: Sequence[str]) -> Selection:
    """Return the same runs with arms made of their settings. A run without settings keeps what it was called."""
    settings: dict[Path, dict[str, Any]] = {}
    for run in selection.runs:
        try:
            settings[run.folder] = read_settings(run.folder)
        except UserError:
            continue  # listed in the report, with the reason
    keys = chosen_keys(by, settings.values()) if by else None
    names = dict(zip(settings, arm_names(list(settings.values()), keys), strict=True))
    runs = [
        ArmRun(names.get(run.folder, run.arm), _seed(settings.get(run.folder, {}), run.seed), run.folder)
        for run in selection.runs
    ]
    rest = [] if keys is None else [key for key in differing(settings.values()) if key not in keys]
    notes = (
        []
        if not rest
        else [
            f"The arms were made by {', '.join(by)} alone; the runs also differ in {_values(rest, settings.values())}."
        ]
    )
    baseline = selection.baseline if selection.baseline in names.values() else None
    return replace(selection, runs=runs, baseline=baseline, notes=(*selection.notes, *notes))


def _values(keys: Iterable[str], runs: Iterable[dict[str, Any]]) -> str:
    """Return `optim.lr (1e-4, 2e-4), ...`."""
    found = list(runs)
    words = []
    for key in keys:
        values = dict.fromkeys(text(run[key]) for run in found if key in run)
        words.append(f"{key} ({', '.join(values)})")
    return ", ".join(words)


def _seed(settings: dict[str, Any], otherwise: int) -> int:
    seed = settings.get("seed", otherwise)
    return seed if isinstance(seed, int) else otherwise


def _refuse_twice(folders: Iterable[Path]) -> None:
    seen: set[Path] = set()
    for folder in folders:
        if folder.resolve() in seen:
            raise UserError(f"{folder}: given twice; name each run once")
        seen.add(folder.resolve())
