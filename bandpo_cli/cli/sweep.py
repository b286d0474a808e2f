"""`bandpo sweep`: run every combination of the given settings."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from bandpo_cli.cli import options as opt
from bandpo_cli.cli.console import open_console, print_line
from bandpo_cli.cli.options import folder_of, one_of
from bandpo_cli.cli.signals import exit_on_sigterm
from bandpo_cli.errors import RunError, UserError

_EXECUTION = {
    "--resume", "--jobs", "--gpus-per-run", "--stop-behind", "--executor", "--ray-address", "--runs-dir"
}  # fmt: skip
"""The options that say how runs are executed, and not which."""


@opt.takes_settings("sweep")
def sweep(
    context: typer.Context,
    *,
    file: Annotated[Path | None, opt.argument("[FILE]")] = None,
    settings: opt.Settings,
    seeds: Annotated[str | None, opt.option("S,S", "0")] = None,
    axis: Annotated[list[str] | None, opt.option("KEY=V,V")] = None,
    fork: Annotated[str | None, opt.option("RUN[@STEP]", complete=folder_of("run"))] = None,
    recorded: Annotated[str | None, opt.option("RUN", complete=folder_of("run"))] = None,
    tuned_on: Annotated[str | None, opt.option("SWEEP", complete=folder_of("sweep"))] = None,
    baseline: Annotated[str | None, opt.option("VARIANT")] = None,
    jobs: Annotated[
        int | None, opt.option(default="as many as there are GPUs for, else cores", min=1)
    ] = None,
    gpus_per_run: Annotated[int | None, opt.option("K", "1", min=1)] = None,
    stop_behind: Annotated[float | None, opt.option("MARGIN", "no run is ended")] = None,
    executor: Annotated[str, opt.option(complete=one_of(("local", "ray")))] = "local",
    ray_address: Annotated[
        str | None, opt.option("ADDRESS", "a local cluster that ends with the sweep")
    ] = None,
    name: Annotated[str | None, opt.option(default="sweep-time")] = None,
    config: opt.ConfigFiles = None,
    set_: opt.Assignments = None,
    runs_dir: opt.RunsDir = opt.RUNS,
    tracking: opt.Tracking,
    dry_run: Annotated[bool, opt.option()] = False,
    resume: Annotated[str | None, opt.option("SWEEP", complete=folder_of("sweep"))] = None,
) -> None:
    """Run every combination of the given values as an ordinary run, in one folder.

    The values of several lists are combined; each combination is run with each
    seed of --seeds. Each run is a folder in <runs-dir>/<sweep>, as `bandpo train`
    writes it. A failed run does not stop the other runs; --resume starts it again.

    [bold]bandpo sweep --delta 0.01,0.05,0.1 --divergence kl,tv --seeds 0,1,2[/bold]

    [bold]bandpo sweep --method band,clip,clip-higher,none --seeds 0,1,2 --baseline clip[/bold]

    [bold]bandpo sweep --divergence kl,tv --delta match:clip --recorded RUN[/bold]  at equal clipping

    [bold]bandpo sweep --method band,clip --lr 2e-5,5e-5,1e-4 --seeds 100,101 --name tuning[/bold]
    [bold]bandpo sweep --tuned-on tuning --seeds 0,1,2,3,4,5[/bold]  each method
    with its best settings, on held-out seeds

    [bold]bandpo sweep --fork RUN@50 --method band,clip --seeds 0,1[/bold]  from one checkpoint

    [bold]bandpo sweep --axis optim.updates=4,8,16 --steps 40 --dry-run[/bold]

    [bold]bandpo sweep --delta 0.01,0.05 --gpus-per-run 2[/bold]  each run on two GPUs

    [bold]bandpo sweep sweep.yaml[/bold]  axes, named variants and exclusions from a file

    [bold]bandpo sweep --resume NAME[/bold]  after Ctrl-C, a crash or a failed run

    Args:
        file: A sweep file with the keys fixed, axes, variants, exclude, seeds, fork and baseline.
        seeds: Seeds; every variant runs once per seed.
        axis: Any other setting's values; repeatable.
        fork: Continue a checkpoint of RUN in every run, by default the last one. The settings of RUN are the defaults;
            a seed decides the random numbers after this step.
        recorded: For --delta match:clip: the run on whose recorded tokens the radius is matched to the clip
            fraction of clip.
        tuned_on: Run each method with the settings that were best in that sweep, with other seeds.
        baseline: The variant that the report compares all other variants with.
        jobs: Runs at a time; a resume keeps the number.
        gpus_per_run: Number of GPUs per run, one process per GPU. Without a GPU, a run has K processes on the
            CPU.
        stop_behind: Stop a run after half of its steps or later if its held-out accuracy is more than MARGIN
            below another variant's.
        executor: Where runs are executed: local, or ray for a cluster (the extra 'ray').
        ray_address: A running Ray cluster, or auto.
        name: Name of the sweep's folder.
        dry_run: Print the runs and the estimate of the time, and stop.
        resume: Resume a sweep: runs that are not finished are executed again.
    """
    from bandpo_cli.config.layers import nest, read_assignments, read_config
    from bandpo_cli.experiments import sweep as run_sweep
    from bandpo_cli.sweeps.sweep_plan import SweepPlan, plan_sweep
    from bandpo_cli.sweeps.sweep_run import Executor, dry_run_info

    chosen = Executor(executor, ray_address, jobs, stop_behind, gpus_per_run)
    request: SweepPlan | str
    if resume is not None:
        opt.refuse_with(
            context, "--resume", "the plan of the sweep is used", lambda name: name not in _EXECUTION
        )
        request = resume
    else:
        compared = [flag.setting for flag in opt.SETTINGS if flag.sweep == "several values"]
        axes = {key: settings.pop(key) for key in compared if key in settings}
        layers = [*map(read_config, config or []), nest(settings | tracking), read_assignments(set_ or [])]
        if not (axes or axis or seeds is not None or file is not None or tuned_on is not None):
            raise UserError(
                "nothing is swept: give a sweep file or values, as in: --delta 0.01,0.05 --seeds 0,1"
            )
        options = {
            "seeds": seeds,
            "baseline": baseline,
            "fork": fork,
            "recorded": recorded,
            "tuned_on": tuned_on,
        }
        request = plan_sweep(file, axes, axis or [], options, layers, runs_dir)
    from bandpo_cli.cli.sweep_view import SweepView
    from bandpo_cli.storage.run_folder import shell_command

    console = open_console(long_running=not dry_run)
    for kind, note in request.notes() if isinstance(request, SweepPlan) else ():
        print_line(console, note, kind, "cyan")
    with closing(SweepView(console, runs_dir)) as view:
        if dry_run and isinstance(request, SweepPlan):
            view.print_plan(dry_run_info(request, chosen))
            return
        with exit_on_sigterm():
            result = run_sweep(request, executor=chosen, runs_dir=runs_dir, name=name, callbacks=[view])
    if result.failures:
        again = shell_command("sweep --resume", result.folder, runs_dir)
        raise RunError(f"{len(result.failures)} of {result.runs} runs failed; try them again: {again}")
