"""From a sweep's axes to its runs, each with a checked config, a name and an arm."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from bandpo_cli.config.layers import Layer, nest, read_value, resolve
from bandpo_cli.config.methods import BandSettings, method_classes
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.sweep import Settings, SweepConfig
from bandpo_cli.errors import ConfigError, nearest
from bandpo_cli.storage.run_folder import is_valid_name

_METHOD, _DIVERGENCE, _DELTA = "bounds.method", "bounds.divergence", "bounds.delta"
MATCH_PREFIX = "match:"
"""`match:clip` in place of a radius asks for the one at which the Band clips as many recorded tokens as clip does."""

DeltaMatcher = Callable[[BandSettings, str], float]
"""Returns the δ at which a Band matches the method of that name."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep: `name` is its folder, `arm` what it is averaged with over the seeds."""

    name: str
    arm: str
    seed: int
    config: RunConfig


def plan_runs(
    sweep: SweepConfig, layers: Sequence[Layer] = (), match: DeltaMatcher | None = None
) -> list[PlannedRun]:
    """Return the runs, all arms with the first seed, then all with the second: a sweep cut short still compares.

    Args:
        layers: settings below those of the sweep, as `resolve` takes them.
        match: turns `match:METHOD` into a radius.

    Raises:
        ConfigError: a setting is unknown or refused, two arms are the same, or none is left; one line.
    """
    arms = _arm_layers(sweep, [*layers, sweep.fixed], match)
    if sweep.baseline is not None and sweep.baseline not in arms:
        raise ConfigError(
            f"baseline = {sweep.baseline!r}: no arm of that name{nearest(sweep.baseline, arms)}; "
            f"arms: {', '.join(arms)}"
        )
    return [
        PlannedRun(
            f"{_plain(arm)}-s{seed}", arm, seed, resolve([*layers, sweep.fixed, *settings, {"seed": seed}])
        )
        for seed in sweep.seeds
        for arm, settings in arms.items()
    ]


def _arm_layers(
    sweep: SweepConfig, base: Sequence[Layer], match: DeltaMatcher | None
) -> dict[str, list[Layer]]:
    """Return the layers of settings of each arm, by its name."""
    varying = {key for key, values in sweep.axes.items() if len(values) > 1}
    arms: dict[str, list[Layer]] = {}
    seen: dict[RunConfig, str] = {}
    unused = set(sweep.axes)
    for named, settings in _combinations(sweep):
        method = _config_with_method(base, settings)
        kept = {
            key: value
            for key, value in settings.items()
            if _method_has_setting(method, key) or key not in sweep.axes
        }
        unused -= set(kept)
        if any(
            all(settings.get(key) == value for key, value in excluded.items()) for excluded in sweep.exclude
        ):
            continue
        layers: list[Layer] = [*map(nest, _method_before_rest(_resolve_match(kept, base, match)))]
        config = resolve([*base, *layers])
        name = _arm_name(named, kept, varying, config)
        if config in seen and seen[config] == name:
            continue  # an axis that this arm's method has no setting for
        if config in seen or name in arms:
            other = seen.get(config, name)
            raise ConfigError(f"the arms '{other}' and '{name}' are the same runs; leave one of them out")
        seen[config] = name
        arms[name] = layers
    if unused:
        axis = sorted(unused)[0]
        raise ConfigError(f"the axis '{axis}' applies to no arm: none of their methods has such a setting")
    if not arms:
        raise ConfigError("no runs are left: every combination is excluded")
    return arms


def _resolve_match(settings: Settings, base: Sequence[Layer], match: DeltaMatcher | None) -> Settings:
    """Return the settings with a radius in place of `match:METHOD`."""
    asked = settings.get(_DELTA)
    if not isinstance(asked, str) or not asked.startswith(MATCH_PREFIX):
        return settings
    if match is None:
        raise ConfigError(
            f"bounds.delta = {asked!r}: needs the tokens of a run to match on: --recorded RUN (recorded: in a file)"
        )
    others = {key: value for key, value in settings.items() if key != _DELTA}
    band = resolve([*base, *map(nest, _method_before_rest(others))]).bounds
    if not isinstance(band, BandSettings):
        raise ConfigError(f"bounds.delta = {asked!r}: only a Band has a radius, not '{band.method}'")
    return {**settings, _DELTA: match(band, asked.removeprefix(MATCH_PREFIX))}


