"""`bandpo train`: a new training run, or the resume of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bandpo_cli.cli.completion import folder_of
from bandpo_cli.cli.options import (
    RUNS,
    Assignments,
    ConfigFiles,
    Nproc,
    RunsDir,
    Settings,
    Tracking,
    takes_settings,
)
from bandpo_cli.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from bandpo_cli.config.run import RunConfig
    from bandpo_cli.experiments.profile import ProfileCallback
    from bandpo_cli.experiments.resume_run import ResumePlan
    from bandpo_cli.storage.run_folder import RunFolder
    from bandpo_cli.types import RunResult


@takes_settings("train")
def train(
    *,
    config: ConfigFiles = None,
    settings: Settings,
    name: Annotated[
        str | None, typer.Option(help="Name of the run's folder.", show_default="method-task-seed-time")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Resume a run that ended early: its name in --runs-dir, or its folder.",
            autocompletion=folder_of("run"),
        ),
    ] = None,
    set_: Assignments = None,
    runs_dir: RunsDir = RUNS,
    tracking: Tracking,
    nproc: Nproc = None,
    profile: Annotated[
        int | None,
        typer.Option(metavar="N", help="Trace N steps after the first with torch's profiler."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Print the settings, the batch arithmetic and the memory it takes, and stop.")
    ] = False,
) -> int | None:
    """Train a policy with a trust-region policy loss and record the run.

    Without options, the command trains the bundled model on countdown, a few
    minutes on a CPU. Settings come from --config files, then flags, then --set;
    later ones win. The run folder under --runs-dir contains all results; MLflow receives a copy.

    [bold]bandpo train --divergence tv --delta 0.1[/bold]  another trust region

    [bold]bandpo train --method clip --set bounds.eps_high=0.3[/bold]  a fixed interval

    [bold]bandpo train --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k[/bold]  a model of the hub

    [bold]bandpo train --config my.yaml --set optim.lr=1e-4[/bold]  a file, one change

    [bold]bandpo train --resume NAME[/bold]  from its last checkpoint, with its settings

    [bold]bandpo train --nproc 8[/bold]  on the eight GPUs of this machine

    [bold]bandpo train --dry-run[/bold]  every setting, and stop
    """
    from bandpo_cli.config.files import read_config
    from bandpo_cli.config.layers import nest, read_assignments, resolve

    layers = [*map(read_config, config or []), nest(settings | tracking), read_assignments(set_ or [])]
    if resume is None:
        return _train(resolve(layers), runs_dir, name, dry_run, profile, nproc)
    if name is not None:
        raise UserError(f"--resume {resume}: the run continues in its folder; remove --name")
    return _resume(resume, runs_dir, layers, dry_run, profile, nproc)


def _train(
    config: RunConfig,
    runs_dir: Path,
    name: str | None,
    dry_run: bool,
    profile: int | None,
    nproc: int | None,
) -> int | None:
    """Print the statement, then train; a dry run prints the settings and the memory instead.

    With `--nproc` this process only checks the settings, and starts the ranks, which print. Return the exit code then.
    """
    from bandpo_cli.cli.console import open_console
    from bandpo_cli.cli.launch import ranks_to_start
    from bandpo_cli.cli.statement import print_memory, print_statement, run_statement
    from bandpo_cli.config.layers import to_yaml
    from bandpo_cli.experiments.train_run import check_prompt_lengths, plan_training, train
    from bandpo_cli.rank_process import launched_name, rank_count
    from bandpo_cli.storage.run_folder import RunFolder

    profilers = _profilers(profile, 0, config.steps)
    to_start = ranks_to_start(nproc)
    ranks = to_start or rank_count()
    plan = plan_training(config, runs_dir, launched_name() if name is None else name, ranks)
    if to_start is not None and not dry_run:
        return _launch(to_start, config, RunFolder(runs_dir / plan.name), runs_dir)
    console = open_console(long_running=True)
    print_statement(console, run_statement(config, plan.task, ranks), plan.task.notes(), plan.warnings)
    if not dry_run:
        _execute(partial(train, plan), console, config, runs_dir, profilers)
        return None
    console.print(to_yaml(config), markup=False, highlight=False)
    if print_memory(console, config, ranks):
        check_prompt_lengths(config, plan.task)
    return None


def _resume(
    run: str,
    runs_dir: Path,
    layers: Sequence[Mapping[str, Any]],
    dry_run: bool,
    profile: int | None,
    nproc: int | None,
) -> int | None:
    """Resume the run under its lock; a dry run prints the plan and takes no lock.

    With `--nproc` this process only checks that the run can be resumed, and starts the ranks. Return the exit code
    then.
    """
    from bandpo_cli.cli.launch import ranks_to_start
    from bandpo_cli.experiments.resume_run import locked_resume
    from bandpo_cli.rank_process import rank_count

    to_start = ranks_to_start(nproc)
    ranks = to_start or rank_count()
    with locked_resume(run, runs_dir, layers, read_only=dry_run, ranks=ranks) as plan:
        profilers = _profilers(profile, plan.step + 1, plan.config.steps)
        if to_start is None or dry_run or plan.is_trained:  # plots and the summary need one process
            _resume_plan(plan, runs_dir, dry_run, profilers, ranks)
            return None
    # The lock is released: rank 0 takes it.
    return _launch(to_start, plan.config, plan.folder, runs_dir)


def _resume_plan(
    plan: ResumePlan, runs_dir: Path, dry_run: bool, profilers: Sequence[ProfileCallback], ranks: int
) -> None:
    """Print the plan, and resume the run unless it is a dry run."""
    from bandpo_cli.cli.console import open_console
    from bandpo_cli.cli.statement import print_statement, run_statement
    from bandpo_cli.experiments.resume_run import resume

    console = open_console(long_running=True)
    rows = [] if plan.task is None else run_statement(plan.config, plan.task, ranks)
    notes = [] if plan.task is None else plan.task.notes()
    print_statement(console, [*rows, ("resume", plan.describe())], notes, plan.warnings)
    if not dry_run:
        _execute(partial(resume, plan), console, plan.config, runs_dir, profilers)


def _execute(
    start: Callable[..., RunResult],
    console: Console,
    config: RunConfig,
    runs_dir: Path,
    profilers: Sequence[ProfileCallback],
) -> None:
    """Train by `start` with the console view and the signal handlers, and print the summary and the profiles.

    Raises:
        SystemExit: a signal has stopped the run.
    """
    from bandpo_cli.cli.signals import StopSignals
    from bandpo_cli.cli.statement import print_profile, print_summary
    from bandpo_cli.cli.train_view import TrainView

    with StopSignals() as signals, closing(TrainView(console, runs_dir, signals)) as view:
        result = start(callbacks=[view, signals, *profilers], stop_requested=lambda: signals.requested)
        if result.status != "FINISHED":
            raise SystemExit(signals.exit_code)
        print_summary(console, config, result)
        for profiler in profilers:
            if profiler.result is not None:
                print_profile(console, profiler.result)


def _launch(count: int, config: RunConfig, folder: RunFolder, runs_dir: Path) -> int:
    """Start this command in `count` processes, and return its exit code."""
    from bandpo_cli.cli.launch import continue_with, launch
    from bandpo_cli.storage.run_folder import is_run_folder, resume_command

    def how_to_continue() -> str:
        if not is_run_folder(folder.path):
            return "nothing has been written yet: start the run again"
        return continue_with(resume_command("train", folder.path, runs_dir), count)

    return launch(count, config.model, how_to_continue, folder.name)


def _profilers(steps: int | None, first_step: int, last_step: int) -> list[ProfileCallback]:
    """Return the callback that traces `steps` steps; none without --profile."""
    if steps is None:
        return []
    from bandpo_cli.experiments.profile import ProfileCallback, check_profile_steps

    check_profile_steps(steps, first_step, last_step)
    return [ProfileCallback(steps)]
