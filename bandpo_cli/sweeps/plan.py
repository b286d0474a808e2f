"""Plan of a sweep: the runs of its arms, axes and seeds, each with a validated config and a name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from bandpo_cli.config.base import choice_of
from bandpo_cli.config.layers import Layer, nest, read_value, resolve, split_values
from bandpo_cli.config.methods import TrustRegionSettings, method_classes
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.sweep import Settings, SweepConfig
from bandpo_cli.errors import ConfigError, nearest
from bandpo_cli.registries import METHODS
from bandpo_cli.registries.methods import method_name
from bandpo_cli.storage.run_folder import is_valid_name

_METHOD, _DIVERGENCE, _DELTA = "bounds.method", "bounds.divergence", "bounds.delta"
MATCH_PREFIX = "match:"
"""`match:clip` as a radius stands for the δ at which the trust region clips as many recorded tokens as clip does."""

DeltaMatcher = Callable[[TrustRegionSettings, str], float]
"""(settings of a trust region, name of a method) -> the δ at which the region clips as many tokens as that method."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep: `name` is its folder.

    The runs of an `arm` differ in the seed alone, those of a `group` also in the values of the axes, except method and
    divergence: a group is what `tuned_on` compares the settings of.
    """

    name: str
    arm: str
    group: str
    seed: int
    config: RunConfig


@dataclass(frozen=True)
class _Arm:
    """The settings of an arm, as layers, and its group."""

    layers: list[Layer]
    group: str


def plan_runs(
    sweep: SweepConfig, layers: Sequence[Layer] = (), match: DeltaMatcher | None = None
) -> list[PlannedRun]:
    """Return the runs: all arms with the first seed, then all with the second, and so on.

    In this order an interrupted sweep can still compare its arms.

    Args:
        layers: settings that the sweep's settings override, as for `resolve`.
        match: returns the radius for `match:METHOD`.

    Raises:
        ConfigError: a setting is unknown or invalid, two arms are equal, or no arm is left.
    """
    arms = _arm_layers(sweep, [*layers, sweep.fixed], match)
    _check_baseline(sweep, arms)
    return [
        PlannedRun(
            run_name(arm, seed),
            arm,
            settings.group,
            seed,
            resolve([*layers, sweep.fixed, *settings.layers, {"seed": seed}]),
        )
        for seed in sweep.seeds
        for arm, settings in arms.items()
    ]


def plan_tuned_runs(
    sweep: SweepConfig, tuned: Mapping[str, Layer], layers: Sequence[Layer] = ()
) -> list[PlannedRun]:
    """Return a run of each arm in `tuned` with each seed, in the order of `plan_runs`.

    Args:
        tuned: all settings of each arm; those of `layers` and of `sweep.fixed` override them.
        layers: settings of all runs.

    Raises:
        ConfigError: a setting is not valid, or two arms are equal.
    """
    _check_baseline(sweep, tuned)
    runs = [
        PlannedRun(
            run_name(arm, seed), arm, arm, seed, resolve([settings, *layers, sweep.fixed, {"seed": seed}])
        )
        for seed in sweep.seeds
        for arm, settings in tuned.items()
    ]
    arms: dict[RunConfig, str] = {}
    for run in runs:
        other = arms.setdefault(run.config, run.arm)
        if other != run.arm:
            raise ConfigError(f"the arms '{other}' and '{run.arm}' are the same runs")
    return runs


def run_name(arm: str, seed: int) -> str:
    """Return the folder name of an arm's run with this seed."""
    return f"{_slug(arm)}-s{seed}"


def check_names(runs: Sequence[PlannedRun]) -> None:
    """Raise ConfigError if a run's name is not a valid folder name, or two runs have the same one."""
    seen: dict[str, str] = {}
    for run in runs:
        if not is_valid_name(run.name):
            raise ConfigError(
                f"the arm '{run.arm:.100}' gives no valid folder name ({len(run.name)} characters, 200 at most); "
                "give it a shorter name in arms:"
            )
        if run.name in seen:
            raise ConfigError(
                f"the arms '{seen[run.name]}' and '{run.arm}' have the same folder name; rename one of them"
            )
        seen[run.name] = run.arm


