"""An evaluation from its plan to the closing lines: completions drawn or read, judged, stored, scored and shown."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from bandpo_cli.cli.eval_request import EvalRequest, SamplesFile, request_from_record
from bandpo_cli.cli.eval_source import CompletionSource, open_completion_source
from bandpo_cli.cli.eval_views import ProgressRate, make_progress, print_scores
from bandpo_cli.cli.lines import print_line, print_warning
from bandpo_cli.cli.preflight import choose_run_name
from bandpo_cli.config.layers import Layer
from bandpo_cli.errors import UserError
from bandpo_cli.evaluation.scores import Scores, metric_record, score
from bandpo_cli.storage.environment import describe_environment, redact_credentials
from bandpo_cli.storage.eval_folder import EvalFolder, PartKey
from bandpo_cli.storage.files import replace_nonfinite, write_json
from bandpo_cli.storage.tables import EvalRow, read_eval_table
from bandpo_cli.tracking.names import run_tags
from bandpo_cli.tracking.store import tracking_store, ui_command

Rows = dict[str, list[EvalRow]]
"""Every completion by set."""


def run_evaluation(
    request: EvalRequest, runs_dir: Path, asked_name: str | None, console: Console, style: str
) -> None:
    """Evaluate in a new folder.

    Raises:
        UserError: the name is taken, the model cannot be loaded or its data not used; nothing has been written then.
        RunError: the device has not enough memory, or the engine failed; what is judged is kept.
    """
    name = choose_run_name(runs_dir, asked_name, request.default_name())
    with ExitStack() as stack:
        source = open_completion_source(request, console, stack)
        folder = EvalFolder.create(runs_dir, name)
        write_json(folder.path / "env.json", describe_environment())
        with _recorded_status(request, source, folder, console, runs_dir):
            record, scores = _score(
                request, folder, _collect_completions(source, folder, {}, console), console
            )
    _report(request, folder, record, scores, console, runs_dir, style)


def resume_evaluation(text: str, runs_dir: Path, console: Console, style: str, tracking: Layer) -> None:
    """Go on with the evaluation that `text` names; one that has all its completions is scored again from them.

    Raises:
        UserError: there is none of that name, or its model or data are not what they were.
    """
    folder = EvalFolder.open(runs_dir, text)
    before = folder.read_record()
    complete = folder.samples_path.exists()
    request = request_from_record(before, folder.path, tracking, complete)
    if complete:
        print_line(console, f"{folder.path} has all its completions: scoring them again")
        folder.drop_parts()  # a kill between the table and this leaves them
        record, scores = _score(request, folder, _stored(folder), console)
    else:
        with ExitStack() as stack:
            source = open_completion_source(request, console, stack)
            parts = folder.read_parts()
            if parts and before["sets"] != source.planned():
                raise UserError(
                    f"--resume {folder.name}: its completions are of other problems than its tasks have now; start a "
                    "new evaluation"
                )
            with _recorded_status(request, source, folder, console, runs_dir):
                record, scores = _score(
                    request, folder, _collect_completions(source, folder, parts, console), console
                )
    _report(request, folder, record, scores, console, runs_dir, style)


@contextmanager
def _recorded_status(
    request: EvalRequest, source: CompletionSource, folder: EvalFolder, console: Console, runs_dir: Path
) -> Iterator[None]:
    """Say in the record that the evaluation is running, and when it ends early, how to go on with it."""
    sets = source.planned()
    folder.write_record({**_record_head(request, folder, "running"), "sets": sets})
    try:
        yield
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        folder.write_record({**_record_head(request, folder, status), "sets": sets})
        in_runs_dir = (runs_dir / folder.name).absolute() == folder.path.absolute()
        words = ["bandpo", "eval", "--resume", folder.name if in_runs_dir else str(folder.path)]
        if runs_dir != Path("runs"):
            words += ["--runs-dir", str(runs_dir)]
        there = folder.count_stored()
        print_line(
            console,
            f"{status}: {there:,} of {source.completions:,} completions are kept; go on by: {shlex.join(words)}",
        )
        raise


def _collect_completions(
    source: CompletionSource, folder: EvalFolder, parts: dict[PartKey, list[EvalRow]], console: Console
) -> Rows:
    """Get every completion that `parts` lacks, storing each batch before the next; return all of them."""
    pace = ProgressRate(source.completions, sum(map(len, parts.values())))
    print_line(console, str(folder.path), "evaluation")
    with make_progress(console, pace) as progress:
        for batch in source.batches(set(parts)):
            folder.write_part(batch.key, batch.rows)
            parts[batch.key] = batch.rows
            progress.advance(batch.label, len(batch.rows))
    for grader, line in source.errors().items():
        print_warning(console, f"grader '{grader}' failed on some answers; the first time: {line}")
    print_line(console, pace.summary())
    labels = [*source.ids]
    rows: Rows = {label: [] for label in labels}
    for key in sorted(parts):
        rows[labels[key.set_index]] += parts[key]
    folder.write_samples(row for each in rows.values() for row in each)
    return rows


def _stored(folder: EvalFolder) -> Rows:
    rows: Rows = {}
    for row in read_eval_table(folder.samples_path):
        rows.setdefault(row["task"], []).append(row)
    if not rows:
        raise UserError(f"{folder.samples_path}: holds no completions; remove it to draw them anew")
    return rows


def _score(
    request: EvalRequest, folder: EvalFolder, rows: Rows, console: Console
) -> tuple[dict[str, Any], dict[str, Scores]]:
    """Score every completion, and write the figures; return the record and what it was made of."""
    from bandpo_cli.reports.run_plots import plot_success_histogram

    with console.status("intervals by bootstrap …"):
        scores = {
            label: score(label, each, request.config.evaluation.k, request.legacy)
            for label, each in rows.items()
        }
        record = {
            **_record_head(request, folder, "finished"),
            "metrics": metric_record(scores, with_intervals=True),
            "sets": {label: each.as_json() for label, each in scores.items()},
        }
        folder.write_record(record)
        plot_success_histogram(folder.path)
    return record, scores


def _report(
    request: EvalRequest,
    folder: EvalFolder,
    record: Mapping[str, Any],
    scores: Mapping[str, Scores],
    console: Console,
    runs_dir: Path,
    style: str,
) -> None:
    """Show the figures, send them to MLflow, and say where everything is."""
    if style == "json":
        print(json.dumps(replace_nonfinite(record), indent=2, ensure_ascii=False))
    else:
        print_scores(console, scores)
        console.print()
    where = _send_to_mlflow(request, folder, record, console, runs_dir)
    for heading, text in (
        ("figures", str(folder.path / "eval.json")),
        ("samples", str(folder.samples_path)),
        ("histogram", str(folder.path / "plots" / "success.png")),
        ("MLflow", where),
    ):
        if text:
            print_line(console, text, f"{heading:<9}")


def _send_to_mlflow(
    request: EvalRequest, folder: EvalFolder, record: Mapping[str, Any], console: Console, runs_dir: Path
) -> str:
    """Send the figures to MLflow, best effort; return where they are, empty where they are not."""
    if not request.config.tracking.mlflow:
        return ""
    from bandpo_cli.tracking.parents import send_evaluation

    model = None if isinstance(request.source, SamplesFile) else request.source[0]
    run = None if model is None else model.run
    store = tracking_store(request.config.tracking, runs_dir if run is None else run.path.parent)
    config = record["config"]
    made_from = {"model": {**config["model"], **(record["model"] or {})}, "samples": record["samples"]}
    try:
        env = json.loads((folder.path / "env.json").read_text(encoding="utf-8"))
        with console.status("sending the figures to MLflow …"):
            place = send_evaluation(
                store,
                folder.path,
                None if run is None else run.path,
                None if model is None else model.step,
                record["metrics"],
                {**config, **made_from},
                run_tags(env),
                [folder.path / "eval.json", folder.samples_path, folder.path / "plots" / "success.png"],
            )
    except Exception as error:  # noqa: BLE001 - whatever MLflow raises, the figures are on the disk
        line = (str(error).strip().splitlines() or [""])[0][:200]
        print_warning(
            console,
            redact_credentials(
                f"MLflow at {store.uri} did not take the figures ({type(error).__name__}: {line})"
            ),
        )
        return ""
    return f"{redact_credentials(ui_command(store.uri))}  (run {place})"


def _record_head(request: EvalRequest, folder: EvalFolder, status: str) -> dict[str, Any]:
    return {"name": folder.name, "status": status, **request.as_json()}
