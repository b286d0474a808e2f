"""Plan of a sweep: its runs from a file, axes and seeds. All mistakes are reported before the first run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from bandpo_cli.config.files import read_config
from bandpo_cli.config.layers import Layer, read_layer, resolve, validation_message
from bandpo_cli.config.sweep import SweepConfig
from bandpo_cli.custom_code import add_code_folder
from bandpo_cli.errors import ConfigError, UserError
from bandpo_cli.experiments.fork_plan import fork_point
from bandpo_cli.experiments.preflight import check_config, read_numbers
from bandpo_cli.methods.settings import TrustRegionSettings
from bandpo_cli.storage.run_folder import RunFolder, shell_command
from bandpo_cli.storage.run_record import read_summary
from bandpo_cli.storage.tables import read_token_tables
from bandpo_cli.sweeps.folder import SweepFolder
from bandpo_cli.sweeps.plan import (
    MATCH_PREFIX,
    DeltaMatcher,
    PlannedRun,
    check_names,
    parse_axes,
    plan_runs,
    plan_tuned_runs,
)

if TYPE_CHECKING:
    from bandpo_cli.reports.comparison.runs import RunTables
    from bandpo_cli.reports.comparison.tuning import Tuning


@dataclass(frozen=True)
class SweepRequest:
    """A sweep that has been checked and not started.

    Attributes:
        baseline: the variant that the report compares the others with; None without one.
        about: other entries of the plan on disk: the checkpoint that the runs continue, the matched radii and their
            run, the tuned settings.
        tuning: how the settings were chosen; None where they were given.
    """

    runs: list[PlannedRun]
    baseline: str | None
    about: Mapping[str, Any]
    tuning: Tuning | None = None

    def notes(self) -> list[tuple[str, str]]:
        """Return one line for forks, per matched radius and per tuned variant, each after its kind."""
        forks = f"{self.about.get('fork')}: the seed of a run decides the random numbers after this step"
        matched = [
            f"{variant}: δ = {match['delta']:g}, which clips {match['reached']:.3%} of the recorded tokens "
            f"({variant.partition(MATCH_PREFIX)[2]}: {match['wanted']:.3%})"
            for variant, match in self.about.get("matched", {}).items()
        ]
        tuned = [] if self.tuning is None else self.tuning.notes()
        return [
            *([("fork of:", forks)] if "fork" in self.about else []),
            *(("matched:", line) for line in matched),
            *(("tuned:", line) for line in tuned),
        ]


def plan_sweep(
    file: Path | None,
    flags: Mapping[str, str | None],
    axes: Sequence[str],
    options: Mapping[str, str | None],
    layers: Sequence[Layer],
    runs_dir: Path,
) -> SweepRequest:
    """Plan a sweep from its file and flags; flags win, an axis of the same setting replaces the file's.

    Args:
        file: sweep file; None for a sweep by flags alone.
        flags: comma-separated values by dotted setting; None where the flag was not given.
        axes: further axes, each `KEY=V,V`.
        options: `seeds` (comma-separated) and the texts of other options of `SweepConfig`; None where not given.
        runs_dir: the folder of the runs and sweeps that the options name.

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
    return request_from_config(config, layers, runs_dir)


def request_from_config(config: SweepConfig, layers: Sequence[Layer], runs_dir: Path) -> SweepRequest:
    """Plan a sweep from its settings; `layers` are settings of all runs.

    Raises ConfigError if a setting of a run cannot be used.
    """
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
    else:
        if config.recorded is not None:
            about |= {"recorded": config.recorded, "matched": {}}
            match = _matcher(config.recorded, runs_dir, about["matched"])
        runs = plan_runs(config, layers, match)
    check_names(runs)
    checked: set[Any] = set()
    for run in runs:
        own = run.config
        if point is not None:
            point.changes(own)  # raises for a setting that cannot change
        sections = (own.model, own.task, own.bounds, own.sampling, own.objective.advantages)
        if sections not in checked:  # a check loads the problems, and runs that differ in their seed share it
            checked.add(sections)
            check_config(own)
    return SweepRequest(runs, config.baseline, about, tuning)


def _tuned_layers(config: SweepConfig, sweep: str, runs_dir: Path) -> tuple[dict[str, Layer], Tuning]:
    """Return all settings of the best variant of each group of the sweep, by group, and how they were chosen."""
    from bandpo_cli.reports.comparison.tuning import choose

    try:
        folder = SweepFolder.open(runs_dir, sweep)
        tables = _read_finished(folder, runs_dir)
        used = {run.seed for run in folder.runs}
        if both := sorted(used.intersection(config.seeds)):
            others = ", ".join(map(str, sorted(used)))
            raise UserError(f"seed {both[0]} chose the settings in {sweep}; give seeds other than {others}")
        groups = {run.variant: run.group for run in folder.runs}
        tuning = choose(folder.path.name, config.tuned_by, tables, groups)
    except UserError as error:
        raise ConfigError(f"tuned_on: {error}") from None
    plans = {run.variant: folder.plan_path(run.name) for run in folder.runs}
    add_code_folder(folder.path / "plans")
    return {group: read_layer(plans[best.variant]) for group, best in tuning.chosen.items()}, tuning


def _read_finished(folder: SweepFolder, runs_dir: Path) -> RunTables:
    """Return the runs of the variants that finished with every seed."""
    from bandpo_cli.reports.comparison.runs import read_runs
    from bandpo_cli.reports.comparison.selection import read_sweep

    stopped = folder.stopped()
    paths = {run.name: folder.path / run.name for run in folder.runs if run.name not in stopped}
    statuses = {name: getattr(read_summary(path), "status", None) for name, path in paths.items()}
    if unfinished := [name for name, status in statuses.items() if status not in ("FINISHED", "FAILED")]:
        counts = f"{len(unfinished)} of the {len(folder.runs)} runs of {folder.path.name} are not finished"
        again = shell_command("sweep --resume", folder.path, runs_dir)
        raise UserError(f"{counts} ({', '.join(unfinished[:3])}); finish them first: {again}")
    runs = read_sweep(folder.path).runs
    failed = {run.variant for run in read_runs(runs).excluded}
    groups = dict.fromkeys(run.group for run in folder.runs)
    finished = {run.group for run in folder.runs if run.variant not in failed}
    if without := [group for group in groups if group not in finished]:
        names = ", ".join(without)
        raise UserError(f"{folder.path.name}: no variant of {names} has finished with every seed")
    return read_runs(run for run in runs if run.variant not in failed)


def _matcher(recorded: str, runs_dir: Path, matches: dict[str, Any]) -> DeltaMatcher:
    """Return a function that finds a radius on the tokens of a run and adds it to `matches`."""
    from bandpo_cli.bounds.intervals import RecordedTokens, match_clip_fraction

    columns = read_token_tables(RunFolder.open(runs_dir, recorded).path)
    tokens = RecordedTokens(columns["old_logprob"], columns["ratio"], columns["advantage"])

    def match(region: TrustRegionSettings, method: str) -> float:
        peer = resolve([{"bounds": {"method": method}}]).bounds
        matched = match_clip_fraction(region, peer, tokens)
        matches[f"{region.region()} {MATCH_PREFIX}{method}"] = matched._asdict()
        return matched.delta

    return match
