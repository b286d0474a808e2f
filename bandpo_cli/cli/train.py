"""`bandpo train`: a new training run, or the resume of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bandpo_cli.cli.completion import complete_task, folder_of, one_of
from bandpo_cli.cli.options import (
    RUNS,
    Assignments,
    ConfigFiles,
    GraderName,
    Mlflow,
    Nproc,
    RunsDir,
    SamplerName,
    TrackingUri,
    print_members,
    single,
)
from bandpo_cli.errors import UserError
from bandpo_cli.registries import DIVERGENCES, METHODS, tasks_text

if TYPE_CHECKING:
    from rich.console import Console

    from bandpo_cli.cli.signals import StopSignals
    from bandpo_cli.cli.train_view import TrainView
    from bandpo_cli.config.run import RunConfig
    from bandpo_cli.experiments.profile import ProfileCallback
    from bandpo_cli.experiments.resume import ResumePlan
    from bandpo_cli.storage.run_folder import RunFolder


def train(
    config: ConfigFiles = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            parser=single("--method"),
            help=f"Policy loss: {METHODS.names_text()}; grpo and ppo mean clip.",
            show_default="band",
            autocompletion=one_of(METHODS),
        ),
    ] = None,
    divergence: Annotated[
        str | None,
        typer.Option(
            metavar="DIVERGENCE",
            parser=single("--divergence"),
            help=f"Trust region of {METHODS.names_text(lambda each: each.trust_region)}: {DIVERGENCES.names_text()}.",
            show_default="kl",
            autocompletion=one_of(DIVERGENCES),
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            metavar="RADIUS",
            parser=single("--delta", float),
            help="Radius of the trust region.",
            show_default="0.05",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Hugging Face folder or hub id.", show_default="the embedded model")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            callback=print_members,
            help=f"Problems to train on: {tasks_text()}, or a .jsonl, .json, .csv or .parquet file of questions and "
            "answers.",
            show_default="countdown",
            autocompletion=complete_task,
        ),
    ] = None,
    grader: GraderName = None,
    lr: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            parser=single("--lr", float),
            help="Peak learning rate.",
            show_default="5e-5; 1e-6 for language models",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=single("--max-tokens", int),
            help="The most tokens of a completion.",
            show_default="8; 1024 for language models",
        ),
    ] = None,
    sampler: SamplerName = None,
    steps: Annotated[int | None, typer.Option(help="Batches of rollouts.", show_default="100")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random choice.", show_default="0")] = None,
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
    tracking_uri: TrackingUri = None,
    mlflow: Mlflow = None,
    nproc: Nproc = None,
    profile: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=single("--profile", int),
            help="Trace N steps after the first with torch's profiler.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Print the settings, the batch arithmetic and the memory it takes, and stop.")
    ] = False,
) -> int | None:
    """Train a policy under a Band constraint and record the run.

    Without options: the embedded model on countdown, a few minutes on a
    CPU. Settings come from --config files, then flags, then --set; later ones
    win. The run folder under --runs-dir has everything; MLflow mirrors it.

    [bold]bandpo train --divergence tv --delta 0.1[/bold]  another trust region

    [bold]bandpo train --method clip --set bounds.eps_high=0.3[/bold]  a fixed interval

    [bold]bandpo train --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k[/bold]  a model of the hub

    [bold]bandpo train --config my.yaml --set optim.lr=1e-4[/bold]  a file, one change

    [bold]bandpo train --resume NAME[/bold]  from its last checkpoint, with its settings

    [bold]bandpo train --nproc 8[/bold]  on the eight GPUs of this machine

    [bold]bandpo train --dry-run[/bold]  every setting, and stop
    """
    from bandpo_cli.config.files import read_config
    from bandpo_cli.config.layers import flag_layer, read_assignments, resolve
    from bandpo_cli.config.task import task_from_arguments

    flags = {
        ("bounds", "method"): method,
        ("bounds", "divergence"): divergence,
        ("bounds", "delta"): delta,
        ("model", "path"): model,
        ("task", "grader"): grader,
        ("optim", "lr"): lr,
        ("sampling", "max_tokens"): max_tokens,
        ("sampling", "engine"): sampler,
        ("steps",): steps,
        ("seed",): seed,
        ("tracking", "uri"): tracking_uri,
        ("tracking", "mlflow"): mlflow,
    }
    chosen_task = {"task": task_from_arguments(task)} if task else {}
    layers = [*map(read_config, config or []), chosen_task, flag_layer(flags), read_assignments(set_ or [])]
    if resume is not None:
        if name is not None:
            raise UserError(f"--resume {resume}: a run is resumed in its own folder; leave out --name")
        return _resume(resume, runs_dir, layers, dry_run, profile, nproc)
    return _train(resolve(layers), runs_dir, name, dry_run, profile, nproc)


def _train(
    config: RunConfig,
    runs_dir: Path,
    name: str | None,
    dry_run: bool,
    profile: int | None = None,
    nproc: int | None = None,
) -> int | None:
    """Print the statement, then train; a dry run prints the settings and the memory instead.

    With `--nproc` this process only checks the settings, and starts the ranks, which print. Return the exit code then.
    """
    from bandpo_cli.cli.console import open_console
    from bandpo_cli.cli.launch import ranks_to_start
    from bandpo_cli.cli.statement import print_memory, print_statement, print_summary, run_statement
    from bandpo_cli.config.layers import to_yaml
    from bandpo_cli.experiments.train import check_prompt_lengths, plan_training, train
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
    if dry_run:
        console.print(to_yaml(config), markup=False, highlight=False)
        if print_memory(console, config, ranks):
            check_prompt_lengths(config, plan.task)
        return None
    with _callbacks(console, runs_dir) as (view, signals):
        result = train(plan, callbacks=[view, signals, *profilers], stop_requested=lambda: signals.requested)
        if result.status != "FINISHED":
            raise SystemExit(signals.exit_code)
        print_summary(console, config, result)
        _print_profiles(console, profilers)
    return None


def _resume(
    run: str,
    runs_dir: Path,
    layers: Sequence[Mapping[str, Any]],
    dry_run: bool,
    profile: int | None = None,
    nproc: int | None = None,
) -> int | None:
    """Resume the run under its lock; a dry run prints the plan and takes no lock.

    With `--nproc` this process only checks that the run can be resumed, and starts the ranks. Return the exit code
    then.
    """
    from bandpo_cli.cli.launch import ranks_to_start
    from bandpo_cli.experiments.resume import locked_resume
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
    from bandpo_cli.cli.statement import print_statement, print_summary, run_statement
    from bandpo_cli.experiments.resume import resume

    console = open_console(long_running=True)
    rows = [] if plan.task is None else run_statement(plan.config, plan.task, ranks)
    notes = [] if plan.task is None else plan.task.notes()
    print_statement(console, [*rows, ("resume", plan.describe())], notes, plan.warnings)
    if dry_run:
        return
    with _callbacks(console, runs_dir) as (view, signals):
        result = resume(plan, callbacks=[view, signals, *profilers], stop_requested=lambda: signals.requested)
        if result.status != "FINISHED":
            raise SystemExit(signals.exit_code)
        print_summary(console, plan.config, result)
        _print_profiles(console, profilers)


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


def _print_profiles(console: Console, profilers: Sequence[ProfileCallback]) -> None:
    """Print the table of each finished profile."""
    from bandpo_cli.cli.profile_view import print_profile

    for profiler in profilers:
        if profiler.result is not None:
            print_profile(console, profiler.result)


@contextmanager
def _callbacks(console: Console, runs_dir: Path) -> Iterator[tuple[TrainView, StopSignals]]:
    """Yield the console view and the signal handlers of a run, and remove both at the end."""
    from bandpo_cli.cli.signals import StopSignals
    from bandpo_cli.cli.train_view import TrainView

    with StopSignals() as signals, closing(TrainView(console, runs_dir, signals)) as view:
        yield view, signals
