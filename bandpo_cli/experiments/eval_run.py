"""Evaluations: completions sampled from a model or read from a file, graded, stored and scored.

With several ranks, each of them samples and grades a share of the problems; rank 0 alone writes the folder, scores and
calls callbacks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Unpack

from bandpo_cli.callbacks import Callback, Dispatcher
from bandpo_cli.config.hardware import check_ranks, use_expandable_segments
from bandpo_cli.config.layers import Layer
from bandpo_cli.config.run import RunConfig
from bandpo_cli.custom_code import keep_code
from bandpo_cli.errors import UserError, closed_at_end, redact_credentials, warn_on_failure
from bandpo_cli.experiments.eval_plan import (
    EvalOptions,
    EvalPlan,
    SamplesFile,
    plan_evaluation,
    plan_evaluation_resume,
)
from bandpo_cli.experiments.memory_check import check_memory, out_of_memory_errors
from bandpo_cli.experiments.preflight import ModelRef, choose_run_name
from bandpo_cli.grading.pool import GraderPool, check_not_all_failed, failure_warnings, grade_components
from bandpo_cli.processes.ranks import Ranks, connected_ranks, rank_count
from bandpo_cli.storage.environment import describe_environment
from bandpo_cli.storage.eval_folder import RECORD_FILE, EvalFolder, PartKey, read_record
from bandpo_cli.storage.files import write_json
from bandpo_cli.storage.run_folder import GRADER_ERRORS
from bandpo_cli.storage.tables import EvalRow, read_eval_table
from bandpo_cli.tasks.task import text_hash
from bandpo_cli.tracking.mlflow_store import tracking_store, ui_text
from bandpo_cli.tracking.outages import short_error
from bandpo_cli.types import GRADER_ERROR, status_of

if TYPE_CHECKING:
    from bandpo_cli.evaluation.evaluate import Batch
    from bandpo_cli.evaluation.scores import Scores

Parts = dict[PartKey, list[EvalRow]]
"""Stored completions of an evaluation that is not complete."""

log = logging.getLogger("bandpo_cli")


@dataclass(frozen=True)
class EvalInfo:
    """An evaluation at its start, as callbacks receive it.

    Attributes:
        completions: number of completions of the complete evaluation.
        stored: number of completions that an interrupted evaluation has left.
        rescored: all completions were stored, and are only scored again.
        notes: remarks of loading, one line each.
    """

    request: EvalPlan
    folder: Path
    completions: int
    stored: int
    rescored: bool
    notes: Sequence[str]


@dataclass(frozen=True)
class EvalResult:
    """The end of an evaluation.

    Attributes:
        record: the contents of eval.json.
        scores: metrics with intervals by evaluation set; empty where the evaluation ended early.
        mlflow: the address of the run in MLflow, for a file or a database after the command that starts MLflow's pages;
            None where MLflow does not have the metrics, and in `Callback.end`, which comes before they are sent.
        error: the exception that ended the evaluation early.
    """

    folder: Path
    record: dict[str, Any]
    scores: Mapping[str, Scores]
    mlflow: str | None = None
    error: BaseException | None = None


EvalCallback = Callback[EvalInfo, "Batch", EvalResult]
"""A callback of `evaluate` and `resume_evaluation`; `step` has the completions of a batch, graded and stored."""
_Events = Dispatcher[EvalInfo, "Batch", EvalResult]


@dataclass(frozen=True)
class _Source:
    """A source of graded completions.

    `batches` samples or reads, and grades, the completions that are not stored yet. With several ranks, all of them
    iterate together, and each gets all completions. `ids` are the problems of each set, by label.
    """

    config: RunConfig
    ids: Mapping[str, Sequence[str]]
    completions: int
    batches: Callable[[set[PartKey]], Iterator[Batch]]
    grader: GraderPool
    notes: Sequence[str] = ()
    sampler: Mapping[str, str] | None = None

    def planned(self) -> dict[str, Any]:
        """Return the entry of the sets in a record without metrics; a resume compares the problems with it."""
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

    In a script that torchrun has started, all processes sample a share of the problems each and must call this with the
    same arguments. Each of them returns the result; MLflow's place is known to rank 0 alone.

    Args:
        model: a run (NAME or NAME@STEP), a Hugging Face folder, a hub id, or `embedded`; or a request of
            `plan_evaluation`, which has the tasks and all options.
        tasks: `countdown`, names of data sets, or files; none for the evaluation sets of the run.
        name: name of the folder; None for model, tasks, n, seed and time.
        callbacks: receive the events of `callbacks.Callback`, on rank 0 alone.
        options: see `EvalOptions`.

    Raises:
        UserError: the name is taken, a setting cannot be used, or the model cannot be loaded; nothing has been written.
        RunError: the device has not enough memory, the engine failed, or (`GraderFailedError`) every answer is a grader
            error; graded completions are stored.
    """
    runs_dir = Path(runs_dir)
    request = model
    if not isinstance(request, EvalPlan):
        request = plan_evaluation(request, tasks, runs_dir=runs_dir, **options)
    return _run(request, runs_dir, callbacks, choose_run_name(runs_dir, name, request.default_name()))


