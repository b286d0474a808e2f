"""`bandpo export`, `import` and `sync`: experiments for verl, its runs as run folders, missing data for trackers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bandpo_cli.cli import options as opt
from bandpo_cli.cli.console import ExperimentView, open_console
from bandpo_cli.errors import log, plural
from bandpo_cli.registries import TRACKERS

if TYPE_CHECKING:
    from bandpo_cli.experiments.export_import import SyncReport

export_app = typer.Typer(**opt.GROUP, no_args_is_help=True)
import_app = typer.Typer(**opt.GROUP, no_args_is_help=True)

NewFolder = Annotated[Path, opt.option("DIR", help="Folder to write; it must not exist.")]


@export_app.callback()
def export() -> None:
    """Write an experiment for verl, or the policy of a run as a model folder."""


@export_app.command("verl")
@opt.documented
def export_verl(
    out: NewFolder,
    run: Annotated[str | None, opt.argument("[RUN]", complete=opt.folder_of("run"))] = None,
    config: opt.ConfigFiles = None,
    set_: opt.Assignments = None,
    nodes: Annotated[int, opt.option("N", min=1)] = 1,
    gpus_per_node: Annotated[int, opt.option("N", min=1)] = 8,
    allow_differences: Annotated[bool, opt.option()] = False,
    runs_dir: opt.RunsDir = opt.RUNS,
) -> None:
    """Write a folder with which verl runs an experiment on one or several machines.

    It has the command with every setting (run.sh), Ray with or without Slurm
    (cluster.sh), the problems with their prompts, the reward function with this
    package's graders, the package as a wheel, and a README.md that maps each
    setting. A setting that verl would compute differently is an error, unless
    --allow-differences is given.

    [bold]bandpo export verl -c paper/base -c paper/models/qwen2.5-3b-instruct --out job[/bold]  one machine with 8 GPUs
    [bold]bandpo export verl first --set optim.warmup_steps=0 --out job[/bold]  the settings of a run, for a GPU
    [bold]bandpo export verl -c my.yaml --out job --nodes 4 --gpus-per-node 8[/bold]  four machines
    [bold]bandpo export verl --set optim.warmup_steps=0 --out job --gpus-per-node 1[/bold]  the bundled model

    Args:
        run: A run whose settings to export; --config and --set change them. The dtype, kernels and engine of its
            machine are left out.
        nodes: Machines of the job.
        gpus_per_node: GPUs of each machine.
        allow_differences: Export settings that verl computes differently; README.md lists them.
    """
    from bandpo_cli.config.layers import read_assignments, read_config, resolve
    from bandpo_cli.experiments import export_verl as export_experiment
    from bandpo_cli.exports.verl_files import settings_for_cluster

    layers = [*map(read_config, config or []), read_assignments(set_ or [])]
    settings, changes = settings_for_cluster(run, layers, runs_dir) if run else (resolve(layers), [])
    size = {"nodes": nodes, "gpus_per_node": gpus_per_node}
    exported = export_experiment(settings, out, **size, changes=changes, allow_differences=allow_differences)
    rows = [
        ("method", settings.bounds.describe()),
        ("data", f"{exported.problems:,} training problems, {exported.heldout:,} held out"),
        ("note", "\n".join(exported.notes)),
        ("batches", "\n".join(exported.arithmetic)),
        ("differs", "\n".join(exported.differences)),
        ("changed", "\n".join(changes)),
        ("run", f"bash {out / 'run.sh'}" if nodes == 1 else f"cd {out} && sbatch cluster.sh; see README.md"),
    ]
    open_console().print_rows(rows, len("batches"))


@export_app.command()
@opt.documented
def merged(
    model: Annotated[str, opt.argument("RUN", complete=opt.folder_of("run"))],
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

    open_console().print_line(str(export_merged(model, out, runs_dir)), "model")


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
    open_console().print_rows([(str(imported.path), progress), ("excluded", ", ".join(excluded))])


@opt.documented
def sync(
    runs: Annotated[list[str] | None, opt.argument("RUN...", complete=opt.folder_of("run", "sweep"))] = None,
    all_: Annotated[bool, opt.option()] = False,
    tracker: Annotated[
        list[str] | None, opt.option("NAME", "those of the run", complete=opt.one_of(TRACKERS))
    ] = None,
    tracking_uri: Annotated[str | None, opt.option("URI", "where the run was tracked, or would be")] = None,
    runs_dir: opt.RunsDir = opt.RUNS,
) -> None:
    """Send to the trackers all data of runs that they do not have, for example after an outage.

    Reads the run folders only: settings, every metric of every step, files, how the
    run ended. Data that a tracker already has are not sent again, so you can repeat
    the command at any time. A run that is still being written stays RUNNING.

    [bold]bandpo sync first[/bold]  the run in runs/first

    [bold]bandpo sync deltas --tracking-uri http://127.0.0.1:5000[/bold]  a sweep's runs, to a server

    [bold]bandpo sync first --tracker wandb[/bold]  to Weights & Biases

    [bold]bandpo sync --all[/bold]  every run that has a tracker

    Args:
        runs: Runs, by name or folder; a sweep stands for all of its runs.
        all_: Send every run in --runs-dir, including the runs of sweeps.
        tracker: Trackers to send to; repeatable, or several separated by commas.
        tracking_uri: MLflow server or store.
    """
    from bandpo_cli.experiments import sync as sync_runs

    with closing(SyncView(open_console())) as view:
        sync_runs(
            runs or [], all_runs=all_, trackers=opt.split_commas(tracker or []), uri=tracking_uri, runs_dir=runs_dir,
            callbacks=[view],
        )  # fmt: skip


class SyncView(ExperimentView):
    """Console view of a sync: one line per run."""

    def start(self, info: Sequence[Path]) -> None:
        self._names = deque(path.name for path in info)

    def phase(self, name: str) -> None:
        self.spin(f"sending {self._names[0]} …")

    def step(self, report: SyncReport) -> None:
        """Print what was sent of a run, or why it was skipped; errors are printed at the end."""
        self.spin(None)
        self._names.popleft()
        label = report.name if report.tracker == "mlflow" else f"{report.name}, {report.tracker}"
        if report.skipped is not None:
            self.console.print_line(f"left out: {report.skipped}", label)
        if (synced := report.result) is None:
            return
        metrics = synced.metrics
        sent = {"metric value": metrics.new, "param": synced.params, "tag": synced.tags, "file": synced.files}
        there = {"metric value": metrics.there, "file": synced.files_there}
        new, old = (
            [plural(number, noun) for noun, number in part.items() if number] for part in (sent, there)
        )
        (new if synced.ended else old).append(f"status {synced.status}")
        line = f"sent {', '.join(new) or 'nothing'}{'; there already: ' if old else ''}{', '.join(old)}"
        later = "; still being written: its files and its status come later" if synced.writing else ""
        self.console.print_line(line + later, label)
        if number := metrics.differing:
            log.warning(
                f"{plural(number, 'value')} at MLflow {'differs' if number == 1 else 'differ'} from the run "
                "folder's: steps that a resume did again were sent before, and MLflow changes no value"
            )