def parse_axes(flags: Mapping[str, str | None]) -> dict[str, list[Any]]:
    """Return the values of comma-separated lists by dotted setting; each value is parsed as YAML, as for `--set`.

    Args:
        flags: text of each flag by dotted setting; None where the flag was not given.

    Raises:
        ConfigError: a list is empty or has an empty item.
    """
    axes = {}
    for key, text in flags.items():
        if text is None:
            continue
        items = split_values(text)
        if not all(items):
            raise ConfigError(
                f"--{key.rpartition('.')[2]} {text!r}: an empty item; separate values by commas: 0.01,0.05"
            )
        axes[key] = [read_value(item, f"{key}={item}") for item in items]
    return axes


def _check_baseline(sweep: SweepConfig, arms: Mapping[str, Any]) -> None:
    if sweep.baseline is not None and sweep.baseline not in arms:
        raise ConfigError(
            f"baseline = {sweep.baseline!r}: no arm of that name{nearest(sweep.baseline, arms)}; "
            f"arms: {', '.join(arms)}"
        )


def _arm_layers(sweep: SweepConfig, base: Sequence[Layer], match: DeltaMatcher | None) -> dict[str, _Arm]:
    """Return the arms by name."""
    varying = {key for key, values in sweep.axes.items() if len(values) > 1}
    arms: dict[str, _Arm] = {}
    seen: dict[RunConfig, str] = {}
    unused = set(sweep.axes)
    unknown = {key: value for excluded in sweep.exclude for key, value in excluded.items()}
    for arm_name, settings in _combinations(sweep):
        config_of_method = _config_with_method(base, settings)
        kept = {
            key: value
            for key, value in settings.items()
            if _method_has_setting(config_of_method, key) or key not in sweep.axes
        }
        unused -= set(kept)
        matches = [
            {key: _has_value(config_of_method, settings, key, value) for key, value in excluded.items()}
            for excluded in sweep.exclude
        ]
        for values in matches:
            for key, found in values.items():
                if found is not None:
                    unknown.pop(key, None)
        if any(all(values.values()) for values in matches):
            continue
        layers: list[Layer] = [*map(nest, _method_before_rest(_resolve_match(kept, base, match)))]
        config = resolve([*base, *layers])
        name = _describe_arm(arm_name, kept, varying, config)
        if config in seen and seen[config] == name:
            continue  # differs only in an axis that does not apply to this arm's method
        if config in seen or name in arms:
            other = seen.get(config, name)
            raise ConfigError(f"the arms '{other}' and '{name}' are the same runs; remove one of them")
        seen[config] = name
        group = _describe_arm(arm_name, kept, varying & {_METHOD, _DIVERGENCE}, config)
        arms[name] = _Arm(layers, group)
    if unknown:
        raise _unknown_exclude(base, *next(iter(unknown.items())))
    if unused:
        axis = sorted(unused)[0]
        raise ConfigError(f"the axis '{axis}' applies to no arm: none of their methods has this setting")
    if not arms:
        raise ConfigError("no runs are left: every combination is excluded")
    return arms


def _has_value(config: RunConfig, settings: Settings, key: str, value: Any) -> bool | None:
    """Return whether an arm has a value of `exclude`; None where its method has no such setting.

    Values are compared after validation, so that the text 1e-4, a number in YAML 1.2, equals 0.0001, and `grpo` clip.

    Args:
        config: the settings of all arms, with the method of this arm.
        settings: those of the arm, by dotted name.

    Raises:
        ConfigError: the setting cannot have this value.
    """
    if key == "seed":
        raise ConfigError(
            "exclude: seed: a combination is excluded with all seeds; leave out seeds in `seeds`"
        )
    *path, name = key.split(".")
    section: Any = config
    for part in path:
        section = section.get(part) if isinstance(section, Mapping) else getattr(section, part, None)
    if isinstance(section, Mapping):
        return settings.get(key, section.get(name)) == value if name in section or key in settings else None
    if not isinstance(section, BaseModel) or name not in type(section).model_fields:
        return None
    field, current = type(section).model_fields[name], getattr(section, name)
    choice = choice_of(RunConfig.model_fields[path[0]]) if len(path) == 1 else None
    if choice is not None and name == choice.tag:
        tag = method_name(str(value)) if key == _METHOD else str(value)
        if tag not in choice.classes():
            raise ConfigError(f"exclude: {key} = {value!r}: unknown{nearest(tag, choice.classes())}")
        return bool(current == tag)
    if key in settings and settings[key] == value:  # also `match:clip`
        return True
    kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    adapter = TypeAdapter(kind)
    try:
        wanted = adapter.validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"exclude: {key} = {value!r}: {error.errors()[0]['msg']}") from None
    if key not in settings:
        return bool(current == wanted)
    try:
        return bool(adapter.validate_python(settings[key]) == wanted)
    except ValidationError:  # reported where the arm is resolved
        return False


