"""A training run from the loaded model to the closing lines: the loop, with the record and the onlookers around it."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bandpo_cli.cli.lines import say, warn
from bandpo_cli.cli.memory import memory_advice
from bandpo_cli.cli.views import eval_figures, make_view
from bandpo_cli.config.layers import to_yaml
from bandpo_cli.config.run import RunConfig
from bandpo_cli.reports.run_plots import plot_run
from bandpo_cli.tasks.base import Task
from bandpo_cli.tracking.artifacts import run_artifacts
from bandpo_cli.tracking.environment import describe_environment
from bandpo_cli.tracking.mlflow_names import run_tags
from bandpo_cli.tracking.mlflow_tracker import open_tracker
from bandpo_cli.tracking.run_folder import RunFolder
from bandpo_cli.tracking.store import tracking_store, ui_command
from bandpo_cli.tracking.tracker import RunStatus, Tracker, status_of

if TYPE_CHECKING:
    from bandpo_cli.training.parts import Parts


def run_training(config: RunConfig, task: Task, console: Console, runs_dir: Path, name: str) -> None:
    """Train, write the run folder, mirror it to MLflow, and say where everything is.

    Raises:
        UserError: the model cannot be loaded; nothing has been written then.
        RunError: the device has not enough memory; the message names the settings that take less.
    """
    with console.status("loading torch and the model …"), memory_advice(config):
        from bandpo_cli.training.parts import build

        parts = build(config, task)
    for note in parts.notes:
        say(console, note, "note:", "yellow")
    folder = RunFolder.create(runs_dir, name)
    folder.write_config(to_yaml(config))
    env = describe_environment()
    folder.write_env(env)
    say(console, str(folder.path), "run folder")

    tracker = open_tracker(config.tracking, folder.path, partial(warn, console))
    tracker.start(name, config.model_dump(mode="json"), run_tags(env, config.tracking.parent))
    start = time.perf_counter()
    error: BaseException | None = None
    try:
        with memory_advice(config):
            _watch(config, parts, folder, tracker, console)
    except BaseException as raised:
        error = raised
        raise
    finally:
        for grader, line in parts.grader.errors.items():
            warn(console, f"grader '{grader}' failed on some answers; the first time: {line}")
        parts.close()
        _close(config, folder, tracker, console, status_of(error), time.perf_counter() - start, error)
    _say_where(config, folder, console, runs_dir)


def _watch(config: RunConfig, parts: Parts, folder: RunFolder, tracker: Tracker, console: Console) -> None:
    """Run the loop to its end, showing and mirroring each step."""
    from bandpo_cli.training.loop import train

    with make_view(console, config.steps) as view:
        for report in train(config, parts, folder, view.phase):
            tracker.log_metrics(report.step, report.record)
            view.show(report)


def _close(
    config: RunConfig,
    folder: RunFolder,
    tracker: Tracker,
    console: Console,
    status: RunStatus,
    seconds: float,
    error: BaseException | None,
) -> None:
    """Write the summary and the plots, then let the tracker finish: the run folder comes first."""
    records = folder.read_metrics()
    evaluations = [record for record in records if any(key.startswith("eval/") for key in record)]
    folder.write_summary(
        {
            "status": status,
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "steps": records[-1]["step"] if records else 0,
            "of_steps": config.steps,
            "time/train_s": round(seconds, 3),
            "first_eval": _eval_of(evaluations[0]) if evaluations else None,
            "last_eval": _eval_of(evaluations[-1]) if evaluations else None,
            "last_step": records[-1] if records else None,
        }
    )
    with console.status("drawing the plots, finishing the record in MLflow …"):
        if records:
            plot_run(folder.path)
        tracker.finish(status, run_artifacts(folder.path))
    if status != "FINISHED":
        say(console, f"{status.lower()}; what the run did is in {folder.path}")


def _eval_of(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key == "step" or key.startswith("eval/")}


def _say_where(config: RunConfig, folder: RunFolder, console: Console, runs_dir: Path) -> None:
    """Print what came out of the run, where it is and how to look at it."""
    records = folder.read_metrics()
    steps = [record for record in records if "train/accuracy" in record]
    evaluations = [record for record in records if eval_figures(record)]
    seconds = sum(record["time/step"] for record in records)

    def line(heading: str, text: str) -> None:
        say(console, text, f"{heading:<10}")

    line("done", f"{len(steps)} steps in {seconds:.0f} s")
    for heading, record in (
        zip(("held-out", ""), (evaluations[0], evaluations[-1]), strict=True) if evaluations else ()
    ):
        line(heading, f"step {record['step']:>4}  {eval_figures(record)}")
    if steps:
        first, last = steps[0], steps[-1]
        line("accuracy", f"{first['train/accuracy']:.3f} → {last['train/accuracy']:.3f} on training problems")
        line("entropy", f"{first['train/entropy']:.3f} → {last['train/entropy']:.3f} nats a token")
    line("run folder", str(folder.path))
    line("plots", str(folder.path / "plots"))
    if config.tracking.mlflow:
        line("MLflow", ui_command(tracking_store(config.tracking, runs_dir).uri))
        line("", f"then Model training › {config.tracking.experiment} › {folder.name} › Model metrics")
