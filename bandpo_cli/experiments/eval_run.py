"""Evaluations: completions sampled from a model or read from a file, graded, stored and scored.

With several ranks, each of them samples and grades a share of the problems; rank 0 alone writes the folder, scores and
calls callbacks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Unpack

from bandpo_cli.callbacks import Callback
from bandpo_cli.config.run import RunConfig, check_ranks
from bandpo_cli.errors import UserError, closed_at_end, log, redact_credentials, warn_on_failure
from bandpo_cli.experiments.eval_plan import EvalOptions, EvalPlan, SamplesFile, plan_evaluation
from bandpo_cli.experiments.memory_check import out_of_memory_errors
from bandpo_cli.experiments.monitor import Dispatcher
from bandpo_cli.experiments.plan import choose_run_name
from bandpo_cli.grading.pool import GraderPool, check_not_all_failed, failure_warnings, grade_components
from bandpo_cli.paths import given_path
from bandpo_cli.processes.ranks import Ranks, connected_ranks, is_main_process, rank_count
from bandpo_cli.storage.checkpoints import ModelRef
from bandpo_cli.storage.files import write_json
from bandpo_cli.storage.run_folder import GRADER_ERRORS, RECORD_FILE, EvalFolder, PartKey
from bandpo_cli.storage.run_record import describe_environment, keep_code, read_record
from bandpo_cli.storage.tables import EvalRow, read_eval_table
from bandpo_cli.tasks.task import text_hash
from bandpo_cli.tracking.mlflow_store import tracking_store, ui_text
from bandpo_cli.tracking.outages import short_error
from bandpo_cli.types import GRADER_ERROR, status_of

if TYPE_CHECKING:
    from bandpo_cli.evaluation.evaluate import Batch
    from bandpo_cli.evaluation.scores import Scores


@dataclass(frozen=True)
class EvalInfo:
    """An evaluation at its start, as callbacks receive it.

    `stored` of its `completions` are left by an interrupted evaluation; if all are, it is `rescored` only. `notes` has
    remarks of loading, one line each.
    """

    request: EvalPlan
    folder: Path
    completions: int
    stored: int
    rescored: bool
    notes: Sequence[str]


@dataclass(frozen=True)
class EvalResult:
    """The end of an evaluation, with the contents of eval.json.

    `mlflow` is the address of the run in MLflow, for a file or a database after the command that starts MLflow's pages;
    None where MLflow does not have the metrics, and in `Callback.end`, which comes before they are sent.
    """

    folder: Path
    record: dict[str, Any]
    scores: Mapping[str, Scores]  # metrics with intervals by set; empty where the evaluation ended early
    mlflow: str | None = None
    error: BaseException | None = None  # the exception that ended the evaluation early


EvalCallback = Callback[EvalInfo, "Batch", EvalResult]
"""A callback of `evaluate`; `step` has the completions of a batch, graded and stored."""
_Events = Dispatcher[EvalInfo, "Batch", EvalResult]


@dataclass(frozen=True)
class _Source:
    """A source of graded completions, whose `ids` are the problems of each set, by label.

    `batches(done=...)` samples or reads, and grades, the completions that are not stored yet. With several ranks, all
    of them iterate together, and each gets all completions.
    """

    config: RunConfig
    ranks: Ranks
    ids: Mapping[str, Sequence[str]]
    completions: int
    batches: Callable[..., Iterator[Batch]]
    grader: GraderPool
    notes: Sequence[str] = ()
    sampler: Mapping[str, str] | None = None

    @property
    def sets(self) -> dict[str, Any]:
        """The entry `sets` of a record without metrics; a resume compares the problems with it."""
        sets = self.ids.items()
        return {label: {"problems": len(ids), "ids": text_hash("\n".join(ids))} for label, ids in sets}


def evaluate(
    model: str | EvalPlan = "embedded",
    tasks: Sequence[str] = (),
    *,
    runs_dir: Path | str = "runs",
    name: str | None = None,
    callbacks: Sequence[EvalCallback] = (),
    **options: Unpack[EvalOptions],
) -> EvalResult:
    """Score a model, or stored completions, in a new folder, and store every completion.

    The processes of a script that torchrun has started sample a share of the problems each and must call this with the
    same arguments. Each of them returns the result; MLflow's place is known to rank 0 alone.

    Args:
        model: a run (NAME or NAME@STEP), a Hugging Face folder, a hub id, or `embedded`; or a plan, which has the tasks
            and all options: of `plan_evaluation`, or of `plan_evaluation_resume` to continue an evaluation.
        tasks: `countdown`, names of data sets, or files; none for the evaluation sets of the run.
        name: name of the folder; None for model, tasks, n, seed and time.
        callbacks: receive the events of `callbacks.Callback`, on rank 0 alone.
        options: see `EvalOptions`.

    After a RunError, such as `GraderFailedError` if every answer is a grader error, graded completions are stored.
    """
    plan, runs_dir = model, given_path(runs_dir)
    if not isinstance(plan, EvalPlan):
        plan = plan_evaluation(plan, tasks, runs_dir=runs_dir, **options)
    target = plan.folder or choose_run_name(runs_dir, name, plan.default_name())
    return _run(plan, runs_dir, callbacks, target)


def _run(
    plan: EvalPlan, runs_dir: Path, callbacks: Sequence[EvalCallback], target: EvalFolder | str
) -> EvalResult:
    """Evaluate in the folder `target`, or in a new one of this name, and send the metrics to MLflow."""
    check_ranks(plan.config, rank_count(), training=False)
    is_main = is_main_process()
    events: _Events = Dispatcher(callbacks if is_main else ())
    with ExitStack() as stack:
        head: dict[str, Any] = {}  # of the record, which has a status also when the evaluation ends early
        if isinstance(target, EvalFolder) and target.samples_path.exists():
            source, folder, config = None, target, plan.config
            ranks = stack.enter_context(connected_ranks(config.model.device, config.tracking.stall_after))
            rows: list[EvalRow] = []
            if is_main:
                folder.drop_parts()  # a kill between the table and this call leaves them
                if not (rows := read_eval_table(table := folder.samples_path)):
                    raise UserError(f"{table}: holds no completions; remove it to sample them again")
            info = EvalInfo(plan, folder.path, len(rows), len(rows), True, ())
        else:
            source, parts = _open_source(plan, events, stack), dict[PartKey, list[EvalRow]]()
            plan, ranks = replace(plan, config=source.config), source.ranks
            folder, done = ranks.on_main(partial(_open_folder, target, runs_dir, source, parts))
            stored = sum(map(len, parts.values()))
            info = EvalInfo(plan, folder.path, source.completions, stored, False, source.notes)
            if is_main:
                head = {**plan.as_json(), "sets": source.sets}
                keep_code(json.dumps(head), folder.path)
                folder.write_record({"name": folder.name, "status": "running", **head})
        record: dict[str, Any] = {}
        scores: dict[str, Scores] = {}
        try:
            events.start(info)
            if source is not None:
                rows = _collect(source, folder, parts, done, events)
            if is_main:
                record, scores = _score(plan, folder, rows, events)
        except BaseException as error:
            if head:
                status = "interrupted" if status_of(error) == "KILLED" else "failed"
                record = {"name": folder.name, "status": status, **head}
                with warn_on_failure("the record of the evaluation cannot be written"):
                    folder.write_record(record)
            with warn_on_failure("the end of the evaluation was not reported"):
                events.end(EvalResult(folder.path, record, {}, error=error))
            raise
        result = ranks.gather(EvalResult(folder.path, record, scores))[0]
    events.end(result)
    if is_main and plan.config.tracking.with_mlflow:  # after the callbacks: a slow server delays no result
        return replace(result, mlflow=_send_to_mlflow(plan, result, runs_dir))
    return result


def _open_source(plan: EvalPlan, events: _Events, stack: ExitStack) -> _Source:
    """Load the model, or use the stored completions; `stack` closes what was opened."""
    config, source = plan.config, plan.source
    grader = GraderPool(config.grading)
    stack.enter_context(closed_at_end("a grader", grader.close))
    if isinstance(source, SamplesFile):
        from bandpo_cli.evaluation.evaluate import regrade_batches

        ranks = stack.enter_context(connected_ranks(config.model.device, config.tracking.stall_after))
        if ranks.size > 1:
            raise UserError(f"{source.path}: a file is graded by one process; remove --nproc or torchrun")
        problems = [stored for stored_P in source.sets.values() for stored in stored_P]
        grader.spawn({stored.problem.grader for stored in problems})
        ids = {label: [stored.problem.id for stored in stored_P] for label, stored_P in source.sets.items()}
        count = sum(len(stored.completions_G) for stored in problems)
        batches = partial(regrade_batches, grader.grade, source.sets, config.evaluation.batch)
        return _Source(config, ranks, ids, count, batches, grader)
    from bandpo_cli.experiments.run import start_process

    config, ranks = start_process(config, source[1], events, stack, training=False)
    settings = config.evaluation
    grade = partial(grade_components, grader.grade, config.task.evaluated_rewards)
    with out_of_memory_errors(config, training=False):
        from bandpo_cli.evaluation.evaluate import sample_batches
        from bandpo_cli.sampling.rollouts import set_up_sampling
        from bandpo_cli.sampling.sampler import SamplingParams, build_sampler

        loaded = set_up_sampling(config, source[1], ranks, training=False)
        sampler = build_sampler(config, loaded.policy)
    stack.enter_context(closed_at_end("the sampling engine", sampler.close))
    if loaded.conversations is not None:
        stack.callback(loaded.conversations.pool.close)
    tokens = config.sampling.max_tokens
    params = SamplingParams(settings.samples, settings.temperature, tokens, loaded.stop_ids)
    what = sampler, loaded.encoder, grade, loaded.heldout, params, settings.batch, config.seed
    how: dict[str, Any] = {"cancel": grader.cancel, "ranks": ranks, "conversations": loaded.conversations}
    batches = partial(sample_batches, *what, version=0, **how)
    ids = {label: [problem.id for problem in problems_P] for label, problems_P in loaded.heldout.items()}
    count = sum(map(len, ids.values())) * settings.samples
    return _Source(config, ranks, ids, count, batches, grader, loaded.notes, sampler.describe())


def _open_folder(
    target: EvalFolder | str, runs_dir: Path, source: _Source, parts: dict[PartKey, list[EvalRow]]
) -> tuple[EvalFolder, set[PartKey]]:
    """Create or open the folder; add what is stored to `parts`, except where the grader always failed."""
    if isinstance(target, str):
        folder = EvalFolder.create(runs_dir, target)
        write_json(folder.path / "env.json", describe_environment(sampler=source.sampler))
        return folder, set()
    stored, failed = target.read_parts().items(), GRADER_ERROR.verdict
    parts |= {key: rows for key, rows in stored if any(row["verdict"] != failed for row in rows)}
    if parts and read_record(target.path / RECORD_FILE)["sets"] != source.sets:
        raise UserError(f"--resume {target.name}: its tasks have other problems now; start a new evaluation")
    return target, {*parts}


def _collect(
    source: _Source,
    folder: EvalFolder,
    parts: dict[PartKey, list[EvalRow]],
    done: set[PartKey],
    events: _Events,
) -> list[EvalRow]:
    """Sample and grade what is not `done`; rank 0 stores each batch and returns all of them, others nothing."""
    is_main = source.ranks.is_main
    if is_main:
        events.phase("sample")
        source.grader.error_folder = folder.path / GRADER_ERRORS
        imports = Thread(target=_import_scoring, name="scoring imports", daemon=True)
        imports.start()
    with out_of_memory_errors(source.config, training=False):
        for batch in source.batches(done=done):
            if is_main:
                folder.write_part(batch.key, batch.rows)
                parts[batch.key] = batch.rows
                events.step(batch)
    uses = source.ranks.gather(dict(source.grader.uses))
    if not is_main:
        return []
    imports.join()
    completions = [row for key in sorted(parts) for row in parts[key]]
    verdicts, graders = ([row[key] for row in completions] for key in ("verdict", "grader"))
    check_not_all_failed(verdicts, graders, uses)
    for line in failure_warnings(uses):
        log.warning("%s", line)
    events.phase("record")
    folder.write_samples(completions)
    return completions


def _score(
    plan: EvalPlan, folder: EvalFolder, completions: Sequence[EvalRow], events: _Events
) -> tuple[dict[str, Any], dict[str, Scores]]:
    """Score every completion, write eval.json and the histogram, and return the record and the scores by set."""
    from bandpo_cli.evaluation.scores import metric_record, score
    from bandpo_cli.reports.run_plots import plot_success_histogram

    events.phase("score")
    rows: dict[str, list[EvalRow]] = {}
    for row in completions:
        rows.setdefault(row["task"], []).append(row)
    scores = {label: score(label, rows_N, plan.config.evaluation.k) for label, rows_N in rows.items()}
    record = {
        "name": folder.name,
        "status": "finished",
        **plan.as_json(),
        "metrics": metric_record(scores, with_intervals=True),
        "sets": {label: set_scores.as_json() for label, set_scores in scores.items()},
    }
    folder.write_record(record)
    with warn_on_failure("the histogram cannot be written"):
        plot_success_histogram(folder.path)
    return record, scores


def _import_scoring() -> None:
    """Import what scoring and the tables need: a second, in which this process waits for its workers."""
    import pyarrow.json
    import pyarrow.parquet  # noqa: F401
    import scipy.stats  # noqa: F401

    import bandpo_cli.evaluation.scores
    import bandpo_cli.reports.run_plots  # noqa: F401


def _send_to_mlflow(request: EvalPlan, result: EvalResult, runs_dir: Path) -> str | None:
    """Send the metrics to MLflow and return where they are; on any error log a warning and return None."""
    from bandpo_cli.tracking.mlflow_tracker import send_evaluation

    folder, record = result.folder, result.record
    model = ModelRef("") if isinstance(request.source, SamplesFile) else request.source[0]
    run = None if model.run is None else model.run.path
    store = tracking_store(request.config.tracking, runs_dir if run is None else run.parent)
    model_settings = {**record["config"]["model"], **(record["model"] or {})}
    params = {**record["config"], "model": model_settings, "samples": record["samples"]}
    files = [folder / "eval.json", EvalFolder(folder).samples_path, folder / "plots" / "success.png"]
    try:
        env = json.loads((folder / "env.json").read_text(encoding="utf-8"))
        place = send_evaluation(store, folder, run, model.step, record["metrics"], params, env, files)
    except Exception as error:  # noqa: BLE001 - whatever MLflow raises, the metrics are on the disk
        uri = redact_credentials(store.uri)
        log.warning("MLflow at %s did not accept the metrics (%s)", uri, short_error(error))
        return None
    return f"{ui_text(place, store)}  (run {place.name})"