def resume_evaluation(
    name: str,
    runs_dir: Path | str = "runs",
    tracking: Layer | None = None,
    callbacks: Sequence[EvalCallback] = (),
    request: EvalPlan | None = None,
) -> EvalResult:
    """Continue an interrupted evaluation; one that has all its completions is scored again from them.

    Args:
        name: the evaluation's name in `runs_dir`, or its folder.
        tracking: settings of the section `tracking` to change.
        request: what `plan_evaluation_resume` returned; None to plan it here.

    Raises:
        UserError: there is no such evaluation, or its model or data have changed.
        RunError: as `evaluate`.
    """
    folder = EvalFolder.open(Path(runs_dir), name)
    request = request or plan_evaluation_resume(folder, tracking)
    return _run(request, Path(runs_dir), callbacks, folder)


def _run(
    request: EvalPlan, runs_dir: Path, callbacks: Sequence[EvalCallback], target: EvalFolder | str
) -> EvalResult:
    """Evaluate with the ranks that torchrun has started, call `end` of the callbacks, and send the metrics to MLflow.

    `target` is the folder of an evaluation that is resumed, or the name of a new one.
    """
    result = None
    with ExitStack() as stack:
        check_ranks(config := request.config, rank_count(), training=False)
        ranks = stack.enter_context(connected_ranks(config.model.device, config.tracking.stall_after))
        events = Dispatcher(callbacks if ranks.is_main else ())
        if isinstance(target, EvalFolder) and target.samples_path.exists():
            if ranks.is_main:
                target.drop_parts()  # a kill between the table and this call leaves them
                rows = read_eval_table(target.samples_path)
                if not rows:
                    raise UserError(
                        f"{target.samples_path}: holds no completions; remove it to sample them again"
                    )
                info = EvalInfo(request, target.path, len(rows), len(rows), True, ())
                result = _score(info, lambda: rows, events)
        else:
            source = _open_source(request, ranks, events, stack)
            request = replace(request, config=source.config)
            parts: Parts = {}
            folder, keys = ranks.on_main(lambda: _open_folder(target, runs_dir, source, parts))
            if ranks.is_main:  # from here on the record has a status, also when the evaluation ends early
                head = {**request.as_json(), "sets": source.planned()}
                keep_code(json.dumps(head), folder.path)
                folder.write_record({"name": folder.name, "status": "running", **head})
                stored = sum(map(len, parts.values()))
                info = EvalInfo(request, folder.path, source.completions, stored, False, source.notes)
                result = _score(info, lambda: _collect(source, folder, parts, events, ranks), events, head)
            else:  # sample and grade the share of this rank, which stores nothing
                for _ in source.batches(keys):
                    pass
                ranks.gather(source.grader.uses())
        result = ranks.gather(result)[0]
        assert result is not None
    if ranks.is_main:
        events.end(result)
        if request.config.tracking.with_mlflow:  # after the callbacks: a slow server delays no result
            return replace(result, mlflow=_send_to_mlflow(request, result, runs_dir))
    return result


