"""Evaluations: completions sampled from a model or read from a file, graded, stored and scored.

With several ranks, each of them samples and grades a share of the problems; rank 0 alone writes the folder, scores and
calls callbacks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Unpack

from bandpo_cli.config.layers import Layer
from bandpo_cli.errors import UserError, redact_credentials, warn_on_failure
from bandpo_cli.experiments.callbacks import Dispatcher
from bandpo_cli.experiments.eval_request import (
    EvalOptions,
    EvalRequest,
    SamplesFile,
    plan_evaluation,
    request_from_record,
)
from bandpo_cli.experiments.eval_source import CompletionSource, open_completion_source
from bandpo_cli.experiments.preflight import choose_run_name
from bandpo_cli.experiments.rank_group import connected_ranks
from bandpo_cli.grading.pool import failure_warnings
from bandpo_cli.grading.rewards import check_not_all_failed
from bandpo_cli.storage.environment import describe_environment
from bandpo_cli.storage.eval_folder import EvalFolder, PartKey
from bandpo_cli.storage.files import write_json
from bandpo_cli.storage.tables import EvalRow, read_eval_table
from bandpo_cli.tracking.mirror import run_tags
from bandpo_cli.tracking.store import short_error, tracking_store, ui_text
from bandpo_cli.types import GRADER_ERROR, Callback, status_of

if TYPE_CHECKING:
    from bandpo_cli.evaluation.scores import Scores

Rows = dict[str, list[EvalRow]]
"""All completions by evaluation set."""
Parts = dict[PartKey, list[EvalRow]]
"""Stored completions of an evaluation that is not complete."""

log = logging.getLogger("bandpo_cli")


@dataclass(frozen=True)
class EvalInfo:
    """An evaluation at its start, as callbacks receive it.

    Attributes:
        request: what is evaluated.
        folder: the evaluation's folder.
        sets: number of problems by evaluation set.
        completions: number of completions of the complete evaluation.
        stored: number of completions that an interrupted evaluation has left.
        rescored: all completions were stored, and are only scored again.
        notes: remarks of loading, one line each.
    """

    request: EvalRequest
    folder: Path
    sets: Mapping[str, int]
    completions: int
    stored: int
    rescored: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class EvalProgress:
    """One batch of graded and stored completions: the label of its set, and their number."""

    label: str
    completions: int


@dataclass(frozen=True)
class EvalResult:
    """The end of an evaluation.

    Attributes:
        folder: the evaluation's folder.
        record: the contents of eval.json.
        scores: metrics with intervals by evaluation set; empty where the evaluation ended early.
        mlflow: what shows the metrics in MLflow: the address of the run, for a file or a database after the command
            that starts MLflow's pages on a line of its own; None where MLflow does not have them, and in
            `Callback.end`, which comes before they are sent.
        error: the exception that ended the evaluation early.
    """

    folder: Path
    record: dict[str, Any]
    scores: Mapping[str, Scores]
    mlflow: str | None = None
    error: BaseException | None = None


EvalCallback = Callback[EvalInfo, EvalProgress, EvalResult]
"""A callback of `evaluate` and `resume_evaluation`."""
EvalEvents = Dispatcher[EvalInfo, EvalProgress, EvalResult]


def evaluate(
    model: str | EvalRequest = "embedded",
    tasks: Sequence[str] = (),
    *,
    runs_dir: Path | str = "runs",
    name: str | None = None,
    callbacks: Sequence[EvalCallback] = (),
    **options: Unpack[EvalOptions],
) -> EvalResult:
    """Score a model, or stored completions, in a new folder, and store every completion.

    In a script that torchrun has started, all processes sample a share of the problems each and must call this with the
    same arguments. Each of them returns the result; MLflow's place is known to rank 0 alone.

    Args:
        model: a run (NAME or NAME@STEP), a Hugging Face folder, a hub id, or `embedded`; or a request of
            `plan_evaluation`, which has the tasks and all options.
        tasks: `countdown`, names of data sets, or files; none for the evaluation sets of the run.
        runs_dir: the folder of the evaluation's folder, and of runs.
        name: name of the folder; None for model, tasks, n, seed and time.
        callbacks: receive the events of `types.Callback`, on rank 0 alone.
        options: see `EvalOptions`.

    Raises:
        UserError: the name is taken, a setting cannot be used, or the model cannot be loaded; nothing has been written.
        RunError: the device has not enough memory, the engine failed, or (`GraderFailedError`) every answer is a grader
            error; graded completions are stored.
    """
    runs_dir = Path(runs_dir)
    request = model
    if not isinstance(request, EvalRequest):
        request = plan_evaluation(request, tasks, runs_dir=runs_dir, **options)
    name = choose_run_name(runs_dir, name, request.default_name())

    def create_folder(source: CompletionSource) -> tuple[EvalFolder, Parts]:
        folder = EvalFolder.create(runs_dir, name)
        write_json(folder.path / "env.json", describe_environment(sampler=source.sampler))
        return folder, {}

    return _run(request, runs_dir, callbacks, create_folder)


def resume_evaluation(
    name: str,
    runs_dir: Path | str = "runs",
    tracking: Layer | None = None,
    callbacks: Sequence[EvalCallback] = (),
    request: EvalRequest | None = None,
) -> EvalResult:
    """Continue an interrupted evaluation; one that has all its completions is scored again from them.

    Args:
        name: the evaluation's name in `runs_dir`, or its folder.
        runs_dir: the folder of evaluations.
        tracking: settings of the section `tracking` to change.
        callbacks: as for `evaluate`.
        request: what `plan_evaluation_resume` returned; None to plan it here.

    Raises:
        UserError: there is no such evaluation, or its model or data have changed.
        RunError: as `evaluate`.
    """
    runs_dir = Path(runs_dir)
    folder = EvalFolder.open(runs_dir, name)
    before = folder.read_record()
    request = request or plan_evaluation_resume(folder, tracking)

    def read_parts(source: CompletionSource) -> tuple[EvalFolder, Parts]:
        """Return the stored completions; of those that are all grader errors the grader failed: grade them again."""
        stored = folder.read_parts().items()
        failed = GRADER_ERROR.verdict
        parts = {key: rows for key, rows in stored if any(row["verdict"] != failed for row in rows)}
        if parts and before["sets"] != source.planned():
            raise UserError(
                f"--resume {folder.name}: its completions are of other problems than its tasks have now; start a new "
                "evaluation"
            )
        return folder, parts

    complete = folder if folder.samples_path.exists() else None
    return _run(request, runs_dir, callbacks, read_parts, complete)


def plan_evaluation_resume(folder: EvalFolder, tracking: Layer | None = None) -> EvalRequest:
    """Return the request that the evaluation in `folder` was made from, with other settings of `tracking` only.

    Raises:
        UserError: the record is damaged, or the model or data have changed.
    """
    complete = folder.samples_path.exists()
    return request_from_record(folder.read_record(), folder.path, tracking or {}, complete)


def _run(
    request: EvalRequest,
    runs_dir: Path,
    callbacks: Sequence[EvalCallback],
    open_folder: Callable[[CompletionSource], tuple[EvalFolder, Parts]],
    complete: EvalFolder | None = None,
) -> EvalResult:
    """Evaluate with the ranks that torchrun has started, call `end` of the callbacks, and send the metrics to MLflow.

    Args:
        open_folder: returns the folder and what it has stored; called on rank 0.
        complete: the folder of an evaluation that has all its completions, which rank 0 scores again.
    """
    with ExitStack() as stack:
        ranks = stack.enter_context(connected_ranks(request.config))
        events = Dispatcher(callbacks if ranks.is_main else ())
        result = None
        if complete is not None:
            if ranks.is_main:
                result = _rescore(request, complete, events)
        else:
            source = open_completion_source(request, ranks, events.phase, stack)
            request = replace(request, config=source.config)
            opened: list[tuple[EvalFolder, Parts]] = []

            def stored() -> set[PartKey]:
                opened.append(open_folder(source))
                return set(opened[0][1])

            keys = ranks.on_main(stored)
            if ranks.is_main:
                result = _evaluate(request, source, *opened[0], events)
            else:  # sample and grade the share of this rank, which stores nothing
                for _ in source.batches(keys):
                    pass
        result = ranks.gather(result)[0]
        assert result is not None
    if not ranks.is_main:
        return result
    events.end(result)
    if not request.config.tracking.mlflow:
        return result
    # After the callbacks: a slow server does not delay the result.
    return replace(
        result, mlflow=_send_to_mlflow(request, EvalFolder(result.folder), result.record, runs_dir)
    )


def _evaluate(
    request: EvalRequest, source: CompletionSource, folder: EvalFolder, parts: Parts, events: EvalEvents
) -> EvalResult:
    """Collect and score all completions; the record has the status while this runs and when it ends early."""
    sets = source.planned()
    folder.write_record({**_record_head(request, folder, "running"), "sets": sets})
    counts = {label: len(ids) for label, ids in source.ids.items()}
    stored = sum(map(len, parts.values()))
    info = EvalInfo(request, folder.path, counts, source.completions, stored, False, source.notes)
    try:
        events.start(info)
        return _score(request, folder, _collect_completions(source, folder, parts, events), events)
    except BaseException as error:
        status = "interrupted" if status_of(error) == "KILLED" else "failed"
        record = {**_record_head(request, folder, status), "sets": sets}
        with warn_on_failure("the record of the evaluation cannot be written"):
            folder.write_record(record)
        with warn_on_failure("the end of the evaluation was not reported"):
            events.end(EvalResult(folder.path, record, {}, error=error))
        raise


def _rescore(request: EvalRequest, folder: EvalFolder, events: EvalEvents) -> EvalResult:
    """Score the stored completions of a complete evaluation."""
    folder.drop_parts()  # a kill between the table and this call leaves them
    rows: Rows = {}
    for row in read_eval_table(folder.samples_path):
        rows.setdefault(row["task"], []).append(row)
    if not rows:
        raise UserError(f"{folder.samples_path}: holds no completions; remove it to sample them again")
    counts = {label: len({row["problem_id"] for row in rows_N}) for label, rows_N in rows.items()}
    total = sum(map(len, rows.values()))
    try:
        events.start(EvalInfo(request, folder.path, counts, total, total, True, ()))
        return _score(request, folder, rows, events)
    except BaseException as error:
        with warn_on_failure("the end of the evaluation was not reported"):
            events.end(EvalResult(folder.path, {}, {}, error=error))
        raise


def _collect_completions(
    source: CompletionSource, folder: EvalFolder, parts: Parts, events: EvalEvents
) -> Rows:
    """Get every completion that `parts` lacks, storing each batch before the next; return all of them."""
    events.phase("sample")
    imports = Thread(target=_import_scoring, name="scoring imports", daemon=True)
    imports.start()
    for batch in source.batches(set(parts)):
        folder.write_part(batch.key, batch.rows)
        parts[batch.key] = batch.rows
        events.step(EvalProgress(batch.label, len(batch.rows)))
    imports.join()
    labels = [*source.ids]
    rows: Rows = {label: [] for label in labels}
    for key in sorted(parts):
        rows[labels[key.set_index]] += parts[key]
    completions = [*chain.from_iterable(rows.values())]
    check_not_all_failed(
        [row["verdict"] for row in completions],
        [row["grader"] for row in completions],
        lambda: {
            name: use.error
            for uses in reversed(source.uses())
            for name, use in uses.items()
            if use.error is not None
        },
    )
    for line in failure_warnings(source.uses()):
        log.warning("%s", line)
    events.phase("record")
    folder.write_samples(completions)
    return rows


def _import_scoring() -> None:
    """Import what `_score` and the tables need: a second, in which this process waits for its workers."""
    import pyarrow.json
    import pyarrow.parquet  # noqa: F401
    import scipy.stats  # noqa: F401

    import bandpo_cli.evaluation.scores
    import bandpo_cli.reports.run_plots  # noqa: F401


def _score(request: EvalRequest, folder: EvalFolder, rows: Rows, events: EvalEvents) -> EvalResult:
    """Score every completion, and write eval.json and the histogram."""
    from bandpo_cli.evaluation.scores import metric_record, score
    from bandpo_cli.reports.run_plots import plot_success_histogram

    events.phase("score")
    scores = {
        label: score(label, rows_N, request.config.evaluation.k, request.legacy)
        for label, rows_N in rows.items()
    }
    record = {
        **_record_head(request, folder, "finished"),
        "metrics": metric_record(scores, with_intervals=True),
        "sets": {label: set_scores.as_json() for label, set_scores in scores.items()},
    }
    folder.write_record(record)
    plot_success_histogram(folder.path)
    return EvalResult(folder.path, record, scores)


def _send_to_mlflow(
    request: EvalRequest, folder: EvalFolder, record: Mapping[str, Any], runs_dir: Path
) -> str | None:
    """Send the metrics to MLflow and return where they are; on any error log a warning and return None."""
    from bandpo_cli.tracking.sync import send_evaluation

    model = None if isinstance(request.source, SamplesFile) else request.source[0]
    run = None if model is None else model.run
    store = tracking_store(request.config.tracking, runs_dir if run is None else run.path.parent)
    config = record["config"]
    made_from = {"model": {**config["model"], **(record["model"] or {})}, "samples": record["samples"]}
    try:
        env = json.loads((folder.path / "env.json").read_text(encoding="utf-8"))
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
    except Exception as error:  # noqa: BLE001 - whatever MLflow raises, the metrics are on the disk
        uri = redact_credentials(store.uri)
        log.warning("MLflow at %s did not accept the metrics (%s)", uri, short_error(error))
        return None
    return f"{ui_text(place, store)}  (run {place.name})"


def _record_head(request: EvalRequest, folder: EvalFolder, status: str) -> dict[str, Any]:
    return {"name": folder.name, "status": status, **request.as_json()}
