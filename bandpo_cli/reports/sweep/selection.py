"""Runs told apart by their settings: which differ, and what an arm is called that has them."""

# MERGED: Which runs a report is of: those of a sweep's folder, or any run folders, told apart by their settings.
from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bandpo_cli.config.layers import flatten
from bandpo_cli.config.yaml_loader import read_yaml
from bandpo_cli.errors import UserError, nearest
from bandpo_cli.paths import path_exists
from bandpo_cli.storage.run_folder import is_valid_name

Settings = Mapping[str, Any]
"""Plain values by dotted key: `{"optim.lr": 1e-4, ...}`."""

ABSENT = "–"
_METHOD, _DIVERGENCE, _DELTA = "bounds.method", "bounds.divergence", "bounds.delta"
_TAGS = {"bounds": _METHOD, "task": "task.name"}  # what the rest of the section depends on
_WORDS = {"task.name": "task", "model.path": "model"}  # what says more than the last part of the key
_IGNORED_SECTIONS = ("seed", "tracking")  # what repeats an arm, and what does not touch it


def read_settings(folder: Path) -> dict[str, Any]:
    """Return every setting of the run in `folder`, by dotted key.

    Raises:
        UserError: there is no readable config.yaml.
    """
    path = folder / "config.yaml"
    if not path_exists(path):
        raise UserError("no config.yaml")
    content = read_yaml(path, path.name)
    if not isinstance(content, dict):
        raise UserError("config.yaml holds no settings")
    return flatten(content, expand_lists=True)


def differing_settings(runs: Iterable[Settings]) -> list[str]:
    """Return the keys that do not have one value in all runs, in the configs' order; seed and tracking left aside."""
    found = list(runs)
    keys = dict.fromkeys(key for run in found for key in run)
    return [
        key
        for key in keys
        if key.split(".")[0] not in _IGNORED_SECTIONS
        and len({format_setting(run.get(key, ABSENT)) for run in found}) > 1
    ]


def chosen_keys(by: Sequence[str], runs: Iterable[Settings]) -> list[str]:
    """Return the settings that `--by` names, a section standing for all of its own.

    Raises:
        UserError: a name is no setting of these runs.
    """
    keys = dict.fromkeys(key for run in runs for key in run)
    chosen: dict[str, None] = {}
    for name in by:
        found = [key for key in keys if key == name or key.startswith(f"{name}.")]
        if not found:
            parts = name.split(".")[-1]
            last = [key for key in keys if key.split(".")[-1] == parts]
            hint = f" (did you mean '{last[0]}'?)" if last else nearest(name, keys)
            raise UserError(f"--by {name}: no such setting{hint}; write it as in config.yaml, e.g. optim.lr")
        chosen.update(dict.fromkeys(found))
    return list(chosen)


def arm_names(runs: Sequence[Settings], keys: Sequence[str] | None = None) -> list[str]:
    """Return the name of each run's arm, made of the settings in `keys` or of all that differ: `kl 0.05 lr=1e-4`.

    Runs have the same name exactly when these settings are the same.
    """
    told = differing_settings(runs) if keys is None else list(keys)
    ids = [tuple(format_setting(run.get(key, ABSENT)) for key in told) for run in runs]
    said = _telling(runs, told) if keys is None else told
    drafts = [_name(run, said, by_method=keys is None) for run in runs]
    owners: dict[str, dict[tuple[str, ...], None]] = {}
    for draft, id_ in zip(drafts, ids, strict=True):
        owners.setdefault(draft, {})[id_] = None
    names = []
    for draft, id_ in zip(drafts, ids, strict=True):
        place = list(owners[draft]).index(id_)
        names.append(draft if place == 0 else f"{draft} #{place + 1}")
    return names


def _telling(runs: Sequence[Settings], keys: Sequence[str]) -> list[str]:
    """Leave out the settings that differ only because their methods, or their tasks, have different ones."""
    kept = []
    for key in keys:
        tag = _TAGS.get(key.split(".")[0])
        kinds: dict[str, list[Settings]] = {}
        for run in runs:
            kinds.setdefault(format_setting(run.get(tag, ABSENT)) if tag else "", []).append(run)
        if key == tag or any(
            len({format_setting(run.get(key, ABSENT)) for run in kind}) > 1 for kind in kinds.values()
        ):
            kept.append(key)
    return kept


def _name(run: Settings, keys: Sequence[str], by_method: bool) -> str:
    """Return the method's name where it counts, then `key=value` for the other settings that the run has."""
    words: list[str] = []
    rest = list(keys)
    if by_method or _METHOD in keys:
        whole = by_method or {_DIVERGENCE, _DELTA} <= set(keys)
        words.append(method_name(run) if whole else str(run.get(_METHOD, ABSENT)))
        rest = [key for key in rest if key not in ((_METHOD, _DIVERGENCE, _DELTA) if whole else (_METHOD,))]
    lasts = Counter(key.split(".")[-1] for key in keys)
    for key in rest:
        if key in run and not (key == "bounds.relax" and run[key] is None):
            last = key.split(".")[-1]
            word = _WORDS.get(key, last if lasts[last] == 1 else key)
            words.append(f"{word}={format_setting(run[key])}")
    return " ".join(words) or "other"