def _open_folder(
    target: EvalFolder | str, runs_dir: Path, source: _Source, parts: Parts
) -> tuple[EvalFolder, set[PartKey]]:
    """Create or open the folder; return it with the keys of `parts`, to which its stored completions are added.

    Completions whose grader failed on all of a part are graded again.
    """
    if isinstance(target, str):
        folder = EvalFolder.create(runs_dir, target)
        write_json(folder.path / "env.json", describe_environment(sampler=source.sampler))
        return folder, set()
    stored, failed = target.read_parts().items(), GRADER_ERROR.verdict
    parts |= {key: rows for key, rows in stored if any(row["verdict"] != failed for row in rows)}
    if parts and read_record(target.path / RECORD_FILE)["sets"] != source.planned():
        raise UserError(f"--resume {target.name}: its tasks have other problems now; start a new evaluation")
    return target, {*parts}


def _score(
    info: EvalInfo,
    get_completions: Callable[[], Sequence[EvalRow]],
    events: _Events,
    unfinished: Mapping[str, Any] | None = None,
) -> EvalResult:
    """Score every completion, and write eval.json and the histogram.

    `unfinished` is the record of an evaluation that ends early, without its name and status; None to keep the file.
    """
    folder, request = EvalFolder(info.folder), info.request
    try:
        events.start(info)
        completions = get_completions()
        from bandpo_cli.evaluation.scores import metric_record, score
        from bandpo_cli.reports.run_plots import plot_success_histogram

        events.phase("score")
        rows: dict[str, list[EvalRow]] = {}
        for row in completions:
            rows.setdefault(row["task"], []).append(row)
        k = request.config.evaluation.k
        scores = {label: score(label, rows_N, k) for label, rows_N in rows.items()}
        record = {
            "name": folder.name,
            "status": "finished",
            **request.as_json(),
            "metrics": metric_record(scores, with_intervals=True),
            "sets": {label: set_scores.as_json() for label, set_scores in scores.items()},
        }
        folder.write_record(record)
        with warn_on_failure("the histogram cannot be written"):
            plot_success_histogram(folder.path)
        return EvalResult(folder.path, record, scores)
    except BaseException as error:
        record = {}
        if unfinished is not None:
            status = "interrupted" if status_of(error) == "KILLED" else "failed"
            record = {"name": folder.name, "status": status, **unfinished}
            with warn_on_failure("the record of the evaluation cannot be written"):
                folder.write_record(record)
        with warn_on_failure("the end of the evaluation was not reported"):
            events.end(EvalResult(folder.path, record, {}, error=error))
        raise


def _collect(
    source: _Source, folder: EvalFolder, parts: Parts, events: _Events, ranks: Ranks
) -> list[EvalRow]:
    """Get every completion that `parts` lacks, storing each batch before the next; return all of them."""
    events.phase("sample")
    if ranks.is_main:
        source.grader.error_folder = folder.path / GRADER_ERRORS
    imports = Thread(target=_import_scoring, name="scoring imports", daemon=True)
    imports.start()
    for batch in source.batches(set(parts)):
        folder.write_part(batch.key, batch.rows)
        parts[batch.key] = batch.rows
        events.step(batch)
    imports.join()
    completions = [row for key in sorted(parts) for row in parts[key]]
    uses = ranks.gather(source.grader.uses())
    errors = {name: use.error for of_rank in reversed(uses) for name, use in of_rank.items() if use.error}
    verdicts, graders = ([row[key] for row in completions] for key in ("verdict", "grader"))
    check_not_all_failed(verdicts, graders, errors)
    for line in failure_warnings(uses):
        log.warning("%s", line)
    events.phase("record")
    folder.write_samples(completions)
    return completions


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
    config = record["config"]
    model_settings = {**config["model"], **(record["model"] or {})}
    params = {**config, "model": model_settings, "samples": record["samples"]}
    files = [folder / "eval.json", EvalFolder(folder).samples_path, folder / "plots" / "success.png"]
    try:
        env = json.loads((folder / "env.json").read_text(encoding="utf-8"))
        place = send_evaluation(store, folder, run, model.step, record["metrics"], params, env, files)
    except Exception as error:  # noqa: BLE001 - whatever MLflow raises, the metrics are on the disk
        uri = redact_credentials(store.uri)
        log.warning("MLflow at %s did not accept the metrics (%s)", uri, short_error(error))
        return None
    return f"{ui_text(place, store)}  (run {place.name})"


