"""Plan of a sweep: the runs of its variants, axes and seeds, each with a validated config and a name."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

from pydantic import Field

from bandpo_cli.config.layers import Layer, nest, parse_value, resolve, split_values
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.sweep import Settings, SweepConfig
from bandpo_cli.errors import ConfigError, nearest
from bandpo_cli.methods import METHODS
from bandpo_cli.methods.settings import MethodSettings, TrustRegionSettings
from bandpo_cli.storage.run_folder import is_valid_name

_METHOD, _DIVERGENCE, _DELTA = "bounds.method", "bounds.divergence", "bounds.delta"
MATCH_PREFIX = "match:"
"""`match:clip` as a radius stands for the δ at which the trust region clips as many recorded tokens as clip does."""

Text = Annotated[str, Field(coerce_numbers_to_str=True)]
"""Text in a file of YAML, where it may be a number."""

DeltaMatcher = Callable[[TrustRegionSettings, str], float]
"""(settings of a trust region, name of a method) -> the δ at which the region clips as many tokens as that method."""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep, an entry of `runs` in `sweep.yaml`. Its name is the name of its folder.

    The runs of a `variant` differ in the seed alone, those of a `group` also in the values of the axes, except method
    and divergence: a group is what `tuned_on` compares the settings of.
    """

    name: Text
    variant: Text
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**31)]
    group: Text = ""


@dataclass(frozen=True, kw_only=True)
class PlannedRun(SweepRun):
    """A run with its settings."""

    config: RunConfig


def plan_runs(
    sweep: SweepConfig, layers: Sequence[Layer] = (), match: DeltaMatcher | None = None
) -> list[PlannedRun]:
    """Return the runs: all variants with the first seed, then all with the second, and so on.

    In this order an interrupted sweep can still compare its variants.

    Args:
        layers: settings that the sweep's settings override, as for `resolve`.
        match: returns the radius for `match:METHOD`.

    Raises:
        ConfigError: a setting is unknown or invalid, two variants are equal, or no variant is left.
    """
    base = [*layers, sweep.fixed]
    if any("seed" in excluded for excluded in sweep.exclude):
        raise ConfigError("exclude: seed: combinations are excluded with all seeds; edit `seeds` instead")
    varying = {key for key, values in sweep.axes.items() if len(values) > 1}
    classes = MethodSettings.classes().values()
    fields = {f"bounds.{name}" for method in classes for name in method.model_fields}
    variants: dict[RunConfig, tuple[str, str]] = {}
    unused = set(sweep.axes)
    errors: dict[int, ConfigError | None] = {}  # of excluded combinations that no variant can have
    for (variant_name, own), *values in product((sweep.variants or {"": {}}).items(), *sweep.axes.values()):
        settings = {**own, **dict(zip(sweep.axes, values, strict=True))}
        # An axis without effect on the variant's method does not multiply it. `resolve` reports an unknown setting.
        method = resolve([*base, nest({key: settings[key] for key in settings.keys() & {_METHOD}})]).bounds
        missing = fields - {f"bounds.{name}" for name in type(method).model_fields}
        without_effect = {key for key in sweep.axes if ".".join(key.split(".")[:2]) in missing}
        kept = {key: value for key, value in settings.items() if key not in without_effect}
        unused -= kept.keys()
        is_excluded = False
        for index, excluded in enumerate(sweep.exclude):
            try:
                is_excluded |= _is_excluded(excluded, base, kept)
                errors[index] = None
            except ConfigError as refusal:
                errors.setdefault(index, refusal)
        if is_excluded:
            continue
        config = resolve([*base, nest(_resolve_match(kept, base, match))])
        name = _describe_variant(variant_name, kept, varying, config)
        group = _describe_variant(variant_name, kept, varying & {_METHOD, _DIVERGENCE}, config)
        other, _ = variants.get(config, (None, None))
        if other == name:
            continue  # differs only in an axis that does not apply to this variant's method
        if other is not None or name in [variant for variant, _ in variants.values()]:
            raise ConfigError(f"the variants '{other or name}' and '{name}' are the same runs; remove one")
        variants[config] = name, group
    for error in filter(None, errors.values()):
        raise ConfigError(f"exclude: {error}")
    if unused:
        axis = sorted(unused)[0]
        raise ConfigError(f"the axis '{axis}' applies to no variant: none of their methods has this setting")
    if not variants:
        raise ConfigError("no runs are left: every combination is excluded")
    return _with_seeds(sweep, variants)


def plan_tuned_runs(
    sweep: SweepConfig, tuned: Mapping[str, Layer], layers: Sequence[Layer] = ()
) -> list[PlannedRun]:
    """Return a run of each variant in `tuned` with each seed, in the order of `plan_runs`.

    Args:
        tuned: all settings of each variant; those of `layers` and of `sweep.fixed` override them.
        layers: settings of all runs.
    """
    variants: dict[RunConfig, tuple[str, str]] = {}
    for variant, settings in tuned.items():
        other, _ = variants.setdefault(resolve([settings, *layers, sweep.fixed]), (variant, variant))
        if other != variant:
            raise ConfigError(f"the variants '{other}' and '{variant}' are the same runs")
    return _with_seeds(sweep, variants)