def method_name(run: Settings) -> str:
    """Return `clip`, or for a Band its trust region, `kl 0.05`."""
    method = str(run.get(_METHOD, "run"))
    if method != "band":
        return method
    return f"{run.get(_DIVERGENCE, method)} {format_setting(run.get(_DELTA, ABSENT))}"


def format_setting(value: Any) -> str:
    """Return a setting as a user would type it, `1e-4`, and two that differ differently."""
    if isinstance(value, list):
        return ",".join(map(format_setting, value))
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        short = short if float(short) == value else repr(value)
        scientific = re.sub(r"\.?0*e([+-])0*", r"e\1", f"{value:e}").replace("e+", "e")
        shorter = abs(value) < 0.01 and len(scientific) < len(short) and float(scientific) == value
        return scientific if shorter else short
    return str(value)


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
    runs = [_planned_run(path, number, each) for number, each in enumerate(plan["runs"], start=1)]
    baseline = plan.get("baseline")
    known = dict.fromkeys(run.arm for run in runs)
    if baseline is not None and str(baseline) not in known:
        raise UserError(
            f"{path}: baseline = {str(baseline)!r}: no arm of that name{nearest(str(baseline), known)}; "
            f"arms: {', '.join(known)}"
        )
    title = str(plan.get("name") or folder.resolve().name)
    return title, None if baseline is None else str(baseline), runs


def _planned_run(path: Path, number: int, entry: Any) -> ArmRun:
    keys = entry if isinstance(entry, dict) else {}
    missing = [key for key in ("name", "arm", "seed") if keys.get(key) is None]
    if missing:
        raise UserError(
            f"{path}: run {number} has no {missing[0]}; expected {{name: ..., arm: ..., seed: ...}}"
        )
    name, seed = str(keys["name"]), keys["seed"]
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UserError(f"{path}: run {number}: seed = {seed!r} is no whole number")
    if not is_valid_name(name):
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
    found = [_find_folder(path, runs_dir) for path in paths]
    if len(found) == 1 and os.path.isfile(found[0] / PLAN):
        title, planned, runs = read_sweep(found[0])
        selection = Selection(title, planned, runs, sweep=found[0])
        if by:
            selection = _group_by_settings(selection, by)
    else:
        runs = [run for path in found for run in _runs_in(path)]
        title = found[0].resolve().name if len(found) == 1 else f"{len(runs)} runs"
        selection = _group_by_settings(Selection(title, None, runs), by)
    _check_unique(run.folder for run in selection.runs)
    if baseline is not None:
        arms = dict.fromkeys(run.arm for run in selection.runs if run.arm)
        if baseline not in arms:
            raise UserError(
                f"--baseline {baseline}: no arm of that name{nearest(baseline, arms)}; arms: {', '.join(arms)}"
            )
        selection = replace(selection, baseline=baseline)
    return selection


def _find_folder(path: Path, runs_dir: Path) -> Path:
    """Return the folder that `path` names, on its own or in `runs_dir`."""
    for folder in (path, runs_dir / path):
        if os.path.isdir(folder):  # pathlib raises for a name that no file system could hold
            return folder
        if os.path.exists(folder):
            raise UserError(f"{folder}: is a file; give a sweep's folder, run folders, or a folder of runs")
    here = [path.parent, runs_dir] if len(path.parts) == 1 else [path.parent]
    names = [each.name for parent in here if path_exists(parent) for each in parent.glob("*/")]
    raise UserError(
        f"{str(path)[:200]}: no such folder{nearest(path.name, names)}; give a sweep's folder, run folders, "
        "or a folder of runs"
    )


def _runs_in(path: Path) -> list[ArmRun]:
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


def _group_by_settings(selection: Selection, by: Sequence[str]) -> Selection:
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
    rest = [] if keys is None else [key for key in differing_settings(settings.values()) if key not in keys]
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
        values = dict.fromkeys(format_setting(run[key]) for run in found if key in run)
        words.append(f"{key} ({', '.join(values)})")
    return ", ".join(words)


def _seed(settings: dict[str, Any], otherwise: int) -> int:
    seed = settings.get("seed", otherwise)
    return seed if isinstance(seed, int) else otherwise


def _check_unique(folders: Iterable[Path]) -> None:
    seen: set[Path] = set()
    for folder in folders:
        if folder.resolve() in seen:
            raise UserError(f"{folder}: given twice; name each run once")
        seen.add(folder.resolve())