def _open_source(request: EvalPlan, ranks: Ranks, events: _Events, stack: ExitStack) -> _Source:
    """Load the model, or use the stored completions; `stack` closes what was opened."""
    config, source = request.config, request.source
    pool = GraderPool(config.grading)
    stack.enter_context(closed_at_end("a grader", pool.close))
    if isinstance(source, SamplesFile):
        from bandpo_cli.evaluation.evaluate import regrade_batches

        if ranks.size > 1:
            raise UserError(f"{source.path}: a file is graded by one process; remove --nproc or torchrun")
        pool.spawn({stored.problem.grader for stored_P in source.sets.values() for stored in stored_P})
        return _Source(
            config,
            {label: [stored.problem.id for stored in stored_P] for label, stored_P in source.sets.items()},
            sum(len(stored.completions_G) for stored_P in source.sets.values() for stored in stored_P),
            lambda done: regrade_batches(pool.grade, source.sets, config.evaluation.batch, done),
            pool,
        )
    events.phase("load")
    use_expandable_segments(config)
    with out_of_memory_errors(config, training=False):
        from bandpo_cli.evaluation.evaluate import sample_batches
        from bandpo_cli.models.load import deterministic_kernels, load_policy, with_resolved_dtype
        from bandpo_cli.sampling import prompt_encoding
        from bandpo_cli.sampling.rollouts import build_conversations
        from bandpo_cli.sampling.sampler import SamplingParams, build_sampler, check_model

        stack.enter_context(deterministic_kernels(config, training=False))
        check_model(config)
        config = check_memory(with_resolved_dtype(config), ranks, training=False, task=source[1])
        policy = load_policy(config.model, for_training=False, ranks=ranks)
        prompt_encoding.check_context_length(policy.model.config, config)
        encoder = prompt_encoding.PromptEncoder.of_run(policy.tokenizer, config, policy.rows)
        conversations = build_conversations(config, encoder, ranks)
        notes: list[str] = []
        fitting = prompt_encoding.drop_long_prompts_in_sets(encoder, source[1].heldout_sets(), config, notes)
        problems = [problem for problems_P in fitting.values() for problem in problems_P]
        notes += encoder.notes(problems)
        stop_ids = prompt_encoding.completion_stop_ids(policy, encoder, problems)
        sampler = build_sampler(config, policy)
    stack.enter_context(closed_at_end("the sampling engine", sampler.close))
    if conversations is not None:
        stack.callback(conversations.pool.close)
    settings = config.evaluation
    params = SamplingParams(settings.samples, settings.temperature, config.sampling.max_tokens, stop_ids)

    def batches(done: set[PartKey]) -> Iterator[Batch]:
        grade = partial(grade_components, pool.grade, config.task.rewards)
        about = sampler, encoder, grade, fitting, params, settings.batch, config.seed
        with out_of_memory_errors(config, training=False):
            yield from sample_batches(
                *about, version=0, done=done, cancel=pool.cancel, ranks=ranks, conversations=conversations
            )

    ids = {label: [problem.id for problem in problems_P] for label, problems_P in fitting.items()}
    return _Source(config, ids, len(problems) * settings.samples, batches, pool, notes, sampler.describe())
