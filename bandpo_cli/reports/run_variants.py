"""Selection of the runs of a report and their grouping into variants.

The runs of a sweep have the variants of its plan (`sweep.yaml`). Other runs are grouped by their settings: runs whose
configs differ only in `seed` and in settings without effect on the results (`tracking`, `checkpoint`, ...) are one
variant, named by its method and by the settings that differ.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bandpo_cli.config.layers import flatten, read_yaml
from bandpo_cli.config.run import WITHOUT_EFFECT
from bandpo_cli.errors import UserError, nearest
from bandpo_cli.methods import METHODS
from bandpo_cli.paths import folders_containing, path_exists
from bandpo_cli.storage.files import file_digest
from bandpo_cli.storage.run_folder import VERL_FILE
from bandpo_cli.storage.run_record import read_parent
from bandpo_cli.storage.sweep_folder import PLAN_FILE, SweepFolder

Settings = Mapping[str, Any]
"""Plain values by dotted key: `{"optim.lr": 1e-4, ...}`."""

ABSENT = "–"
MAX_LISTED = 6  # variants or settings that a note lists
_METHOD, _DIVERGENCE, _DELTA = "bounds.method", "bounds.divergence", "bounds.delta"
_TAGS = {"bounds": _METHOD, "code": _METHOD, "task": "task.name"}  # decides which settings its section has
_LABELS = {"task.name": "task", "model.path": "model"}  # clearer than the last part of the key
SAME_VARIANT = ("seed", *WITHOUT_EFFECT)
"""Settings and sections in which the runs of a variant may differ: the seed makes repetitions of a variant."""


@dataclass(frozen=True)
class VariantRun:
    """A run and the variant that it belongs to.

    Attributes:
        seed: runs of different variants are paired by it.
        folder: run folder. A missing folder is allowed: the report lists the run as excluded.
    """

    variant: str
    seed: int
    folder: Path


@dataclass(frozen=True)
class Selection:
    """The runs of a report, in the order of the plan, or as given.

    Attributes:
        title: name of the sweep or of the folder, or the number of runs.
        notes: sentences about how the variants were formed.
        sweep: None for runs selected in another way.
    """

    title: str
    baseline: str | None
    runs: list[VariantRun]
    notes: tuple[str, ...] = ()
    sweep: SweepFolder | None = None


def select_runs(
    paths: Sequence[Path], runs_dir: Path, baseline: str | None = None, by: Sequence[str] = ()
) -> Selection:
    """Return the runs that `paths` name: the folder of one sweep, or run folders and folders that contain them.

    A path that does not exist is looked up in `runs_dir`. The variants of a single sweep are those of its plan. In all
    other cases, and with `by`, runs are grouped by the settings that differ, or by the settings that `by` names. Raises
    UserError if a path is neither, two paths lead to the same run, or a name in `by` is unknown.
    """
    folders = [_find_folder(path, runs_dir) for path in paths]
    if len(folders) == 1 and os.path.isfile(folders[0] / PLAN_FILE):
        selection = read_sweep(folders[0])
    else:
        runs = [run for folder in folders for run in _runs_in(folder)]
        title = folders[0].resolve().name if len(folders) == 1 else f"{len(runs)} runs"
        selection = Selection(title, None, runs)
    if by or selection.sweep is None:
        selection = _group_by_settings(selection, by)
    folder, times = Counter(run.folder.resolve() for run in selection.runs).most_common(1)[0]
    if times > 1:
        raise UserError(f"{folder}: given twice; name each run once")
    return selection if baseline is None else replace(selection, baseline=baseline)


def read_sweep(folder: Path) -> Selection:
    """Return the runs of a sweep with the variants of its plan; raise UserError if `sweep.yaml` is damaged."""
    sweep = SweepFolder.read(folder)
    runs = [VariantRun(run.variant, run.seed, sweep.path / run.name) for run in sweep.runs]
    return Selection(str(sweep.plan.get("name") or folder.resolve().name), sweep.baseline, runs, sweep=sweep)


def read_settings(folder: Path) -> dict[str, Any]:
    """Return all settings of the run in `folder` by dotted key.

    A run that verl trained also has `engine`, and a fork has `fork`, the checkpoint that it continues. The copies of
    custom code are settings, too: runs with different code are different variants. Raises UserError if `config.yaml` is
    missing or damaged.
    """
    path = folder / "config.yaml"
    if not path_exists(path):
        raise UserError("no config.yaml")
    if not isinstance(content := read_yaml(path, path.name), dict):
        raise UserError("config.yaml holds no settings")
    engine = {"engine": "verl"} if path_exists(folder / VERL_FILE) else {}
    parent = read_parent(folder)
    code = {f"code.{file.stem}": file_digest(file)[:8] for file in sorted(folder.glob("*.py"))}
    return flatten(content, expand_lists=True) | engine | code | ({} if parent is None else {"fork": parent})


def common_start(runs: Sequence[VariantRun]) -> int:
    """Return the step of the checkpoint that all runs were forked from; 0 if they do not have one in common."""
    parents = {read_parent(run.folder) for run in runs}
    step = (parents.pop() or "").rpartition("@")[2] if len(parents) == 1 else ""
    return int(step) if step.isdecimal() else 0


def is_within(key: str, sections: Iterable[str]) -> bool:
    """Return whether a setting is one of `sections`, or lies in one of them."""
    return f"{key}.".startswith(tuple(f"{section}." for section in sections))


def differing_settings(runs: Iterable[Settings]) -> list[str]:
    """Return the keys outside `SAME_VARIANT` whose values differ between the runs, in the order of the configs."""
    listed = list(runs)
    keys = dict.fromkeys(key for run in listed for key in run if not is_within(key, SAME_VARIANT))
    # Which modules a run has follows from other settings.
    having = {key: [run for run in listed if key in run or not is_within(key, ["code"])] for key in keys}
    return [key for key in keys if len({setting_texts(run, [key]) for run in having[key]}) > 1]


def chosen_keys(by: Sequence[str], runs: Iterable[Settings]) -> list[str]:
    """Return the settings that `--by` names; the name of a section stands for all its settings."""
    keys = dict.fromkeys(key for run in runs for key in run)
    chosen: dict[str, None] = {}
    for name in by:
        named = [key for key in keys if is_within(key, [name])]
        if not named:
            ending = [key for key in keys if key.split(".")[-1] == name.split(".")[-1]]
            hint = f" (did you mean '{ending[0]}'?)" if ending else nearest(name, keys)
            raise UserError(f"--by {name}: no such setting{hint}; write it as in config.yaml, e.g. optim.lr")
        chosen |= dict.fromkeys(named)
    return list(chosen)


def variant_names(runs: Sequence[Settings], keys: Sequence[str] | None = None) -> list[str]:
    """Return the name of each run's variant, such as `kl 0.05 lr=1e-4`, made of all settings that differ or of `keys`.

    Two runs have the same name exactly when these settings are equal.
    """
    compared_keys = differing_settings(runs) if keys is None else list(keys)
    shown_keys = _independent_keys(runs, compared_keys) if keys is None else compared_keys
    names, numbers = [], defaultdict[str, dict[tuple[str, ...], int]](dict)
    for run in runs:
        name = _variant_name(run, shown_keys, by_method=keys is None)
        number = numbers[name].setdefault(setting_texts(run, compared_keys), len(numbers[name]) + 1)
        names.append(name if number == 1 else f"{name} #{number}")
    return names


def method_name(run: Settings) -> str:
    """Return the name of a method, `clip`; with divergence and radius if it has them, `kl 0.05`, `dppo kl 0.05`."""
    method = str(run.get(_METHOD, "run"))
    entry = METHODS.get(method)
    if entry is None or not entry.trust_region:
        return method
    name = "" if entry.named_by_region else f"{method} "
    return f"{name}{run.get(_DIVERGENCE, method)} {format_setting(run.get(_DELTA, ABSENT))}"


def shorten_list(names: Sequence[str]) -> str:
    """Return the first `MAX_LISTED` names, and the number of the others."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def format_setting(value: Any) -> str:
    """Return a setting as a user would type it, such as `1e-4`; different values have different texts."""
    if isinstance(value, list):
        return ",".join(map(format_setting, value))
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        short = f"{value:g}" if float(f"{value:g}") == value else repr(value)
        if not abs(value) < 0.01:
            return short
        digits, _, exponent = f"{value:e}".partition("e")
        scientific = f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
        return scientific if len(scientific) < len(short) and float(scientific) == value else short
    return str(value)