def run_name(variant: str, seed: int) -> str:
    """Return the folder name of a variant's run with this seed: the characters of `variant` that it can have."""
    return f"{re.sub(r'[^A-Za-z0-9_.=+-]+', '-', variant).strip('-.=+') or 'run'}-s{seed}"


def check_names(runs: Sequence[PlannedRun]) -> None:
    """Raise ConfigError if a run's name is not a valid folder name, or two runs have the same one."""
    seen: dict[str, str] = {}
    for run in runs:
        if not is_valid_name(run.name):
            why = "gives no valid folder name of at most 200 characters; give it a shorter name in variants:"
            raise ConfigError(f"the variant '{run.variant:.100}' {why}")
        other = seen.setdefault(run.name, run.variant)
        if other != run.variant:
            raise ConfigError(
                f"the variants '{other}' and '{run.variant}' have the same folder name; rename one"
            )


def check_baseline(baseline: str | None, variants: Iterable[str], where: str = "") -> None:
    """Raise ConfigError, which begins with `where`, if `baseline` is neither None nor one of `variants`."""
    names = list(dict.fromkeys(variants))
    if baseline is not None and baseline not in names:
        none = f"no variant of that name{nearest(baseline, names)}"
        raise ConfigError(f"{where}baseline = {baseline!r}: {none}; variants: {', '.join(names)}")


def parse_axes(flags: Mapping[str, str | None]) -> dict[str, list[Any]]:
    """Return the values of comma-separated lists by dotted setting; each value is read as for `--set`.

    A flag that was not given is None. Raises ConfigError for an empty item.
    """
    axes = {}
    for key, text in flags.items():
        items = [] if text is None else split_values(text)
        if not all(items):
            name = key.rpartition(".")[2]
            raise ConfigError(f"--{name} {text!r}: an empty item; separate values by commas: 0.01,0.05")
        if items:
            axes[key] = [parse_value(key, item, f"{key}={item}") for item in items]
    return axes


def _with_seeds(sweep: SweepConfig, variants: Mapping[RunConfig, tuple[str, str]]) -> list[PlannedRun]:
    """Return the runs of variants that are given as settings with name and group, one seed after the other."""
    check_baseline(sweep.baseline, [variant for variant, _ in variants.values()])
    return [
        PlannedRun(
            run_name(variant, seed), variant, seed, group, config=config.model_copy(update={"seed": seed})
        )
        for seed in sweep.seeds
        for config, (variant, group) in variants.items()
    ]


def _is_excluded(excluded: Settings, base: Sequence[Layer], settings: Settings) -> bool:
    """Return whether a variant has all values of an excluded combination: whether giving them changes nothing.

    Raises ConfigError if the variant cannot have these values.
    """
    # A radius that is not matched yet equals the same text only.
    unmatched = {key: value for key, value in settings.items() if _is_match(key, value)}
    config = resolve([*base, nest({key: settings[key] for key in settings if key not in unmatched})])
    given = {key: value for key, value in excluded.items() if key not in unmatched}
    has_texts = all(excluded.get(key, text) == text for key, text in unmatched.items())
    return resolve([config.model_dump(mode="json"), nest(given)]) == config and has_texts


def _is_match(key: str, value: Any) -> bool:
    return key == _DELTA and str(value).startswith(MATCH_PREFIX)


def _resolve_match(settings: Settings, base: Sequence[Layer], match: DeltaMatcher | None) -> Settings:
    """Return the settings with `match:METHOD` replaced by a radius."""
    delta = settings.get(_DELTA)
    if not _is_match(_DELTA, delta):
        return settings
    if match is None:
        raise ConfigError(
            f"bounds.delta = {delta!r}: needs recorded tokens; add --recorded RUN (recorded: in a file)"
        )
    region = resolve([*base, nest({key: value for key, value in settings.items() if key != _DELTA})]).bounds
    if not isinstance(region, TrustRegionSettings):
        raise ConfigError(f"bounds.delta = {delta!r}: the method '{region.method}' has no radius")
    return {**settings, _DELTA: match(region, str(delta).removeprefix(MATCH_PREFIX))}


def _describe_variant(variant_name: str, settings: Settings, varying: set[str], config: RunConfig) -> str:
    """Return the name of a variant from the settings that vary: `clip`, `kl 0.05`, `dppo kl 0.05 updates=16`."""
    words = [variant_name] if variant_name else []
    shown = {key: value for key, value in settings.items() if key in varying}
    method = METHODS[config.bounds.method]
    is_region = method.trust_region and _METHOD in shown and _DIVERGENCE in settings
    if _METHOD in shown and not (is_region and method.named_by_region):
        words.append(str(shown[_METHOD]))
    if _DIVERGENCE in shown or is_region:
        words.append(str(settings[_DIVERGENCE]))
    if _DELTA in shown:
        words.append(_short(shown[_DELTA]))
    others = [key for key in shown if key not in (_METHOD, _DIVERGENCE, _DELTA)]
    words += [f"{key.rpartition('.')[2]}={_short(shown[key])}" for key in others]
    return " ".join(words) or config.bounds.method


def _short(value: Any) -> str:
    """Return a value as text for a variant's name."""
    return f"{value:g}" if isinstance(value, float) else str(value)
