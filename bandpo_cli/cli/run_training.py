"""A training run from the loaded model to the closing lines: the loop, with the record and the onlookers around it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bandpo_cli.cli.lines import print_line, print_warning
from bandpo_cli.cli.machine import system_error_message
from bandpo_cli.cli.memory import out_of_memory_errors
from bandpo_cli.cli.resume import ResumePlan, resume_command
from bandpo_cli.cli.stop_signals import StopSignals
from bandpo_cli.cli.views import eval_metrics_text, make_train_view
from bandpo_cli.config.layers import to_yaml
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError
from bandpo_cli.reports.run_plots import plot_run
from bandpo_cli.storage.checkpoints import prune_checkpoints, remove_checkpoints_after
from bandpo_cli.storage.environment import describe_environment
from bandpo_cli.storage.files import remove_temporary_files, run_lock
from bandpo_cli.storage.run_folder import RunFolder, run_artifacts
from bandpo_cli.tasks.base import Task
from bandpo_cli.tracking.names import run_tags
from bandpo_cli.tracking.store import tracking_store, ui_command
from bandpo_cli.tracking.tracker import Tracker, open_tracker
from bandpo_cli.types import RunStatus, status_of

if TYPE_CHECKING:
    from bandpo_cli.training.components import Components


def run_training(config: RunConfig, task: Task, console: Console, runs_dir: Path, name: str) -> None:
    """Train, write the run folder, mirror it to MLflow, and say where everything is.

    Raises:
        UserError: the model cannot be loaded; nothing has been written then.
        RunError: the device has not enough memory; the message names the settings that take less.
        SystemExit: Ctrl-C or SIGTERM; the record is closed and says so.
    """
    with StopSignals() as signals, _loaded_components(config, task, console) as parts:
        folder = RunFolder.create(runs_dir, name)
        with run_lock(folder.path):
            folder.write_config(to_yaml(config))
            folder.write_env(describe_environment())
            _run(Run(config, folder, console, runs_dir, signals), parts, first=0)


def resume_training(plan: ResumePlan, task: Task | None, console: Console, runs_dir: Path) -> None:
    """Go on with a run whose lock the caller holds; `task` may be missing where all steps are done.

    What came after the checkpoint is taken back once the model and the state are loaded, and not before.

    Raises:
        As `run_training`.
    """
    with StopSignals() as signals:
        run = Run(plan.config, plan.folder, console, runs_dir, signals)
        if plan.trained or task is None:
            _roll_back(plan)
            with _recorded(run):
                pass
            return
        with _loaded_components(plan.config, task, console) as parts:
            if plan.checkpoint is not None:
                parts.resume_from(plan.checkpoint)
            _roll_back(plan)
            _run(run, parts, first=plan.step + 1)


@dataclass(frozen=True)
class Run:
    """A run as the command line sees it."""

    config: RunConfig
    folder: RunFolder
    console: Console
    runs_dir: Path
    signals: StopSignals


@contextmanager
def _loaded_components(config: RunConfig, task: Task, console: Console) -> Iterator[Components]:
    """Load what the run is built of, and close it in the end."""
    with console.status("loading torch and the model …"), out_of_memory_errors(config):
        from bandpo_cli.training.components import build_components

        parts = build_components(config, task)
    try:
        for note in parts.notes:
            print_line(console, note, "note:", "yellow")
        yield parts
    finally:
        for grader, line in parts.grader.errors.items():
            print_warning(console, f"grader '{grader}' failed on some answers; the first time: {line}")
        parts.close()


def _roll_back(plan: ResumePlan) -> None:
    """Cut the record and the checkpoints back to the step after which the run goes on, and note that it does."""
    folder = plan.folder
    (folder.path / "summary.json").unlink(missing_ok=True)
    remove_temporary_files(folder.path / "plots")
    # Checkpoints first: after a kill in between, one that lies ahead of the record would say that lines are missing.
    remove_checkpoints_after(folder, plan.step)
    folder.roll_back(plan.step)
    prune_checkpoints(folder, plan.config.checkpoint)
    folder.write_config(to_yaml(plan.config))
    when = datetime.now(UTC).isoformat(timespec="seconds")
    folder.record_resume({"time": when, "after_step": max(plan.step, 0)}, describe_environment())


def _run(run: Run, parts: Components, first: int) -> None:
    """Train from step `first` on, with the record and the onlookers around it."""
    from bandpo_cli.training.loop import train

    config, folder, signals = run.config, run.folder, run.signals
    with _recorded(run) as tracker, out_of_memory_errors(config), _disk_advice(folder), signals.deferred():
        with make_train_view(run.console, config.steps) as view:
            for report in train(config, parts, folder, view.phase, first, lambda: signals.asked):
                tracker.log_metrics(report.step, report.record)
                view.show(report)
        if signals.asked and folder.read_metrics()[-1]["step"] < config.steps:
            raise SystemExit(signals.exit_code)


@contextmanager
def _disk_advice(folder: RunFolder) -> Iterator[None]:
    """Turn a disk that takes no more into one line.

    Raises:
        RunError: in place of the system's own error.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
            raise
        raise RunError(f"{folder.path} cannot be written to: {os.strerror(error.errno)}") from error