def _find_folder(path: Path, runs_dir: Path) -> Path:
    """Return the folder that `path` names, as it is or in `runs_dir`."""
    places = (path, runs_dir / path)
    for folder in filter(os.path.isdir, places):  # pathlib would raise for a name that is too long
        return folder
    parents = [path.parent, runs_dir] if len(path.parts) == 1 else [path.parent]
    names = [folder.name for parent in parents if path_exists(parent) for folder in parent.glob("*/")]
    is_file = any(map(os.path.exists, places))
    problem = "is a file" if is_file else f"no such folder{nearest(path.name, names)}"
    raise UserError(f"{str(path)[:200]}: {problem}; give a sweep's folder, run folders, or a folder of runs")


def _runs_in(path: Path) -> list[VariantRun]:
    """Return the runs in a folder; those outside a sweep have neither variant nor seed yet."""
    if os.path.isfile(path / "config.yaml"):
        return [VariantRun("", 0, path)]
    if os.path.isfile(path / PLAN_FILE):
        return read_sweep(path).runs
    if runs := folders_containing(path, "config.yaml"):
        return [VariantRun("", 0, path / name) for name in runs]
    sweeps = folders_containing(path, PLAN_FILE)
    hint = f"; it holds sweeps, give one: {', '.join(sweeps[-5:])}" if sweeps else ""
    raise UserError(f"{path}: no runs here (no config.yaml or {PLAN_FILE}, here or in its subfolders){hint}")


