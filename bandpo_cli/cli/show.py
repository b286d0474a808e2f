"""`bandpo show`: settings, metrics and files of one run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bandpo_cli.cli.options import RUNS, RunName, RunsDir, TableOrJson

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from bandpo_cli.experiments.overview import RunDescription

_SHOWN_STEPS = 6
_FIRST_METRICS = (
    "train/accuracy", "train/reward", "train/entropy", "train/response_length", "clip/active_fraction",
    "clip/outside_fraction", "gradient/weight_mean", "ratio/max", "kl/old_new", "kl/ref", "optim/grad_norm",
    "optim/lr",
)  # fmt: skip
"""The metrics of the table, in this order, before the scores of evaluations; --all prints every metric."""


def show(
    run: RunName,
    all_: Annotated[bool, typer.Option("--all", help="Every metric.")] = False,
    format_: TableOrJson = "table",
    runs_dir: RunsDir = RUNS,
) -> None:
    """Show a run: the settings that differ from the defaults, the metrics, and the paths of its files.

    [bold]bandpo show first[/bold]

    [bold]bandpo show first --format json[/bold]  all settings and metrics, in scripts
    """
    from bandpo_cli.cli.console import open_console, print_json
    from bandpo_cli.experiments.overview import describe_run

    described = describe_run(run, runs_dir)
    if format_ == "json":
        print_json(_as_json(described))
    else:
        _print_description(open_console(), described, runs_dir, all_)


def _as_json(described: RunDescription) -> dict[str, object]:
    overview = asdict(described.overview) | {"path": str(described.overview.path)}
    return {
        **overview,
        "config": described.config.model_dump(mode="json"),
        "changed": {
            key: {"value": value, "default": default} for key, (value, default) in described.changed.items()
        },
        "metrics": {key: {"first": first, "last": last} for key, (first, last) in described.metrics.items()},
        "checkpoints": described.checkpoints,
        "sampled_steps": described.sampled_steps,
        "plots": [str(path) for path in described.plots],
        "seconds": described.seconds,
    }


def _print_description(
    console: Console, described: RunDescription, runs_dir: Path, every_metric: bool
) -> None:
    from bandpo_cli.cli.console import format_duration, print_column, print_line
    from bandpo_cli.cli.statement import describe_model, print_statement
    from bandpo_cli.storage.run_folder import resume_command
    from bandpo_cli.tracking.store import tracking_store, ui_text

    run, config = described.overview, described.config
    progress = (
        f"{str(run.status).lower()}, step {run.step:,} of {run.steps:,}, {format_duration(described.seconds)}"
    )
    rows = [
        ("run", str(run.path)),
        ("status", progress + (f": {run.error.splitlines()[0]}" if run.error else "")),
        ("model", describe_model(config)),
        ("task", run.task),
        ("bounds", config.bounds.describe()),
        (
            "settings",
            "\n".join(
                f"{key} = {value}  (default {default})" for key, (value, default) in described.changed.items()
            ),
        ),
        ("checkpoints", _steps(described.checkpoints)),
        ("completions", _steps(described.sampled_steps)),
        ("plots", ", ".join(path.name for path in described.plots)),
    ]
    print_statement(console, [(heading, text or "none") for heading, text in rows], [], [])
    if config.tracking.mlflow:
        store = tracking_store(config.tracking, run.path.absolute().parent)
        # Not a row of the table, which would break the address into lines that a terminal does not link.
        print_column(console, ui_text(run.path, store), "MLflow", max(len(heading) for heading, _ in rows))
    console.print()
    console.print(_metric_table(described, every_metric), highlight=False)
    if run.status in ("FAILED", "KILLED"):
        console.print()
        print_line(console, resume_command("train", run.path, runs_dir), "resume with:")


def _metric_table(described: RunDescription, every_metric: bool) -> Table:
    from rich.text import Text

    from bandpo_cli.cli.console import make_table

    table = make_table("metric", ">first", ">step", ">last", ">step")
    order = {key: index for index, key in enumerate(_FIRST_METRICS)}
    chosen = [key for key in described.metrics if every_metric or key in order or _is_score(key)]
    for key in sorted(chosen, key=lambda key: order.get(key, len(order) * key.startswith("eval/"))):
        (first_step, first), (last_step, last) = described.metrics[key]
        table.add_row(Text(key), f"{first:.4g}", f"{first_step}", f"{last:.4g}", f"{last_step}")
    return table


def _is_score(key: str) -> bool:
    """Return whether a metric is mean@n, pass@k or maj@k of an evaluation set."""
    return key.startswith("eval/") and key.rpartition("/")[2].startswith(("mean_at_", "pass_at_", "maj_at_"))


def _steps(steps: tuple[int, ...]) -> str:
    """Return `step 0, 10, 20`; of many steps the first, the last ones and their number."""
    if not steps:
        return ""
    if len(steps) <= _SHOWN_STEPS:
        return f"step {', '.join(map(str, steps))}"
    shown = ", ".join(map(str, steps[-_SHOWN_STEPS + 1 :]))
    return f"step {steps[0]}, …, {shown} ({len(steps)} in all)"