def _combinations(sweep: SweepConfig) -> Iterator[tuple[str, Settings]]:
    """Yield each named arm ('' where there are none) with each combination of the axes' values."""
    for named, settings in (sweep.arms or {"": {}}).items():
        for values in product(*sweep.axes.values()):
            yield named, {**settings, **dict(zip(sweep.axes, values, strict=True))}


def _config_with_method(base: Sequence[Layer], settings: Settings) -> RunConfig:
    """Return the config with the method alone chosen: what tells which settings there are."""
    chosen = {key: value for key, value in settings.items() if key == _METHOD}
    return resolve([*base, *map(nest, [chosen] if chosen else [])])


def _method_has_setting(config: RunConfig, key: str) -> bool:
    """Tell whether a setting applies; an unknown one does, and `resolve` then names it."""
    section, _, name = key.rpartition(".")
    return section != "bounds" or name in type(config.bounds).model_fields or name not in _bounds_fields()


def _bounds_fields() -> set[str]:
    """Return the settings that some method has."""
    return {name for settings in method_classes().values() for name in settings.model_fields}


def _method_before_rest(settings: Settings) -> list[Settings]:
    """Split settings so that the method is chosen before what belongs to it."""
    method = {key: value for key, value in settings.items() if key == _METHOD}
    rest = {key: value for key, value in settings.items() if key != _METHOD}
    return [part for part in (method, rest) if part]


def _arm_name(named: str, settings: Settings, varying: set[str], config: RunConfig) -> str:
    """Name an arm by what makes it one: `clip`, `kl 0.05`, `kl 0.05 updates=16`."""
    words = [named] if named else []
    shown = {key: value for key, value in settings.items() if key in varying}
    band = config.bounds.method == "band"
    if _METHOD in shown and not (band and _DIVERGENCE in settings):
        words.append(str(shown[_METHOD]))
    if _DIVERGENCE in shown or (band and _METHOD in shown and _DIVERGENCE in settings):
        words.append(str(settings[_DIVERGENCE]))
    if _DELTA in shown:
        words.append(_short(shown[_DELTA]))
    words += [
        f"{key.rpartition('.')[2]}={_short(value)}"
        for key, value in shown.items()
        if key not in (_METHOD, _DIVERGENCE, _DELTA)
    ]
    return " ".join(words) or config.bounds.method


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _plain(arm: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.=+-]+", "-", arm).strip("-.=+") or "run"


def check_names(runs: Sequence[PlannedRun]) -> None:
    """Refuse arms whose names come to one folder.

    Raises:
        ConfigError: two runs would be written to the same place, or one has a name that no folder can have.
    """
    seen: dict[str, str] = {}
    for run in runs:
        if not is_valid_name(run.name):
            raise ConfigError(
                f"the arm '{run.arm:.100}' cannot be a folder's name ({len(run.name)} characters, 200 at most); give "
                "it a shorter one in arms:"
            )
        if run.name in seen:
            raise ConfigError(
                f"the arms '{seen[run.name]}' and '{run.arm}' come to one folder name; rename one of them"
            )
        seen[run.name] = run.arm


def parse_axes(flags: Mapping[str, str | None]) -> dict[str, list[Any]]:
    """Read comma lists by dotted setting; values are read as YAML, as `--set` reads them.

    Raises:
        ConfigError: a list is empty or has an empty place.
    """
    axes = {}
    for key, text in flags.items():
        if text is None:
            continue
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise ConfigError(
                f"--{key.rpartition('.')[2]} {text!r}: an empty place; values are apart by commas: 0.01,0.05"
            )
        axes[key] = [read_value(part, f"{key}={part}") for part in parts]
    return axes