def _group_by_settings(selection: Selection, by: Sequence[str]) -> Selection:
    """Return the same runs with variants made of their settings. A run without readable settings keeps its variant."""
    settings: dict[Path, dict[str, Any]] = {}
    for run in selection.runs:
        with suppress(UserError):  # the report lists the run with the reason
            settings[run.folder] = read_settings(run.folder)
    keys = chosen_keys(by, settings.values()) if by else None
    names = dict(zip(settings, variant_names(list(settings.values()), keys), strict=True))
    runs = [
        replace(run, variant=names[run.folder], seed=settings[run.folder].get("seed", run.seed))
        if run.folder in names
        else run
        for run in selection.runs
    ]
    others = []
    for key in differing_settings(settings.values()) if by else ():
        if key not in (keys or ()):
            values = dict.fromkeys(format_setting(run[key]) for run in settings.values() if key in run)
            others.append(f"{key} ({', '.join(values)})")
    differ = f"the runs also differ in {', '.join(others)}"
    note = f"The variants are grouped by {', '.join(by)} only; {differ}."
    baseline = selection.baseline if selection.baseline in names.values() else None
    return replace(selection, runs=runs, baseline=baseline, notes=(note,) if others else ())


def setting_texts(run: Settings, keys: Iterable[str]) -> tuple[str, ...]:
    """Return these settings as text, `ABSENT` for one that the run does not have."""
    return tuple(format_setting(run.get(key, ABSENT)) for key in keys)


def _independent_keys(runs: Sequence[Settings], keys: Sequence[str]) -> list[str]:
    """Return `keys` without those that differ only because the runs' methods or tasks have different settings."""

    def is_independent(key: str) -> bool:
        tag = _TAGS.get(key.split(".")[0], key)
        values = {setting_texts(run, [tag, key]) for run in runs}
        return key == tag or len(values) > len({value for value, _ in values})

    return [*filter(is_independent, keys)]


def _variant_name(run: Settings, keys: Sequence[str], by_method: bool) -> str:
    """Return the method, where `by_method` or `keys` include it, then `key=value` for the run's other settings."""
    words, named = [], list[str]()
    if by_method or _METHOD in keys:
        with_radius = by_method or {_DIVERGENCE, _DELTA} <= set(keys)
        words.append(method_name(run) if with_radius else str(run.get(_METHOD, ABSENT)))
        named = [_METHOD, _DIVERGENCE, _DELTA] if with_radius else [_METHOD]
    last_parts = Counter(key.split(".")[-1] for key in keys)
    for key in keys:
        if key in run and key not in named and not (key == "bounds.relax" and run[key] is None):
            last_part = key.split(".")[-1]
            label = _LABELS.get(key, last_part if last_parts[last_part] == 1 else key)
            words.append(f"{label}={format_setting(run[key])}")
    return " ".join(words) or "other"
