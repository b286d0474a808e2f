"""Plan of a sweep: its settings, and its runs, each with a checked config and a name.

All mistakes are reported before the first run starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from bandpo_cli.config.layers import (
    Layer,
    nest,
    parse_value,
    read_config,
    read_layer,
    resolve,
    split_values,
    validation_message,
)
from bandpo_cli.config.run import RunConfig
from bandpo_cli.custom_code import add_code_folder
from bandpo_cli.errors import ConfigError, UserError
from bandpo_cli.experiments.plan import check_config, read_numbers
from bandpo_cli.experiments.resume_and_fork import fork_point
from bandpo_cli.methods import METHODS
from bandpo_cli.methods.settings import MethodSettings, TrustRegionSettings
from bandpo_cli.settings_validation import Section, require
from bandpo_cli.storage.run_folder import VALID_NAME, RunFolder, shell_command
from bandpo_cli.storage.run_record import read_summary
from bandpo_cli.storage.sweep_folder import SweepFolder, SweepRun, check_baseline
from bandpo_cli.storage.tables import read_recorded_tokens

if TYPE_CHECKING:
    from bandpo_cli.reports.run_tables import RunTables
    from bandpo_cli.reports.tuned_settings import Tuning

_METHOD, _DIVERGENCE, _DELTA = "bounds.method", "bounds.divergence", "bounds.delta"
MATCH_PREFIX = "match:"
"""`match:clip` as a radius stands for the δ at which the trust region clips as many recorded tokens as clip does."""

DeltaMatcher = Callable[[TrustRegionSettings, str], float]
"""(trust region, method) -> the δ at which the region clips as many tokens as the method."""

Settings = dict[str, Any]
"""Settings by dotted name, as in `--set`: {"bounds.delta": 0.05}."""

Seed = Annotated[int, Field(ge=0, lt=2**31)]


class SweepConfig(Section):
    """The axes of a sweep; every combination of a variant, a value of each axis and a seed is one run."""

    fixed: dict[str, Any] = Field(default_factory=dict)
    """Settings of all runs, in sections as in the config file of a run."""
    axes: dict[str, list[Any]] = Field(default_factory=dict)
    """Values by dotted setting. An axis for which a variant's method has no setting (`bounds.delta` of clip) does not
    multiply that variant."""
    variants: dict[str, Settings] = Field(default_factory=dict)
    """Named variants, each with its own dotted settings; combined with all values of the axes."""
    exclude: list[Settings] = Field(default_factory=list)
    """Excluded combinations: variants that have all the values of one of these."""
    seeds: tuple[Seed, ...] = (0,)
    fork: str | None = None
    """The checkpoint that every run continues, as RUN or RUN@STEP; null for runs from the start. The settings of RUN
    are the defaults, also of `seeds`."""
    recorded: str | None = None
    """The run whose recorded tokens are used for `bounds.delta: match:clip`: the δ at which the Band clips as many of
    them as clip does."""
    tuned_on: str | None = None
    """A finished sweep in place of axes and variants: each of its groups (the variants without the values of the axes,
    except method and divergence) is a variant here, with the settings that were best there."""
    tuned_by: Literal["accuracy", "area"] = "accuracy"
    """The metric of the report that decides which settings were best: the mean over the seeds of that sweep. The reward
    takes the place of the accuracy if rewards are not just 0 and 1."""
    baseline: str | None = None
    """The variant with which the report compares the others."""

    @field_validator("axes")
    @classmethod
    def _check_axes(cls, axes: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in axes.items():
            require(key != "seed", "seeds are a separate axis: put them in `seeds`")
            require(values, f"the axis '{key}' is empty; give it values, or remove it")
            _check_unique(f"the axis '{key}'", values)
        return axes

    @model_validator(mode="after")
    def _check_seeds_and_variants(self) -> Self:
        require(self.seeds, "seeds: give at least one")
        _check_unique("seeds:", self.seeds)
        given = [name for name in ("axes", "variants", "exclude", "fork", "recorded") if getattr(self, name)]
        require(
            self.tuned_on is None or not given,
            f"{''.join(given[:1])}: the variants are those of tuned_on = {self.tuned_on}; remove one of the two",
        )
        return self


def _check_unique(what: str, values: Any) -> None:
    """Raise ValueError, which begins with `what`, if a value occurs twice. Values need not be hashable."""
    for index, value in enumerate(values):
        require(value not in values[:index], f"{what} has {value!r} twice")


@dataclass(frozen=True)
class SweepPlan:
    """A sweep that has been checked and not started.

    Attributes:
        runs: the runs, in the order in which they are started, with their settings.
        about: other entries of the plan on disk: the checkpoint that the runs continue, the matched radii and their
            run, the tuned settings.
        tuning: how the settings were chosen; None where they were given.
    """

    runs: Mapping[SweepRun, RunConfig]
    baseline: str | None
    about: Mapping[str, Any]
    tuning: Tuning | None = None

    def notes(self) -> list[tuple[str, str]]:
        """Return one line for forks, per matched radius and per tuned variant, each after its kind."""
        notes = []
        if fork := self.about.get("fork"):
            seed = "the seed of a run decides the random numbers after this step"
            notes.append(("fork of:", f"{fork}: {seed}"))
        for variant, match in self.about.get("matched", {}).items():
            clips = f"δ = {match['delta']:g}, which clips {match['reached']:.3%} of the recorded tokens"
            wanted = f"{variant.partition(MATCH_PREFIX)[2]}: {match['wanted']:.3%}"
            notes.append(("matched:", f"{variant}: {clips} ({wanted})"))
        return notes + [("tuned:", line) for line in (self.tuning.notes() if self.tuning else ())]


def plan_sweep(
    file: Path | None,
    flags: Mapping[str, str | None],
    axes: Sequence[str],
    options: Mapping[str, str | None],
    layers: Sequence[Layer],
    runs_dir: Path,
) -> SweepPlan:
    """Plan a sweep from its file and flags; flags win, an axis of the same setting replaces the file's.

    Args:
        flags: comma-separated values by dotted setting; None where the flag was not given.
        axes: further axes, each `KEY=V,V`.
        options: `seeds` (comma-separated) and the texts of other options of `SweepConfig`; None where not given.

    Raises ConfigError if the file, an axis or a setting is not valid.
    """
    written: Mapping[str, Any] = {} if file is None else read_config(file, "FILE")
    flags = dict(flags)
    for text in axes:
        key, equals, values = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--axis {text!r}: write it as KEY=V,V, such as optim.lr=1e-5,1e-4")
        flags[key.strip()] = values
    changes: dict[str, Any] = {name: text for name, text in options.items() if text is not None}
    if "seeds" in changes:
        changes["seeds"] = read_numbers("--seeds", changes["seeds"], 0, 2**31 - 1)
    try:
        config = SweepConfig.model_validate(dict(written))
        changes["axes"] = {**config.axes, **parse_axes(flags)}
        config = SweepConfig.model_validate({**config.model_dump(exclude_unset=True), **changes})
    except ValidationError as error:
        raise ConfigError(validation_message(error, [written])) from None
    return plan_from_config(config, layers, runs_dir)


def plan_from_config(config: SweepConfig, layers: Sequence[Layer], runs_dir: Path) -> SweepPlan:
    """Plan a sweep; `layers` are settings of all runs. Raises ConfigError if a setting of a run cannot be used."""
    about: dict[str, Any] = {}
    tuning, match, point = None, None, None
    if config.fork is not None:
        point = fork_point(config.fork, runs_dir)
        about, layers = {"fork": point.text}, [*point.layers, *layers]
        if "seeds" not in config.model_fields_set:
            config = config.model_copy(update={"seeds": (point.config.seed,)})
    if config.tuned_on is not None:
        tuned, tuning = _tuned_layers(config, config.tuned_on, runs_dir)
        runs, about = plan_tuned_runs(config, tuned, layers), {"tuning": asdict(tuning)}
        if fork := SweepFolder.open(runs_dir, config.tuned_on).fork:
            about["fork"] = (point := fork_point(fork, runs_dir)).text
    else:
        if config.recorded is not None:
            about |= {"recorded": config.recorded, "matched": {}}
            match = _matcher(config.recorded, runs_dir, about["matched"])
        runs = plan_runs(config, layers, match)
    check_names(runs)
    for run, own in runs.items():
        if tuning is not None:
            tuning.check_chosen(run.variant, own)
        if point is not None:
            point.changes_to(own)  # raises for a setting that cannot change
    shared = attrgetter("model", "task", "bounds", "sampling", "objective.advantages")
    for own in {shared(own): own for own in runs.values()}.values():  # a check loads the problems
        check_config(own)
    return SweepPlan(runs, config.baseline, about, tuning)


def _tuned_layers(config: SweepConfig, sweep: str, runs_dir: Path) -> tuple[dict[str, Layer], Tuning]:
    """Return all settings of the best variant of each group of the sweep, by group, and how they were chosen."""
    from bandpo_cli.reports.tuned_settings import choose

    try:
        folder = SweepFolder.open(runs_dir, sweep)
        used = {run.seed for run in folder.runs}
        if both := sorted(used.intersection(config.seeds)):
            others = ", ".join(map(str, sorted(used)))
            raise UserError(f"seed {both[0]} chose the settings in {sweep}; give seeds other than {others}")
        groups = {run.variant: run.group for run in folder.runs}
        tuning = choose(folder.path.name, config.tuned_by, _read_finished(folder, runs_dir), groups)
    except UserError as error:
        raise ConfigError(f"tuned_on: {error}") from None
    plans = {run.variant: folder.plan_path(run.name) for run in folder.runs}
    add_code_folder(folder.path / "plans")
    return {group: read_layer(plans[best.variant]) for group, best in tuning.chosen.items()}, tuning


def _read_finished(folder: SweepFolder, runs_dir: Path) -> RunTables:
    """Return the runs of the variants that finished with every seed."""
    from bandpo_cli.reports.run_tables import read_runs
    from bandpo_cli.reports.run_variants import read_sweep

    stopped = folder.stopped()
    paths = {run.name: folder.path / run.name for run in folder.runs if run.name not in stopped}
    statuses = {name: getattr(read_summary(path), "status", None) for name, path in paths.items()}
    if unfinished := [name for name, status in statuses.items() if status not in ("FINISHED", "FAILED")]:
        counts = f"{len(unfinished)} of the {len(folder.runs)} runs of {folder.path.name} are not finished"
        again = shell_command("sweep --resume", folder.path, runs_dir)
        raise UserError(f"{counts} ({', '.join(unfinished[:3])}); finish them first: {again}")
    runs = read_sweep(folder.path).runs
    failed = {run.variant for run in read_runs(runs, with_budgets=True).excluded}
    groups = dict.fromkeys(run.group for run in folder.runs)
    finished = {run.group for run in folder.runs if run.variant not in failed}
    if without := [group for group in groups if group not in finished]:
        names = ", ".join(without)
        raise UserError(f"{folder.path.name}: no variant of {names} has finished with every seed")
    return read_runs((run for run in runs if run.variant not in failed), with_budgets=True)


def _matcher(recorded: str, runs_dir: Path, matches: dict[str, Any]) -> DeltaMatcher:
    """Return a function that finds a radius on the tokens of a run and adds it to `matches`."""
    from bandpo_cli.bounds.intervals import RecordedTokens, match_clip_fraction

    columns = read_recorded_tokens(RunFolder.open(runs_dir, recorded).path)
    tokens = RecordedTokens(columns["old_logprob"], columns["ratio"], columns["advantage"])

    def match(region: TrustRegionSettings, method: str) -> float:
        peer = resolve([{"bounds": {"method": method}}]).bounds
        matched = match_clip_fraction(region, peer, tokens)
        matches[f"{region.region()} {MATCH_PREFIX}{method}"] = matched._asdict()
        return matched.delta

    return match


def plan_runs(
    sweep: SweepConfig, layers: Sequence[Layer] = (), match: DeltaMatcher | None = None
) -> dict[SweepRun, RunConfig]:
    """Return the runs with their settings: all variants with the first seed, then all with the second, and so on.

    In this order an interrupted sweep can still compare its variants. The sweep's settings override `layers`; `match`
    returns the radius for `match:METHOD`. Raises ConfigError if a setting is unknown or invalid, two variants are
    equal, or no variant is left.
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
        chosen = {key: settings[key] for key in settings if key == _METHOD or not key.startswith("bounds.")}
        method = resolve([*base, nest(chosen)]).bounds
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
) -> dict[SweepRun, RunConfig]:
    """Return a run of each variant in `tuned` with each seed, in the order of `plan_runs`.

    `tuned` has all settings of each variant; those of `layers` and of `sweep.fixed` override them.
    """
    variants: dict[RunConfig, tuple[str, str]] = {}
    for variant, settings in tuned.items():
        other, _ = variants.setdefault(resolve([settings, *layers, sweep.fixed]), (variant, variant))
        if other != variant:
            raise ConfigError(f"the variants '{other}' and '{variant}' are the same runs")
    return _with_seeds(sweep, variants)


