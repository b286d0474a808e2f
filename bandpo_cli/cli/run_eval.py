"""An evaluation from its plan to the closing lines: completions drawn or read, judged, stored, scored and shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bandpo_cli.cli.eval_request import EvalRequest, SamplesFile, request_of
from bandpo_cli.cli.eval_views import Pace, make_progress, print_scores
from bandpo_cli.cli.memory import memory_advice
from bandpo_cli.cli.preflight import choose_name
from bandpo_cli.cli.statement import describe_model, print_statement
from bandpo_cli.config.layers import Layer
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import UserError
from bandpo_cli.evaluation.scores import metrics, score
from bandpo_cli.tracking.environment import describe_environment
from bandpo_cli.tracking.eval_folder import EvalFolder, PartKey
from bandpo_cli.tracking.files import finite, write_json
from bandpo_cli.tracking.mlflow_names import run_tags
from bandpo_cli.tracking.store import tracking_store, ui_command
from bandpo_cli.tracking.tables import EvalRow, read_eval_table

if TYPE_CHECKING:
    from bandpo_cli.evaluation.batches import Batch

Rows = dict[str, list[EvalRow]]
"""Every completion by set."""


@dataclass(frozen=True)
class Source:
    """Where completions come from.

    Attributes:
        problems: how many each set has, by label.
        completions: of all of them.
        batches: draws or judges those that are not there yet.
        errors: what went wrong in a grader, in a line each.
    """

    problems: Mapping[str, int]
    completions: int
    batches: Callable[[set[PartKey]], Iterator[Batch]]
    errors: Callable[[], Mapping[str, str]]


def run_evaluation(
    request: EvalRequest, runs_dir: Path, asked_name: str | None, console: Console, style: str
) -> None:
    """Evaluate in a new folder.

    Raises:
        UserError: the name is taken, the model cannot be loaded or its data not used; nothing has been written then.
        RunError: the device has not enough memory, or the engine failed; what is judged is kept.
    """
    name = choose_name(runs_dir, asked_name, request.default_name())
    with ExitStack() as stack:
        source = _open(request, console, stack)
        folder = EvalFolder.create(runs_dir, name)
        write_json(folder.path / "env.json", describe_environment())
        rows = _collect(request, source, folder, console, runs_dir)
    _finish(request, folder, rows, console, runs_dir, style)


def resume_evaluation(text: str, runs_dir: Path, console: Console, style: str, tracking: Layer) -> None:
    """Go on with the evaluation that `text` names; one that has all its completions is scored again from them.

    Raises:
        UserError: there is none of that name, or its model or data are not what they were.
    """
    folder = EvalFolder.open(runs_dir, text)
    request = request_of(folder.read_record(), folder.path, tracking)
    if folder.samples_path.exists():
        console.print(
            f"{folder.path} has all its completions: scoring them again", highlight=False, soft_wrap=True
        )
        rows: Rows = {}
        for row in read_eval_table(folder.samples_path):
            rows.setdefault(row["task"], []).append(row)
    else:
        with ExitStack() as stack:
            source = _open(request, console, stack)
            rows = _collect(request, source, folder, console, runs_dir)
    _finish(request, folder, rows, console, runs_dir, style)


def _collect(
    request: EvalRequest, source: Source, folder: EvalFolder, console: Console, runs_dir: Path
) -> Rows:
    """Get every completion that the folder lacks, storing each batch before the next; return all of them."""
    parts = folder.read_parts()
    _check_parts(parts, source, folder)
    pace = Pace(source.completions, sum(map(len, parts.values())))
    planned = {label: {"problems": count} for label, count in source.problems.items()}
    folder.write_record({**_head(request, folder, "running"), "sets": planned})
    console.print(f"[bold]evaluation[/bold]  {folder.path}", highlight=False, soft_wrap=True)
    try:
        with make_progress(console, pace) as progress:
            for batch in source.batches(set(parts)):
                folder.write_part(batch.key, batch.rows)
                parts[batch.key] = batch.rows
                progress.advance(batch.label, len(batch.rows))
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        folder.write_record({**_head(request, folder, status), "sets": planned})
        elsewhere = "" if runs_dir == Path("runs") else f" --runs-dir {runs_dir}"
        console.print(
            f"{status}: {pace.done:,} of {pace.total:,} completions are kept; go on by: "
            f"bandpo eval --resume {folder.name}{elsewhere}",
            highlight=False,
            soft_wrap=True,
        )
        raise
    for grader, line in source.errors().items():
        _warn(console, f"grader '{grader}' failed on some answers; the first time: {line}")
    console.print(f"{pace.done:,} completions, {pace.rate:,.0f} a second", highlight=False)
    labels = [*source.problems]
    rows: Rows = {label: [] for label in labels}
    for key in sorted(parts):
        rows[labels[key.set_index]] += parts[key]
    folder.write_samples(row for each in rows.values() for row in each)
    return rows


def _finish(
    request: EvalRequest, folder: EvalFolder, rows: Rows, console: Console, runs_dir: Path, style: str
) -> None:
    """Score every completion, write and show the figures, send them to MLflow, and say where everything is."""
    from bandpo_cli.reports.eval_plot import plot_success

    with console.status("intervals by bootstrap …"):
        scores = {
            label: score(label, each, request.config.evaluation.k, request.legacy)
            for label, each in rows.items()
        }
        record = {
            **_head(request, folder, "finished"),
            "metrics": metrics(scores, ends=True),
            "sets": {label: each.as_json() for label, each in scores.items()},
        }
        folder.write_record(record)
        plot_success(folder.path)
    if style == "json":
        print(json.dumps(finite(record), indent=2, ensure_ascii=False))
    else:
        print_scores(console, scores)
        console.print()
    where = _send(request, folder, record, console, runs_dir)
    for heading, text in (
        ("figures", str(folder.path / "eval.json")),
        ("samples", str(folder.samples_path)),
        ("histogram", str(folder.path / "plots" / "success.png")),
        ("MLflow", where),
    ):
        if text:
            console.print(f"[bold]{heading:<10}[/bold] {text}", highlight=False, soft_wrap=True)


def _send(
    request: EvalRequest, folder: EvalFolder, record: Mapping[str, Any], console: Console, runs_dir: Path
) -> str:
    """Send the figures to MLflow, best effort; return where they are, empty where they are not."""
    if not request.config.tracking.mlflow:
        return ""
    from bandpo_cli.tracking.mlflow_evaluation import send_evaluation

    model = None if isinstance(request.source, SamplesFile) else request.source[0]
    run = None if model is None else model.run
    store = tracking_store(request.config.tracking, runs_dir if run is None else run.path.parent)
    env = json.loads((folder.path / "env.json").read_text(encoding="utf-8"))
    try:
        with console.status("sending the figures to MLflow …"):
            place = send_evaluation(
                store,
                folder.path,
                None if run is None else run.path,
                None if model is None else model.step,
                record["metrics"],
                {"model": record["model"], "samples": record["samples"], **record["config"]},
                run_tags(env),
                [folder.path / "eval.json", folder.samples_path, folder.path / "plots" / "success.png"],
            )
    except Exception as error:  # noqa: BLE001 - whatever MLflow raises, the figures are on the disk
        line = (str(error).strip().splitlines() or [""])[0][:200]
        _warn(console, f"MLflow at {store.uri} did not take the figures ({type(error).__name__}: {line})")
        return ""
    return f"{ui_command(store.uri)}  (run {place})"


def _open(request: EvalRequest, console: Console, stack: ExitStack) -> Source:
    return (
        _open_samples(request.config, request.source, console, stack)
        if isinstance(request.source, SamplesFile)
        else _open_model(request, console, stack)
    )


def _open_samples(config: RunConfig, file: SamplesFile, console: Console, stack: ExitStack) -> Source:
    from bandpo_cli.evaluation.batches import regrade_batches
    from bandpo_cli.grading import GraderPool

    problems = {label: len(stored_P) for label, stored_P in file.sets.items()}
    total = sum(len(stored.completions_G) for stored_P in file.sets.values() for stored in stored_P)
    rows = [("samples", f"{file.path}, {total:,} completions"), ("tasks", _counts(problems))]
    print_statement(console, rows, [], [])
    pool = stack.enter_context(GraderPool(config.grading))
    return Source(
        problems,
        total,
        lambda done: regrade_batches(pool.grade, file.sets, config.evaluation.batch, done),
        lambda: pool.errors,
    )


def _open_model(request: EvalRequest, console: Console, stack: ExitStack) -> Source:
    assert not isinstance(request.source, SamplesFile)
    config, (_, task) = request.config, request.source
    settings = config.evaluation
    sets = {label: problems[: settings.problems] for label, problems in task.heldout_sets().items()}
    total = sum(map(len, sets.values())) * settings.samples
    statement = [
        ("model", describe_model(config)),
        ("tasks", _counts({label: len(problems) for label, problems in sets.items()})),
        (
            "samples",
            f"{settings.samples} a problem = {total:,} completions of at most {config.sampling.max_tokens:,} tokens, "
            f"T = {settings.temperature:g}, seed {config.seed}",
        ),
    ]
    print_statement(console, statement, task.notes(), [])
    with console.status("loading torch and the model …"), memory_advice(config):
        from bandpo_cli.evaluation.evaluate import draw_batches
        from bandpo_cli.evaluation.sets import check_context, fitting_sets
        from bandpo_cli.grading import GraderPool
        from bandpo_cli.models.load import load_policy
        from bandpo_cli.sampling import SamplingParams, build_sampler
        from bandpo_cli.sampling.prompts import PromptEncoder

        policy = load_policy(config.model, for_training=False)
        check_context(policy, config)
        encoder = PromptEncoder(policy.tokenizer, config.model.prompts)
        notes: list[str] = []
        fitting = fitting_sets(encoder, sets, config, notes)
        sampler = build_sampler(config, policy)
    stack.callback(sampler.close)
    pool = stack.enter_context(GraderPool(config.grading))
    params = SamplingParams(
        settings.samples, settings.temperature, config.sampling.max_tokens, policy.stop_ids
    )
    for note in notes:
        console.print(f"[yellow]note:[/yellow] {note}", highlight=False, soft_wrap=True)

    def batches(done: set[PartKey]) -> Iterator[Batch]:
        with memory_advice(config):
            yield from draw_batches(
                sampler,
                encoder,
                pool.grade,
                fitting,
                params,
                settings.batch,
                config.seed,
                version=0,
                done=done,
            )

    problems = {label: len(each) for label, each in fitting.items()}
    return Source(problems, sum(problems.values()) * settings.samples, batches, lambda: pool.errors)


def _check_parts(parts: Mapping[PartKey, list[EvalRow]], source: Source, folder: EvalFolder) -> None:
    """Refuse to go on with other problems than those that the parts were made for."""
    labels = [*source.problems]
    for key, rows in parts.items():
        label = labels[key.set_index] if key.set_index < len(labels) else None
        if label is None or key.start >= source.problems[label] or any(row["task"] != label for row in rows):
            raise UserError(
                f"--resume {folder.name}: its completions are of other problems than its tasks have now; "
                "start a new evaluation"
            )


def _head(request: EvalRequest, folder: EvalFolder, status: str) -> dict[str, Any]:
    return {"name": folder.name, "status": status, **request.as_json()}


def _counts(problems: Mapping[str, int]) -> str:
    return ", ".join(
        f"{label} ({count:,} problem{'' if count == 1 else 's'})" for label, count in problems.items()
    )


def _warn(console: Console, line: str) -> None:
    console.print(f"[yellow]warning:[/yellow] {line}", highlight=False, soft_wrap=True)
