"""Where an evaluation's completions come from: a model that draws them, or a file that has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from bandpo_cli.cli.eval_request import EvalRequest, SamplesFile
from bandpo_cli.cli.lines import print_line
from bandpo_cli.cli.memory import out_of_memory_errors
from bandpo_cli.cli.statement import describe_model, print_statement
from bandpo_cli.config.run import RunConfig
from bandpo_cli.storage.eval_folder import PartKey
from bandpo_cli.tasks.questions import text_hash

if TYPE_CHECKING:
    from bandpo_cli.evaluation.batches import Batch


@dataclass(frozen=True)
class CompletionSource:
    """Where completions come from.

    Attributes:
        ids: the problems of each set, by label.
        completions: of all of them.
        batches: draws or judges those that are not there yet.
        errors: what went wrong in a grader, in a line each.
    """

    ids: Mapping[str, Sequence[str]]
    completions: int
    batches: Callable[[set[PartKey]], Iterator[Batch]]
    errors: Callable[[], Mapping[str, str]]

    def planned(self) -> dict[str, Any]:
        """Return what the record says of the sets before their figures; a resume finds the same problems there."""
        return {
            label: {"problems": len(ids), "ids": text_hash("\n".join(ids))} for label, ids in self.ids.items()
        }


def open_completion_source(request: EvalRequest, console: Console, stack: ExitStack) -> CompletionSource:
    """Say what is evaluated, and load what it takes; `stack` closes it.

    Raises:
        UserError: the model cannot be loaded, or its data not used.
        RunError: the device has not enough memory.
    """
    return (
        _open_samples(request.config, request.source, console, stack)
        if isinstance(request.source, SamplesFile)
        else _open_model(request, console, stack)
    )


def _open_samples(
    config: RunConfig, file: SamplesFile, console: Console, stack: ExitStack
) -> CompletionSource:
    from bandpo_cli.evaluation.batches import regrade_batches
    from bandpo_cli.grading import GraderPool

    ids = {label: [stored.problem.id for stored in stored_P] for label, stored_P in file.sets.items()}
    total = sum(len(stored.completions_G) for stored_P in file.sets.values() for stored in stored_P)
    rows = [("samples", escape(f"{file.path}, {total:,} completions")), ("tasks", _counts(ids))]
    print_statement(console, rows, [], [])
    pool = stack.enter_context(GraderPool(config.grading))
    return CompletionSource(
        ids,
        total,
        lambda done: regrade_batches(pool.grade, file.sets, config.evaluation.batch, done),
        lambda: pool.errors,
    )


def _open_model(request: EvalRequest, console: Console, stack: ExitStack) -> CompletionSource:
    assert not isinstance(request.source, SamplesFile)
    config, (_, task) = request.config, request.source
    settings = config.evaluation
    sets = {label: problems[: settings.problems] for label, problems in task.heldout_sets().items()}
    total = sum(map(len, sets.values())) * settings.samples
    statement = [
        ("model", escape(describe_model(config))),
        ("tasks", _counts(sets)),
        (
            "samples",
            f"{settings.samples} a problem = {total:,} completions of at most {config.sampling.max_tokens:,} tokens, "
            f"T = {settings.temperature:g}, seed {config.seed}",
        ),
    ]
    # The lines that only count problems say what "tasks" has said.
    notes = [note for note in task.notes() if not note.endswith((" problem", " problems"))]
    print_statement(console, statement, notes, [])
    with console.status("loading torch and the model …"), out_of_memory_errors(config):
        from bandpo_cli.evaluation.evaluate import sample_batches
        from bandpo_cli.grading import GraderPool
        from bandpo_cli.models.load import load_policy
        from bandpo_cli.sampling.engines import SamplingParams, build_sampler
        from bandpo_cli.sampling.rollouts import (
            PromptEncoder,
            check_context_length,
            drop_long_prompts_in_sets,
        )

        policy = load_policy(config.model, for_training=False)
        check_context_length(policy, config)
        encoder = PromptEncoder(policy.tokenizer, config.model.prompts)
        left_out: list[str] = []
        fitting = drop_long_prompts_in_sets(encoder, sets, config, left_out)
        sampler = build_sampler(config, policy)
    stack.callback(sampler.close)
    pool = stack.enter_context(GraderPool(config.grading))
    params = SamplingParams(
        settings.samples, settings.temperature, config.sampling.max_tokens, policy.stop_ids
    )
    for note in left_out:
        print_line(console, note, "note:", "yellow")

    def batches(done: set[PartKey]) -> Iterator[Batch]:
        with out_of_memory_errors(config):
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
            )

    ids = {label: [problem.id for problem in problems] for label, problems in fitting.items()}
    return CompletionSource(ids, sum(map(len, ids.values())) * settings.samples, batches, lambda: pool.errors)


def _counts(problems: Mapping[str, Sized]) -> str:
    return ", ".join(
        f"{label} ({len(each):,} problem{'' if len(each) == 1 else 's'})" for label, each in problems.items()
    )