def _unknown_exclude(base: Sequence[Layer], key: str, value: Any) -> ConfigError:
    """Return the error for a key of `exclude` that no arm has."""
    try:
        resolve([*base, nest({key: value})])
    except ConfigError as error:
        return ConfigError(f"exclude: {error}")
    return ConfigError(f"exclude: {key}: no arm has this setting")


def _resolve_match(settings: Settings, base: Sequence[Layer], match: DeltaMatcher | None) -> Settings:
    """Return the settings with `match:METHOD` replaced by a radius."""
    delta = settings.get(_DELTA)
    if not isinstance(delta, str) or not delta.startswith(MATCH_PREFIX):
        return settings
    if match is None:
        raise ConfigError(
            f"bounds.delta = {delta!r}: needs the recorded tokens of a run; add --recorded RUN (recorded: in a file)"
        )
    others = {key: value for key, value in settings.items() if key != _DELTA}
    region = resolve([*base, *map(nest, _method_before_rest(others))]).bounds
    if not isinstance(region, TrustRegionSettings):
        raise ConfigError(f"bounds.delta = {delta!r}: the method '{region.method}' has no radius")
    return {**settings, _DELTA: match(region, delta.removeprefix(MATCH_PREFIX))}


def _combinations(sweep: SweepConfig) -> Iterator[tuple[str, Settings]]:
    """Yield the name of each arm ('' without named arms) with its settings, for each combination of the axes."""
    for arm_name, settings in (sweep.arms or {"": {}}).items():
        for values in product(*sweep.axes.values()):
            yield arm_name, {**settings, **dict(zip(sweep.axes, values, strict=True))}


def _config_with_method(base: Sequence[Layer], settings: Settings) -> RunConfig:
    """Return the config with only the method selected; it determines which settings exist."""
    chosen = {key: value for key, value in settings.items() if key == _METHOD}
    return resolve([*base, *map(nest, [chosen] if chosen else [])])


def _method_has_setting(config: RunConfig, key: str) -> bool:
    """Return whether a setting applies to the config's method; True for an unknown one, which `resolve` reports."""
    section, _, name = key.rpartition(".")
    return section != "bounds" or name in type(config.bounds).model_fields or name not in _bounds_fields()


def _bounds_fields() -> set[str]:
    """Return the names of the settings that at least one method has."""
    return {name for settings in method_classes().values() for name in settings.model_fields}


def _method_before_rest(settings: Settings) -> list[Settings]:
    """Split settings into layers so that the method is selected before its own settings."""
    method = {key: value for key, value in settings.items() if key == _METHOD}
    rest = {key: value for key, value in settings.items() if key != _METHOD}
    return [layer for layer in (method, rest) if layer]


def _describe_arm(arm_name: str, settings: Settings, varying: set[str], config: RunConfig) -> str:
    """Return the name of an arm from the settings that vary: `clip`, `kl 0.05`, `dppo kl 0.05 updates=16`."""
    words = [arm_name] if arm_name else []
    shown = {key: value for key, value in settings.items() if key in varying}
    method = METHODS[config.bounds.method]
    is_region = method.trust_region and _METHOD in shown and _DIVERGENCE in settings
    if _METHOD in shown and not (is_region and method.named_by_region):
        words.append(str(shown[_METHOD]))
    if _DIVERGENCE in shown or is_region:
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
    """Return a value as text for an arm's name."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _slug(arm: str) -> str:
    """Return an arm's name with the characters that a folder name can have."""
    return re.sub(r"[^A-Za-z0-9_.=+-]+", "-", arm).strip("-.=+") or "run"
