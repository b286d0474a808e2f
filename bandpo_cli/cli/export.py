"""`bandpo export` and `bandpo import`: experiments as files for another engine, its runs as run folders."""

from pathlib import Path
from typing import Annotated

from bandpo_cli.cli import options as opt
from bandpo_cli.cli.console import open_console, print_line, print_rows
from bandpo_cli.cli.options import folder_of

export_app = opt.command_group(no_args_is_help=True)
import_app = opt.command_group(no_args_is_help=True)

NewFolder = Annotated[Path, opt.option("DIR", help="Folder to write; it must not exist.")]


@export_app.callback()
def export() -> None:
    """Write an experiment for verl, or the policy of a run as a model folder."""


@export_app.command("verl")
@opt.documented
def export_verl(
    out: NewFolder,
    config: opt.ConfigFiles = None,
    set_: opt.Assignments = None,
    nodes: Annotated[int, opt.option("N", min=1)] = 1,
    gpus_per_node: Annotated[int, opt.option("N", min=1)] = 8,
    allow_differences: Annotated[bool, opt.option(flags=["--allow-differences"])] = False,
) -> None:
    """Write a folder with which verl runs an experiment on one or several machines.

    It has the command with every setting (run.sh), the problems with their
    prompts, the reward function with this package's graders, and a README.md
    that maps each setting. A setting that verl would compute differently is an
    error, unless --allow-differences is given.

    [bold]bandpo export verl -c paper/base -c paper/models/qwen2.5-3b-instruct --out job[/bold]  one machine with 8 GPUs
    [bold]bandpo export verl -c my.yaml --out job --nodes 4 --gpus-per-node 8[/bold]  four machines
    [bold]bandpo export verl --set optim.warmup_steps=0 --out job --gpus-per-node 1[/bold]  the bundled model

    Args:
        nodes: Machines of the job.
        gpus_per_node: GPUs of each machine.
        allow_differences: Export settings that verl computes differently; README.md lists them.
    """
    from bandpo_cli.config.layers import read_assignments, read_config, resolve
    from bandpo_cli.experiments import export_verl as export_experiment

    settings = resolve([*map(read_config, config or []), read_assignments(set_ or [])])
    exported = export_experiment(
        settings, out, nodes=nodes, gpus_per_node=gpus_per_node, allow_differences=allow_differences
    )
    rows = [
        ("method", settings.bounds.describe()),
        ("data", f"{exported.problems:,} training problems, {exported.heldout:,} held out"),
        *(("note", line) for line in exported.notes),
        *(("batches", line) for line in exported.arithmetic),
        *(("differs", line) for line in exported.differences),
        ("run", f"bash {out / 'run.sh'}"),
    ]
    print_rows(open_console(), rows)


@export_app.command()
@opt.documented
def merged(
    model: Annotated[str, opt.argument("RUN", complete=folder_of("run"))],
    out: NewFolder,
    runs_dir: Annotated[Path, opt.option("DIR")] = opt.RUNS,
) -> None:
    """Write the policy of a run as a model folder, which transformers and vLLM load.

    The adapters of a run with LoRA are merged into the weights of its base
    model. For a run that trains all weights, the model files of the checkpoint are copied.

    [bold]bandpo export merged NAME --out model[/bold]  the latest checkpoint
    [bold]bandpo export merged NAME@100 --out model[/bold]  the checkpoint of step 100

    Args:
        model: A run (or RUN@STEP) in --runs-dir, or an adapter folder of peft.
        runs_dir: Folder of the runs.
    """
    from bandpo_cli.experiments import export_merged

    print_line(open_console(), str(export_merged(model, out, runs_dir)), "model")


@import_app.callback()
def import_() -> None:
    """Read runs of another engine into the runs folder."""


@import_app.command("verl")
@opt.documented
def import_verl(
    job: Annotated[Path, opt.argument("JOB")],
    name: Annotated[str | None, opt.option(default="the name of the job's folder")] = None,
    tracking_uri: Annotated[
        str | None,
        opt.option("URI", "$MLFLOW_TRACKING_URI, else tracking.uri of the settings, else mlflow.db in JOB"),
    ] = None,
    run: Annotated[str | None, opt.option("ID", "the last run with the job's name")] = None,
    runs_dir: opt.RunsDir = opt.RUNS,
) -> None:
    """Read the MLflow run of a job that verl trained, and write it as a run folder.

    `bandpo report` then compares the run with other runs; runs of verl are variants of
    their own, engine=verl. Metrics with a different meaning in verl are left
    out: accuracy and entropy of training, pass@k.

    [bold]bandpo import verl job[/bold]  the run of job, to runs/job
    [bold]bandpo import verl job --name band-verl --tracking-uri http://127.0.0.1:5000[/bold]  from a server
    [bold]bandpo report runs/job runs/first[/bold]  both engines in one table

    Args:
        job: Folder of `bandpo export verl`.
        name: Name of the run's folder.
        tracking_uri: MLflow server or store that the job wrote to.
        run: The MLflow run.
    """
    from bandpo_cli.experiments import import_verl as import_run

    imported, excluded = import_run(job, name=name, uri=tracking_uri, run_id=run, runs_dir=runs_dir)
    progress = f"{imported.status}, step {imported.step:,} of {imported.steps:,}"
    print_rows(open_console(), [(str(imported.path), progress), ("excluded", ", ".join(excluded))])
