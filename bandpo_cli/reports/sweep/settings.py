"""Runs told apart by their settings: which differ, and what an arm is called that has them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bandpo_cli.config.yaml_text import read_yaml
from bandpo_cli.errors import UserError, nearest
from bandpo_cli.paths import is_there

Settings = Mapping[str, Any]
"""Plain values by dotted key: `{"optim.lr": 1e-4, ...}`."""

ABSENT = "–"
_METHOD, _DIVERGENCE, _DELTA = "bounds.method", "bounds.divergence", "bounds.delta"
_TAGS = {"bounds": _METHOD, "task": "task.name"}  # what the rest of the section depends on
_WORDS = {"task.name": "task", "model.path": "model"}  # what says more than the last part of the key
_ASIDE = ("seed", "tracking")  # what repeats an arm, and what does not touch it


def read_settings(folder: Path) -> dict[str, Any]:
    """Return every setting of the run in `folder`, by dotted key.

    Raises:
        UserError: there is no readable config.yaml.
    """
    path = folder / "config.yaml"
    if not is_there(path):
        raise UserError("no config.yaml")
    content = read_yaml(path, path.name)
    if not isinstance(content, dict):
        raise UserError("config.yaml holds no settings")
    return dict(_flat(content, ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the plain values; a list of plain values is one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{path}.{index}")
    else:
        yield path, value


def differing(runs: Iterable[Settings]) -> list[str]:
    """Return the keys that do not have one value in all runs, in the configs' order; seed and tracking left aside."""
    found = list(runs)
    keys = dict.fromkeys(key for run in found for key in run)
    return [
        key
        for key in keys
        if key.split(".")[0] not in _ASIDE and len({text(run.get(key, ABSENT)) for run in found}) > 1
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
    told = differing(runs) if keys is None else list(keys)
    ids = [tuple(text(run.get(key, ABSENT)) for key in told) for run in runs]
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
            kinds.setdefault(text(run.get(tag, ABSENT)) if tag else "", []).append(run)
        if key == tag or any(
            len({text(run.get(key, ABSENT)) for run in kind}) > 1 for kind in kinds.values()
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
            words.append(f"{word}={text(run[key])}")
    return " ".join(words) or "other"


def method_name(run: Settings) -> str:
    """Return `clip`, or for a Band its trust region, `kl 0.05`."""
    method = str(run.get(_METHOD, "run"))
    if method != "band":
        return method
    return f"{run.get(_DIVERGENCE, method)} {text(run.get(_DELTA, ABSENT))}"


def text(value: Any) -> str:
    """Return a setting as a user would type it, `1e-4`, and two that differ differently."""
    if isinstance(value, list):
        return ",".join(map(text, value))
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
