"""Choice of a sweep's settings by an earlier sweep: the best arm of each group, for runs with other seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bandpo_cli.config.layers import Layer, read_layer
from bandpo_cli.config.sweep import SweepConfig
from bandpo_cli.errors import ConfigError, UserError
from bandpo_cli.storage.run_folder import resume_command
from bandpo_cli.storage.run_record import read_summary
from bandpo_cli.sweeps.folder import SweepFolder, SweepRun

if TYPE_CHECKING:
    from bandpo_cli.reports.sweep.runs import ArmRunData
    from bandpo_cli.reports.sweep.tuning import Tuning


def tuned_layers(config: SweepConfig, runs_dir: Path) -> tuple[dict[str, Layer], Tuning]:
    """Return all settings of the best arm of each group of `config.tuned_on`, by group, and how they were chosen.

    Raises:
        ConfigError: there is no such sweep, it is not finished, all arms of a group failed, or one of its seeds is
            among `config.seeds`.
    """
    from bandpo_cli.reports.sweep.tuning import choose

    assert config.tuned_on is not None
    try:
        folder = SweepFolder.open(runs_dir, config.tuned_on)
        groups = _runs_by_group(folder, runs_dir)
        _check_seeds(config, folder)
        tuning = choose(folder.name, config.tuned_by, groups)
    except UserError as error:
        raise ConfigError(f"tuned_on: {error}") from None
    chosen = {group: tuning.chosen(group).arm for group in tuning.groups}
    plans = {run.arm: folder.plan_path(run.name) for run in folder.runs}
    return {group: read_layer(plans[arm]) for group, arm in chosen.items()}, tuning


def _runs_by_group(folder: SweepFolder, runs_dir: Path) -> dict[str, dict[str, list[ArmRunData]]]:
    """Return the runs of the arms that finished with every seed, by group and arm."""
    from bandpo_cli.reports.sweep.runs import ArmRunData, read_arm_run
    from bandpo_cli.reports.sweep.selection import ArmRun

    if not all(run.group for run in folder.runs):
        raise UserError(
            f"{folder.path} was made by a version whose plans do not say which arms are one method"
        )
    _check_complete(folder, runs_dir)
    groups: dict[str, dict[str, list[ArmRunData]]] = {run.group: {} for run in folder.runs}
    for arm, runs in _by_arm(folder).items():
        read = [read_arm_run(ArmRun(arm, run.seed, folder.run_path(run.name))) for run in runs]
        finished = [each for each in read if isinstance(each, ArmRunData)]
        if len(finished) == len(runs):
            groups[runs[0].group][arm] = finished
    without = [group for group, arms in groups.items() if not arms]
    if without:
        raise UserError(f"{folder.name}: no arm of {', '.join(without)} has finished with every seed")
    return groups


def _by_arm(folder: SweepFolder) -> dict[str, list[SweepRun]]:
    arms: dict[str, list[SweepRun]] = {}
    for run in folder.runs:
        arms.setdefault(run.arm, []).append(run)
    return arms


def _check_complete(folder: SweepFolder, runs_dir: Path) -> None:
    """Raise UserError where a run has neither finished, failed nor been stopped because it was behind."""
    stopped = folder.stopped()
    open_runs = [
        run.name
        for run in folder.runs
        if run.name not in stopped
        and ((summary := read_summary(folder.run_path(run.name))) is None
             or summary.status not in ("FINISHED", "FAILED"))
    ]  # fmt: skip
    if open_runs:
        raise UserError(
            f"{len(open_runs)} of the {len(folder.runs)} runs of {folder.name} are not finished ({open_runs[0]}"
            f"{', ...' if len(open_runs) > 1 else ''}); finish them first: "
            f"{resume_command('sweep', folder.path, runs_dir)}"
        )


def _check_seeds(config: SweepConfig, folder: SweepFolder) -> None:
    used = sorted({run.seed for run in folder.runs})
    both = [seed for seed in config.seeds if seed in used]
    if both:
        raise UserError(
            f"seed {both[0]} chose the settings in {folder.name}; give seeds other than {', '.join(map(str, used))}"
        )
