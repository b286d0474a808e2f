"""`bandpo sweep`: run every combination of the given settings."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bandpo_cli.cli.completion import complete_task, folder_of, one_of, several_of
from bandpo_cli.cli.options import (
    RUNS,
    Assignments,
    ConfigFiles,
    Mlflow,
    RunsDir,
    SamplerName,
    TrackingUri,
    print_members,
    refuse_with,
)
from bandpo_cli.errors import RunError, UserError
from bandpo_cli.registries import DIVERGENCES, METHODS

if TYPE_CHECKING:
    from rich.console import Console

    from bandpo_cli.experiments.sweep import Executor
    from bandpo_cli.experiments.sweep_request import SweepRequest


def sweep(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A sweep file: fixed, axes, arms, exclude, seeds, baseline."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="M,M",
            help=f"Policy losses: {METHODS.names_text()}.",
            autocompletion=several_of(METHODS),
        ),
    ] = None,
    divergence: Annotated[
        str | None,
        typer.Option(
            metavar="D,D",
            help=f"Trust regions of {METHODS.names_text(lambda each: each.trust_region)}: {DIVERGENCES.names_text()}.",
            autocompletion=several_of(DIVERGENCES),
        ),
    ] = None,
    delta: Annotated[str | None, typer.Option(metavar="R,R", help="Radii of the trust region.")] = None,
    model: Annotated[str | None, typer.Option(metavar="M,M", help="Hugging Face folders or hub ids.")] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            callback=print_members,
            help="Training task, the same for all runs.",
            autocompletion=complete_task,
        ),
    ] = None,
    lr: Annotated[str | None, typer.Option(metavar="R,R", help="Peak learning rates.")] = None,
    max_tokens: Annotated[
        str | None, typer.Option(metavar="N,N", help="The most tokens of a completion.")
    ] = None,
    sampler: SamplerName = None,
    steps: Annotated[
        int | None, typer.Option(help="Batches of rollouts per run.", show_default="100")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="S,S", help="One run of every arm for each.", show_default="0")
    ] = None,
    axis: Annotated[
        list[str] | None,
        typer.Option("--axis", metavar="KEY=V,V", help="Any other setting's values; repeatable."),
    ] = None,
    recorded: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="For --delta match:clip: the run whose recorded tokens both are to clip equally.",
            autocompletion=folder_of("run"),
        ),
    ] = None,
    tuned_on: Annotated[
        str | None,
        typer.Option(
            metavar="SWEEP",
            help="Run each method with the settings that were best in that sweep, with other seeds.",
            autocompletion=folder_of("sweep"),
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="ARM", help="The arm that the report compares the others with.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at a time.", show_default="as many as there are GPUs for, else cores"),
    ] = None,
    gpus_per_run: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=1,
            help="GPUs of each run, one per process; without a GPU K processes on the CPU.",
            show_default="1",
        ),
    ] = None,
    stop_behind: Annotated[
        float | None,
        typer.Option(
            metavar="MARGIN",
            help="End a run half-way or later whose held-out accuracy is this far below another arm's.",
            show_default="no run is ended",
        ),
    ] = None,
    executor: Annotated[
        str,
        typer.Option(
            help="Where runs are executed: local, or ray for a cluster (the extra 'ray').",
            autocompletion=one_of(("local", "ray")),
        ),
    ] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="A running Ray cluster, or auto.", show_default="one of this machine"
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the sweep's folder.", show_default="sweep-time")
    ] = None,
    config: ConfigFiles = None,
    set_: Assignments = None,
    runs_dir: RunsDir = RUNS,
    tracking_uri: TrackingUri = None,
    mlflow: Mlflow = None,
    dry_run: Annotated[
        bool, typer.Option(help="Print the runs and the estimate of the time, and stop.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="SWEEP",
            help="Resume a sweep: runs that are not finished are executed again.",
            autocompletion=folder_of("sweep"),
        ),
    ] = None,
) -> None:
    """Run every combination of the values that are given, as ordinary runs, and keep them in one folder.

    The values of several lists are combined; each combination is run with each
    seed of --seeds. Each run is a folder in <runs-dir>/<sweep>, as `bandpo train`
    writes it. A run that fails stops no other, and --resume starts it again.

    [bold]bandpo sweep --delta 0.01,0.05,0.1 --divergence kl,tv --seeds 0,1,2[/bold]

    [bold]bandpo sweep --method band,clip,clip-higher,none --seeds 0,1,2 --baseline clip[/bold]

    [bold]bandpo sweep --divergence kl,tv --delta match:clip --recorded RUN[/bold]  at equal clipping

    [bold]bandpo sweep --method band,clip --lr 2e-5,5e-5,1e-4 --seeds 100,101 --name tuning[/bold]
    [bold]bandpo sweep --tuned-on tuning --seeds 0,1,2,3,4,5[/bold]  each method at its own best setting

    [bold]bandpo sweep --axis optim.updates=4,8,16 --steps 40 --dry-run[/bold]

    [bold]bandpo sweep --delta 0.01,0.05 --gpus-per-run 2[/bold]  each run on two GPUs

    [bold]bandpo sweep sweep.yaml[/bold]  axes, named arms and exclusions from a file

    [bold]bandpo sweep --resume NAME[/bold]  after Ctrl-C, a crash or a failed run
    """
    from bandpo_cli.config.files import read_config
    from bandpo_cli.config.layers import flag_layer, read_assignments
    from bandpo_cli.config.task import task_from_arguments
    from bandpo_cli.experiments.sweep import Executor, check_executor
    from bandpo_cli.experiments.sweep_request import plan_sweep

    chosen = Executor(executor, ray_address, jobs, stop_behind, gpus_per_run)
    check_executor(chosen)
    if resume is not None:
        given = {
            "FILE": file, "--method": method, "--divergence": divergence, "--delta": delta, "--model": model,
            "--task": task, "--lr": lr, "--max-tokens": max_tokens, "--sampler": sampler, "--steps": steps,
            "--seeds": seeds, "--axis": axis, "--baseline": baseline, "--recorded": recorded, "--tuned-on": tuned_on,
            "--name": name, "--config": config, "--set": set_, "--tracking-uri": tracking_uri, "--mlflow": mlflow,
            "--dry-run": dry_run or None,
        }  # fmt: skip
        refuse_with("--resume", "a sweep is resumed with its own plan", given, set(given))
        return _run(resume, chosen, runs_dir, None)
    fixed = flag_layer(
        {
            ("sampling", "engine"): sampler,
            ("steps",): steps,
            ("tracking", "uri"): tracking_uri,
            ("tracking", "mlflow"): mlflow,
        }
    )
    layers = [
        *map(read_config, config or []),
        {"task": task_from_arguments(task)} if task else {},
        fixed,
        read_assignments(set_ or []),
    ]
    axes = {
        "bounds.method": method,
        "bounds.divergence": divergence,
        "bounds.delta": delta,
        "model.path": model,
        "optim.lr": lr,
        "sampling.max_tokens": max_tokens,
    }
    if all(each is None for each in (file, seeds, tuned_on, axis or None, *axes.values())):
        raise UserError(
            "nothing is swept: give values to compare, for example --delta 0.01,0.05,0.1 --seeds 0,1,2, or a sweep file"
        )
    options = {"seeds": seeds, "baseline": baseline, "recorded": recorded, "tuned_on": tuned_on}
    request = plan_sweep(file, axes, axis or [], options, layers, runs_dir)
    return _dry_run(request, chosen, runs_dir) if dry_run else _run(request, chosen, runs_dir, name)


def _run(request: SweepRequest | str, executor: Executor, runs_dir: Path, name: str | None) -> None:
    """Run a new sweep, or resume the one of that name. Raises RunError where runs failed."""
    from bandpo_cli.cli.console import open_console
    from bandpo_cli.cli.signals import exit_on_sigterm
    from bandpo_cli.cli.sweep_view import SweepView
    from bandpo_cli.experiments import sweep as run_sweep
    from bandpo_cli.storage.run_folder import resume_command

    console = open_console(long_running=True)
    if not isinstance(request, str):
        _print_notes(console, request)
    with exit_on_sigterm(), closing(SweepView(console, runs_dir)) as view:
        result = run_sweep(request, executor=executor, runs_dir=runs_dir, name=name, callbacks=[view])
    if result.failures:
        again = resume_command("sweep", result.folder, runs_dir)
        raise RunError(f"{len(result.failures)} of {result.runs} runs failed; try them again: {again}")


def _dry_run(request: SweepRequest, executor: Executor, runs_dir: Path) -> None:
    """Print the runs and how long they will take."""
    from bandpo_cli.cli.console import open_console
    from bandpo_cli.cli.sweep_view import SweepView
    from bandpo_cli.experiments.sweep import dry_run_info

    console = open_console()
    _print_notes(console, request)
    with closing(SweepView(console, runs_dir)) as view:
        view.print_plan(dry_run_info(request, executor))


def _print_notes(console: Console, request: SweepRequest) -> None:
    from bandpo_cli.cli.console import print_line

    for kind, note in request.notes():
        print_line(console, note, kind, "cyan")
