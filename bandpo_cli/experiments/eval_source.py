"""Completions of an evaluation: sampled from a model, by one or several ranks, or read from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from bandpo_cli.config.hardware import use_expandable_segments
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import UserError, closed_at_end
from bandpo_cli.experiments.eval_request import EvalRequest, SamplesFile
from bandpo_cli.experiments.memory import check_memory, out_of_memory_errors
from bandpo_cli.grading.pool import GraderPool, GraderUse
from bandpo_cli.ranks import Ranks
from bandpo_cli.storage.eval_folder import PartKey
from bandpo_cli.tasks.questions import text_hash
from bandpo_cli.tasks.task import Task

if TYPE_CHECKING:
    from bandpo_cli.evaluation.batches import Batch


@dataclass(frozen=True)
class CompletionSource:
    """A source of graded completions.

    Attributes:
        config: the settings of the evaluation, with the dtype that `auto` is on this machine.
        ids: the problems of each set, by label.
        completions: number of completions of all sets.
        batches: samples or reads, and grades, the completions that are not stored yet. With several ranks, all of them
            iterate together, and each gets all completions.
        uses: what the graders of each rank have graded, once `batches` has ended.
        notes: remarks of loading, one line each.
        sampler: description of the sampling engine, for env.json; None where the completions are read.
    """

    config: RunConfig
    ids: Mapping[str, Sequence[str]]
    completions: int
    batches: Callable[[set[PartKey]], Iterator[Batch]]
    uses: Callable[[], Sequence[Mapping[str, GraderUse]]]
    notes: tuple[str, ...] = ()
    sampler: Mapping[str, str] | None = None

    def planned(self) -> dict[str, Any]:
        """Return the entry of the sets in a record without metrics; a resume compares the problems with it."""
        return {
            label: {"problems": len(ids), "ids": text_hash("\n".join(ids))} for label, ids in self.ids.items()
        }


def open_completion_source(
    request: EvalRequest, ranks: Ranks, on_phase: Callable[[str], None], stack: ExitStack
) -> CompletionSource:
    """Load the model, or read the file of completions; `stack` closes what was opened.

    Args:
        ranks: the processes that sample a share of the problems each, every one with the complete model.
        on_phase: called with `load` before a model is loaded.

    Raises:
        UserError: the model cannot be loaded, its data cannot be used, or there are several ranks and a file.
        RunError: the device has not enough memory.
    """
    if isinstance(request.source, SamplesFile):
        if ranks.size > 1:
            raise UserError(
                f"{request.source.path}: the completions of a file are graded by one process and its workers "
                "(grading.workers); start it without torchrun and without --nproc"
            )
        return _open_samples(request.config, request.source, stack)
    _, task = request.source
    return _open_model(request.config, task, ranks, on_phase, stack)


def _open_samples(config: RunConfig, file: SamplesFile, stack: ExitStack) -> CompletionSource:
    from bandpo_cli.evaluation.batches import regrade_batches

    ids = {label: [stored.problem.id for stored in stored_P] for label, stored_P in file.sets.items()}
    total = sum(len(stored.completions_G) for stored_P in file.sets.values() for stored in stored_P)
    pool = GraderPool(config.grading)
    stack.enter_context(closed_at_end("a grader", pool.close))
    pool.spawn({stored.problem.grader for stored_P in file.sets.values() for stored in stored_P})
    return CompletionSource(
        config,
        ids,
        total,
        lambda done: regrade_batches(pool.grade, file.sets, config.evaluation.batch, done),
        lambda: [pool.uses()],
    )


def _open_model(
    config: RunConfig, task: Task, ranks: Ranks, on_phase: Callable[[str], None], stack: ExitStack
) -> CompletionSource:
    settings = config.evaluation
    sets = {label: problems[: settings.problems] for label, problems in task.heldout_sets().items()}
    on_phase("load")
    use_expandable_segments(config)
    with out_of_memory_errors(config, training=False):
        from bandpo_cli.evaluation.evaluate import sample_batches
        from bandpo_cli.models.load import load_policy, with_resolved_dtype
        from bandpo_cli.sampling.rollouts import (
            PromptEncoder,
            check_context_length,
            completion_stop_ids,
            drop_long_prompts_in_sets,
        )
        from bandpo_cli.sampling.sampler import (
            SamplingParams,
            build_sampler,
            check_model,
            describe_sampler,
        )

        check_model(config)
        config = check_memory(with_resolved_dtype(config), ranks, training=False)
        policy = load_policy(config.model, for_training=False, ranks=ranks)
        check_context_length(policy, config)
        encoder = PromptEncoder(policy.tokenizer, config.model.prompts)
        left_out: list[str] = []
        fitting = drop_long_prompts_in_sets(encoder, sets, config, left_out)
        left_out += encoder.notes(list(chain.from_iterable(fitting.values())))
        stop_ids = completion_stop_ids(policy, encoder, list(chain.from_iterable(fitting.values())))
        sampler = build_sampler(config, policy)
    stack.enter_context(closed_at_end("the sampling engine", sampler.close))
    pool = GraderPool(config.grading)
    stack.enter_context(closed_at_end("a grader", pool.close))
    params = SamplingParams(settings.samples, settings.temperature, config.sampling.max_tokens, stop_ids)
    uses: list[Mapping[str, GraderUse]] = []

    def batches(done: set[PartKey]) -> Iterator[Batch]:
        with out_of_memory_errors(config, training=False):
            yield from sample_batches(
                sampler,
                encoder,
                pool.grade,
                fitting,
                params,
                settings.batch,
                config.seed,
                version=0,
                done=done,
                cancel=pool.cancel,
                ranks=ranks,
            )
        uses[:] = ranks.gather(pool.uses())

    ids = {label: [problem.id for problem in problems] for label, problems in fitting.items()}
    total = sum(map(len, ids.values())) * settings.samples
    return CompletionSource(
        config,
        ids,
        total,
        batches,
        lambda: uses,
        tuple(left_out),
        describe_sampler(sampler),
    )
