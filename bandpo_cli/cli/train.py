"""`bandpo train`: a new training run, or the resume of one."""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bandpo_cli.cli import options as opt
from bandpo_cli.cli.console import open_console
from bandpo_cli.cli.signals import StopSignals
from bandpo_cli.errors import UserError
from bandpo_cli.processes.ranks import RUN_NAME_VARIABLE, rank_count, ranks_to_start

if TYPE_CHECKING:
    from bandpo_cli.experiments.monitor import ProfileCallback
    from bandpo_cli.experiments.plan import Plan


@opt.takes_settings
def train(
    *,
    config: opt.ConfigFiles = None,
    settings: opt.Settings,
    name: Annotated[str | None, opt.option("NAME", "method-task-seed-time")] = None,
    resume: Annotated[str | None, opt.option("RUN", complete=opt.folder_of("run"))] = None,
    fork: Annotated[str | None, opt.option("RUN[@STEP]", complete=opt.folder_of("run"))] = None,
    set_: opt.Assignments = None,
    runs_dir: opt.RunsDir = opt.RUNS,
    tracking: opt.Tracking,
    nproc: opt.Nproc = None,
    profile: Annotated[int | None, opt.option("N")] = None,
    dry_run: Annotated[bool, opt.option()] = False,
    all_settings: Annotated[bool, opt.option()] = False,
    probe: Annotated[bool, opt.option()] = False,
    probe_size: Annotated[int | None, opt.option("N", "32", min=1)] = None,
) -> int | None:
    """Train a policy with a trust-region policy loss and record the run.

    Without options, the command trains the bundled model on countdown, a few
    minutes on a CPU. Settings come from --config files, then flags, then --set;
    later ones win. The run folder under --runs-dir contains all results; MLflow receives a copy.

    [bold]bandpo train --divergence tv --delta 0.1[/bold]  another trust region
    [bold]bandpo train --method clip --set bounds.eps_high=0.3[/bold]  a fixed interval
    [bold]bandpo train --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k[/bold]  from the hub
    [bold]bandpo train --config my.yaml --set optim.lr=1e-4[/bold]  a file, one change
    [bold]bandpo train --resume NAME[/bold]  from its last checkpoint, with its settings
    [bold]bandpo train --fork NAME@50 --method clip[/bold]  a changed run from a checkpoint
    [bold]bandpo train --nproc 8[/bold]  on the eight GPUs of this machine
    [bold]bandpo train --dry-run[/bold]  what is changed, the start of the run, a prompt
    [bold]bandpo train --probe[/bold]  try the untrained model on 32 problems, and stop

    Args:
        name: Name of the run's folder.
        resume: Resume a run that ended early: its name in --runs-dir, or its folder.
        fork: Start a new run that continues a checkpoint of another run, by default the last one, with changed
            settings. Weights, optimizer state, position in the data and random state are those of the checkpoint.
        profile: Trace N steps after the first with torch's profiler.
        dry_run: Print the changed settings, the memory and a prompt, try the graders, load all that training loads, and
            stop. What a dry run accepts, training starts.
        all_settings: With --dry-run, print all settings and not only those that differ from the defaults.
        probe: Sample some problems with the untrained model, print what can be learned from them and what to change,
            and stop.
        probe_size: Number of problems of --probe, rounded to a multiple of optim.updates.
    """
    from bandpo_cli.cli.launch_and_watch_ranks import launch
    from bandpo_cli.config.layers import nest, read_assignments, read_config, resolve
    from bandpo_cli.experiments.plan import new_run_layers, plan_training
    from bandpo_cli.experiments.resume_and_fork import locked_resume, plan_fork

    layers = [*map(read_config, config or []), nest(settings | tracking), read_assignments(set_ or [])]
    to_start = None if nproc is None else ranks_to_start(nproc)
    ranks = to_start or rank_count()
    asked = os.environ.get(RUN_NAME_VARIABLE) if name is None else name
    if fork is not None and (resume is not None or probe):
        why = "it starts a new run from a checkpoint"
        raise UserError(f"--fork {fork}: {why}; leave out --resume and --probe")
    if probe:
        others = {"--resume": resume, "--profile": profile, "--dry-run": dry_run, "several ranks": ranks > 1}
        if given := [flag for flag, value in others.items() if value]:
            raise UserError(f"--probe: it tries a new run in one process; leave out {' and '.join(given)}")
    if all_settings and not dry_run:
        raise UserError("--all-settings: it goes with --dry-run; config.yaml of a run has all settings")
    if probe_size is not None and not probe:
        raise UserError(f"--probe-size {probe_size}: it goes with --probe")
    with ExitStack() as lock:
        if resume is not None:
            if name is not None:
                raise UserError(f"--resume {resume}: the run continues in its folder; remove --name")
            plan = lock.enter_context(locked_resume(resume, runs_dir, layers, read_only=dry_run, ranks=ranks))
        elif fork is not None:
            plan = plan_fork(fork, layers, runs_dir, asked, ranks)
        else:
            plan = plan_training(resolve(new_run_layers(layers, runs_dir)), runs_dir, asked, ranks)
        if probe:
            from bandpo_cli.cli.preview import run_probe
            from bandpo_cli.experiments.trials import PROBLEMS

            run_probe(plan, runs_dir, probe_size or PROBLEMS)
            return None
        profiler = None
        if profile is not None:
            from bandpo_cli.experiments.monitor import ProfileCallback, check_profile_steps

            check_profile_steps(profile, plan.first_step, plan.config.steps)
            profiler = ProfileCallback(profile)
        if to_start is None or plan.task is None:  # plots and the summary need one process
            _run(plan, runs_dir, ranks, profiler, all_settings if dry_run else None)
            return None
    # With --nproc this process has only checked the settings. The lock of a resume is released: rank 0 takes it.
    return launch(to_start, plan.config, "train", plan.folder.path, runs_dir)


def _run(
    plan: Plan, runs_dir: Path, ranks: int, profiler: ProfileCallback | None, dry_run: bool | None
) -> None:
    """Print the settings, then train and print the summary, or preview a dry run, True: with all settings."""
    from bandpo_cli.cli.train_view import TrainView, print_profile, print_summary, settings_rows
    from bandpo_cli.experiments.run import run_plan

    console = open_console(long_running=True)
    task, config = plan.task, plan.pinned
    if dry_run is not None:
        from bandpo_cli.cli.preview import print_changes, print_dry_run

        print_changes(console, plan.config, dry_run)
    rows = [] if task is None else settings_rows(config, task, ranks)
    if plan.text:
        rows.append(("resume" if plan.is_resume else "fork of", plan.text))
    console.print_settings(rows, [] if task is None else task.notes, plan.warnings)
    if dry_run is not None:
        if task is not None:
            print_dry_run(console, plan)
        return
    with StopSignals() as signals, closing(TrainView(console, runs_dir, signals)) as view:
        callbacks = [view, signals, *([] if profiler is None else [profiler])]
        result = run_plan(plan, callbacks, signals.is_requested)
        if result.status != "FINISHED":
            raise SystemExit(signals.exit_code)
        print_summary(console, config, result, plan.first_step)
        if profiler is not None and profiler.phases:
            print_profile(console, profiler)