@contextmanager
def _recorded(run: Run) -> Iterator[Tracker]:
    """Mirror the run at MLflow while it goes on; however it ends, close its record and say so."""
    folder, console = run.folder, run.console
    print_line(console, str(folder.path), "run folder")
    tracker = open_tracker(run.config.tracking, folder.path, partial(print_warning, console))
    env = json.loads((folder.path / "env.json").read_text(encoding="utf-8"))
    tracker.start(folder.name, run.config.model_dump(mode="json"), run_tags(env, run.config.tracking.parent))
    error: BaseException | None = None
    try:
        yield tracker
    except BaseException as raised:
        error = raised
        raise
    finally:
        try:
            _close_record(run.config, folder, tracker, console, status_of(error), error)
        except OSError as failure:  # a full disk among them: what ended the run is the thing to tell
            if error is None:
                raise
            why = system_error_message(failure) or failure.strerror or failure
            print_warning(console, f"the summary and the plots cannot be written: {why}")
        finally:
            if error is not None and (status_of(error) == "KILLED" or folder.checkpoints()):
                print_line(console, f"go on by: {resume_command(folder, run.runs_dir)}")
    print_summary(run.config, folder, console)


def _close_record(
    config: RunConfig,
    folder: RunFolder,
    tracker: Tracker,
    console: Console,
    status: RunStatus,
    error: BaseException | None,
) -> None:
    """Draw the plots and write the summary, then let the tracker finish: the run folder comes first.

    A summary that says FINISHED comes last of the folder: it says that the run is whole.
    """
    records = folder.read_metrics()
    evaluations = [record for record in records if any(key.startswith("eval/") for key in record)]
    with console.status("drawing the plots, finishing the record in MLflow …"):
        try:
            if records:
                plot_run(folder.path)
        finally:
            folder.write_summary(
                {
                    "status": status,
                    "error": None if error is None else f"{type(error).__name__}: {error}",
                    "steps": records[-1]["step"] if records else 0,
                    "of_steps": config.steps,
                    "time/train_s": round(sum(record["time/step"] for record in records), 3),
                    "first_eval": _eval_of(evaluations[0]) if evaluations else None,
                    "last_eval": _eval_of(evaluations[-1]) if evaluations else None,
                    "last_step": records[-1] if records else None,
                }
            )
        tracker.finish(status, run_artifacts(folder.path))
    if status != "FINISHED":
        print_line(console, f"{status.lower()}; what the run did is in {folder.path}")


def _eval_of(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key == "step" or key.startswith("eval/")}


def print_summary(config: RunConfig, folder: RunFolder, console: Console) -> None:
    """Print what came out of the run, where it is and how to look at it."""
    records = folder.read_metrics()
    steps = [record for record in records if "train/accuracy" in record]
    evaluations = [record for record in records if eval_metrics_text(record)]
    seconds = sum(record["time/step"] for record in records)

    def line(heading: str, text: str) -> None:
        print_line(console, text, f"{heading:<10}")

    line("done", f"{len(steps)} steps in {seconds:.0f} s")
    for heading, record in (
        zip(("held-out", ""), (evaluations[0], evaluations[-1]), strict=True) if evaluations else ()
    ):
        line(heading, f"step {record['step']:>4}  {eval_metrics_text(record)}")
    if steps:
        first, last = steps[0], steps[-1]
        line("accuracy", f"{first['train/accuracy']:.3f} → {last['train/accuracy']:.3f} on training problems")
    entropies = [found for record in steps if (found := record["train/entropy"]) is not None]
    if entropies:
        line("entropy", f"{entropies[0]:.3f} → {entropies[-1]:.3f} nats a token")
    line("run folder", str(folder.path))
    line("plots", str(folder.path / "plots"))
    if config.tracking.mlflow:
        line("MLflow", ui_command(tracking_store(config.tracking, folder.path.absolute().parent).uri))
        line("", f"then Model training › {config.tracking.experiment} › {folder.name} › Model metrics")
