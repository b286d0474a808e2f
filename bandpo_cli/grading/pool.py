"""Graders by name: bounded work in this process, unbounded work in worker processes that a deadline kills."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.errors import ConfigError, one_line
from bandpo_cli.grading.workers import GraderArguments, WorkerPool
from bandpo_cli.registries import GRADERS, is_function_path, load_attribute
from bandpo_cli.storage.environment import usable_cores
from bandpo_cli.types import GRADER_ERROR, Grade, Problem

MAX_DEFAULT_WORKERS = 8
"""Maximal number of workers per grader if `grading.workers` is null."""

FirstStage = Callable[[Problem, str], Grade | GraderArguments]
"""Returns a grade, or the arguments to call the function of the worker with."""


def _custom_function_arguments(problem: Problem, text: str) -> GraderArguments:
    return (text, problem.answer, dict(problem.extra))


class GraderPool:
    """Grades completions, each with the grader that its problem names (`problem.grader`).

    Workers are spawned for the first answer that needs one. Only one thread at a time may call the pool. It closes
    itself when it is garbage-collected and when the interpreter ends.
    """

    def __init__(self, config: GradingConfig) -> None:
        """Create the pool without spawning any worker."""
        self._config = config
        self._size = config.workers or min(usable_cores(), MAX_DEFAULT_WORKERS)
        self._worker_pools: dict[str, WorkerPool] = {}
        self._errors: dict[str, str] = {}
        self.close = weakref.finalize(self, _close, self._worker_pools)
        """Terminate the workers; the pool cannot be used afterwards."""

    def __enter__(self) -> GraderPool:
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Terminate the workers."""
        self.close()

    @property
    def errors(self) -> Mapping[str, str]:
        """The first error, as one line, of each grader that gave the verdict `grader-error`, by name of the grader."""
        return self._errors | {name: pool.error for name, pool in self._worker_pools.items() if pool.error}

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
        """Grade completions; any text gets a grade.

        Args:
            problems: The problems [N].
            texts: The completions [N], one per problem.

        Returns:
            The grades [N].

        Raises:
            ConfigError: If the function of a grader cannot be imported.
            RunError: If the system refuses to start a worker process.
        """
        grades: dict[int, Grade] = {}
        pending_answers: dict[str, dict[int, GraderArguments]] = defaultdict(dict)
        for index, (problem, text) in enumerate(zip(problems, texts, strict=True)):
            first = self._first_stage(problem, text)
            if isinstance(first, Grade):
                grades[index] = first
            else:
                pending_answers[problem.grader][index] = first
        for name, answers in pending_answers.items():
            grades |= zip(answers, self._grade_in_workers(name, [*answers.values()]), strict=True)
        return [grades[index] for index in range(len(texts))]

    def _grade_in_workers(self, name: str, arguments: Sequence[GraderArguments]) -> list[Grade]:
        """Call the function of a grader in workers; functions of this package run once per distinct arguments."""
        pool = self._worker_pool(name)
        if name not in GRADERS:  # a custom function may depend on the complete text, or on a clock
            return pool.run(arguments)
        distinct = list(dict.fromkeys(map(tuple, arguments)))
        grades = dict(zip(distinct, pool.run(distinct), strict=True))
        return [grades[tuple(each)] for each in arguments]

    def _first_stage(self, problem: Problem, text: str) -> Grade | GraderArguments:
        try:
            return _find_first_stage(problem.grader)(problem, text)
        except (KeyError, ValueError) as error:  # the problem lacks a field that this grader reads
            self._errors.setdefault(problem.grader, one_line(f"problem {problem.id}: {error}"))
            return GRADER_ERROR

    def _worker_pool(self, name: str) -> WorkerPool:
        if name not in self._worker_pools:
            self._worker_pools[name] = WorkerPool(name, _function(name), self._config, self._size)
        return self._worker_pools[name]


def check_grader(name: str) -> None:
    """Check that a grader can be called; a custom function is imported in a separate process.

    Raises:
        ConfigError: If there is no such grader, or its function cannot be imported.
    """
    if name in GRADERS:
        return
    pool = WorkerPool(name, _function(name), GradingConfig(), size=1)
    try:
        pool.start()
    finally:
        pool.close()


def _function(name: str) -> str:
    if name in GRADERS and (worker := GRADERS[name].worker) is not None:
        return worker
    if not is_function_path(name):
        raise ConfigError(f"grader '{name}': none of that name{GRADERS.suggestion(name)}")
    return name


def _find_first_stage(name: str) -> FirstStage:
    stage: FirstStage = (
        load_attribute(GRADERS[name].first_stage) if name in GRADERS else _custom_function_arguments
    )
    return stage


def _close(pools: dict[str, WorkerPool]) -> None:
    for pool in pools.values():
        pool.close()
