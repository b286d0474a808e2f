"""`bandpo train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bandpo_cli.cli.options import RUNS, Assignments, ConfigFiles, Mlflow, RunsDir, SamplerName, TrackingUri
from bandpo_cli.registries import DIVERGENCES, METHODS, tasks_text


def train(
    config: ConfigFiles = None,
    method: Annotated[
        str | None,
        typer.Option(help=f"Ratio bounds: {METHODS.names_text()}.", show_default="band"),
    ] = None,
    divergence: Annotated[
        str | None,
        typer.Option(
            help=f"Trust region of the Band: {DIVERGENCES.names_text()}.",
            show_default="kl",
        ),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Radius of the trust region.", show_default="0.05")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Hugging Face folder or hub id.", show_default="the embedded model")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"Problems to train on: {tasks_text()}, or a .jsonl, .json, .csv or .parquet file of questions and "
            "answers.",
            show_default="countdown",
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
            metavar="RUN", help="Go on with a run that ended early: its name in --runs-dir, or its folder."
        ),
    ] = None,
    set_: Assignments = None,
    runs_dir: RunsDir = RUNS,
    tracking_uri: TrackingUri = None,
    mlflow: Mlflow = None,
    dry_run: Annotated[
        bool, typer.Option(help="Print the settings, the batch arithmetic and the memory it takes, and stop.")
    ] = False,
) -> None:
    """Train a policy under a Band constraint and record the run.

    With no option at all: the embedded model on countdown, a few minutes on a
    CPU. Settings come from --config files, then flags, then --set; later ones
    win. The run folder under --runs-dir has everything; MLflow mirrors it.

    [bold]bandpo train --divergence tv --delta 0.1[/bold]  another trust region

    [bold]bandpo train --method clip --set bounds.eps_high=0.3[/bold]  a fixed interval

    [bold]bandpo train --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k[/bold]  the real thing

    [bold]bandpo train --config my.yaml --set optim.lr=1e-4[/bold]  a file, one change

    [bold]bandpo train --resume NAME[/bold]  from its last checkpoint, with its settings

    [bold]bandpo train --dry-run[/bold]  every setting, and stop
    """
    from rich.console import Console

    from bandpo_cli.cli.preflight import check_config, checkpoint_warnings, choose_run_name, default_name
    from bandpo_cli.cli.statement import config_warnings, print_statement, run_statement
    from bandpo_cli.config.layers import flag_layer, read_assignments, read_layer, resolve, to_yaml
    from bandpo_cli.config.task import task_from_argument

    flags = {
        ("bounds", "method"): method,
        ("bounds", "divergence"): divergence,
        ("bounds", "delta"): delta,
        ("model", "path"): model,
        ("sampling", "engine"): sampler,
        ("steps",): steps,
        ("seed",): seed,
        ("tracking", "uri"): tracking_uri,
        ("tracking", "mlflow"): mlflow,
    }
    chosen_task = {} if task is None else {"task": task_from_argument(task)}
    layers = [*map(read_layer, config or []), chosen_task, flag_layer(flags), read_assignments(set_ or [])]
    if resume is not None:
        _resume(resume, runs_dir, name, layers, dry_run)
        return
    resolved = resolve(layers)
    folder_name = choose_run_name(runs_dir, name, default_name(resolved))
    problems = check_config(resolved)
    console = Console()
    rows = run_statement(resolved, problems)
    print_statement(
        console, rows, problems.notes(), [*config_warnings(resolved), *checkpoint_warnings(resolved)]
    )
    if dry_run:
        from bandpo_cli.cli.memory import print_memory

        console.print(to_yaml(resolved), markup=False, highlight=False)
        print_memory(console, resolved)
        return
    from bandpo_cli.cli.run_training import run_training

    run_training(resolved, problems, console, runs_dir, folder_name)


def _resume(
    text: str, runs_dir: Path, name: str | None, layers: Sequence[Mapping[str, Any]], dry_run: bool
) -> None:
    """Go on with the run that `text` names, under its lock; a dry run only looks."""
    from contextlib import nullcontext

    from rich.console import Console

    from bandpo_cli.cli.preflight import check_config, checkpoint_warnings
    from bandpo_cli.cli.resume import plan_resume
    from bandpo_cli.cli.statement import config_warnings, print_statement, run_statement
    from bandpo_cli.errors import UserError
    from bandpo_cli.storage.files import run_lock
    from bandpo_cli.storage.run_folder import RunFolder

    if name is not None:
        raise UserError(f"--resume {text}: a run goes on in its own folder; leave out --name")
    folder = RunFolder.open(runs_dir, text)
    with nullcontext() if dry_run else run_lock(folder.path):
        plan = plan_resume(folder, layers)
        console = Console()
        problems = None if plan.trained else check_config(plan.config)
        rows = [] if problems is None else run_statement(plan.config, problems)
        notes = [] if problems is None else problems.notes()
        warnings = [*plan.warnings, *config_warnings(plan.config), *checkpoint_warnings(plan.config)]
        print_statement(console, [*rows, ("resume", plan.describe())], notes, warnings)
        if dry_run:
            return
        from bandpo_cli.cli.run_training import resume_training

        resume_training(plan, problems, console, runs_dir)
