"""Dry run of a training run: the first prompt as the model receives it, and a trial of every grader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.task import DataTask
from bandpo_cli.errors import ConfigError
from bandpo_cli.experiments.preflight import problems_by_grader
from bandpo_cli.grading.pool import IMPORT_ADVICE, GraderPool, problem_error
from bandpo_cli.registries import GRADERS
from bandpo_cli.tasks.task import Task
from bandpo_cli.types import MALFORMED, Grade, Problem, is_ungraded

if TYPE_CHECKING:
    from bandpo_cli.sampling.prompt_encoding import PromptEncoder

_ANSWER_FORMS = {"answer-line": "Answer: {}", "boxed": "\\boxed{{{}}}", "hashes": "#### {}"}
"""Final answers as the templates ask for them."""


@dataclass(frozen=True)
class GraderTrial:
    """The grade of a dummy completion for `problem`.

    Attributes:
        completion: the reference answer in the form of the template; of countdown the sum of the numbers.
        warnings: reasons to expect wrong grades, one line each.
    """

    problem: Problem
    completion: str
    grade: Grade
    warnings: tuple[str, ...]


def try_graders(config: RunConfig, task: Task) -> Iterator[GraderTrial]:
    """Yield a trial of every grader of the training problems. Imports no torch.

    Raises ConfigError if a function raises an exception, returns something else than a grade, or is too slow.
    """
    with GraderPool(config.grading) as pool:
        for name, problems in problems_by_grader(task.train_problems(), config.task.rewards).items():
            errors = [problem_error(name, problem) for problem in problems] if name in GRADERS else [None]
            problem = replace(problems[errors.index(None)], grader=name)
            completion = _dummy_completion(config, problem)
            [grade] = pool.grade([problem], [completion])
            if is_ungraded(grade):
                limit = f"no result after {config.grading.deadline:g} s (grading.deadline)"
                limit += "" if name in GRADERS else IMPORT_ADVICE
                cause = pool.errors.get(name, limit)
                raise ConfigError(
                    f"grader '{name}' failed on the dummy completion {completion!r:.80}: {cause}"
                )
            warnings = []
            if unreadable := [error for error in errors if error is not None]:
                count = f"{len(unreadable):,} of {len(problems):,} problems"
                warnings.append(
                    f"grader '{name}' cannot grade answers to {count}; the first: {unreadable[0]}"
                )
            if name in GRADERS and grade == MALFORMED:
                warnings.append(
                    f"grader '{name}' does not read an answer in the form that task.template asks for"
                )
            yield GraderTrial(problem, completion, grade, tuple(warnings))


def first_prompt(config: RunConfig, task: Task) -> tuple[PromptEncoder, Problem, list[str]]:
    """Return the encoder of a run's prompts, its first problem, and warnings; imports torch, and reads no weights.

    Raises UserError for all prompts that training refuses.
    """
    from bandpo_cli.models.load import check_vocabulary, load_tokenizer, read_config
    from bandpo_cli.sampling.prompt_encoding import (
        PromptEncoder,
        check_context_length,
        drop_long_prompts,
        drop_long_prompts_in_sets,
    )

    model, tokenizer = read_config(config.model), load_tokenizer(config.model)
    rows = model.get_text_config().vocab_size
    check_context_length(model, config)
    check_vocabulary(tokenizer, rows, config.model.path)
    encoder, warnings = PromptEncoder.of_run(tokenizer, config, rows), list[str]()
    if config.task.functions:
        encoder.check_turn()
    train = drop_long_prompts(encoder, "training", task.train_problems(), config, warnings)
    drop_long_prompts_in_sets(encoder, task.heldout_sets(), config, warnings)
    return encoder, train[0], [*warnings, *encoder.notes(train)]


def _dummy_completion(config: RunConfig, problem: Problem) -> str:
    """Return the reference in the form that the template or, for another template, the grader asks for."""
    if problem.grader == "countdown":  # the reference is the value of an expression
        return " + ".join(str(problem.extra["numbers"]).split())
    if problem.grader == "reasoning-gym":
        return f"<answer>{problem.answer}</answer>"
    template = config.task.template if isinstance(config.task, DataTask) else ""
    if template not in _ANSWER_FORMS and problem.grader in GRADERS:
        template = next(iter(GRADERS[problem.grader].templates), "answer-line")
    return _ANSWER_FORMS.get(template, "{}").format(problem.answer)