def check_names(runs: Iterable[SweepRun]) -> None:
    """Raise ConfigError if a run's name is not a valid folder name, or two runs have the same one."""
    seen: dict[str, str] = {}
    for run in runs:
        if not VALID_NAME.fullmatch(run.name):
            why = "gives no valid folder name of at most 200 characters; give it a shorter name in variants:"
            raise ConfigError(f"the variant '{run.variant:.100}' {why}")
        if (other := seen.setdefault(run.name, run.variant)) != run.variant:
            both = f"the variants '{other}' and '{run.variant}'"
            raise ConfigError(f"{both} have the same folder name; rename one")


def parse_axes(flags: Mapping[str, str | None]) -> dict[str, list[Any]]:
    """Return the values of comma-separated lists by dotted setting, read as for `--set`; None is a missing flag."""
    axes = {}
    for key, text in flags.items():
        items = [] if text is None else split_values(text)
        if not all(items):
            name = key.rpartition(".")[2]
            raise ConfigError(f"--{name} {text!r}: an empty item; separate values by commas: 0.01,0.05")
        if items:
            axes[key] = [parse_value(key, item, f"{key}={item}") for item in items]
    return axes


def _with_seeds(
    sweep: SweepConfig, variants: Mapping[RunConfig, tuple[str, str]]
) -> dict[SweepRun, RunConfig]:
    """Return the runs of variants that are given as settings with name and group, one seed after the other."""
    check_baseline(sweep.baseline, [variant for variant, _ in variants.values()])
    runs = {}
    for seed in sweep.seeds:
        for config, (variant, group) in variants.items():
            name = re.sub(r"[^A-Za-z0-9_.=+-]+", "-", variant).strip("-.=+") or "run"
            runs[SweepRun(f"{name}-s{seed}", variant, seed, group)] = config.model_copy(update={"seed": seed})
    return runs


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
    shown = {key: value for key, value in settings.items() if key in varying}
    short = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in shown.items()}
    words = [variant_name] if variant_name else []
    method = METHODS[config.bounds.method]
    is_region = method.trust_region and _METHOD in shown and _DIVERGENCE in settings
    if _METHOD in shown and not (is_region and method.named_by_region):
        words.append(str(shown[_METHOD]))
    if _DIVERGENCE in shown or is_region:
        words.append(str(settings[_DIVERGENCE]))
    words += [short[_DELTA]] if _DELTA in shown else []
    others = [key for key in shown if key not in (_METHOD, _DIVERGENCE, _DELTA)]
    words += [f"{key.rpartition('.')[2]}={short[key]}" for key in others]
    return " ".join(words) or config.bounds.method
