"""Grades completions: what is bounded here and now, what is not in worker processes that a deadline kills."""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.grading.workers import GraderArguments, WorkerPool
from bandpo_cli.registries import GRADERS, is_function_path, load_attribute
from bandpo_cli.types import GRADER_ERROR, Grade, Problem

MAX_DEFAULT_WORKERS = 8

FirstStage = Callable[[Problem, str], Grade | GraderArguments]
"""Gives a grade, or what to call the worker's function with."""


def _custom_function_arguments(problem: Problem, text: str) -> GraderArguments:
    return (text, problem.answer, dict(problem.extra))


class GraderPool:
    """Judges answers; `problem.grader` says who does. Workers start with the first answer that needs one.

    One thread at a time may call it. It closes itself when it is collected and when the interpreter ends.
    """

    def __init__(self, config: GradingConfig) -> None:
        """Start nothing yet."""
        self._config = config
        self._size = config.workers or min(_cores(), MAX_DEFAULT_WORKERS)
        self._teams: dict[str, WorkerPool] = {}
        self._errors: dict[str, str] = {}
        self.close = weakref.finalize(self, _close, self._teams)
        """Kill the workers; the pool may not be used after it."""

    def __enter__(self) -> GraderPool:
        """The pool itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the workers."""
        self.close()

    @property
    def errors(self) -> Mapping[str, str]:
        """The first thing that went wrong in each grader that gave `grader-error`, in a line."""
        return self._errors | {name: team.error for name, team in self._teams.items() if team.error}

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
        """One grade for each pair of problem and completion, in their order, whatever the text is.

        Raises:
            ConfigError: a grader's function cannot be imported.
        """
        grades: dict[int, Grade] = {}
        open_answers: dict[str, dict[int, GraderArguments]] = defaultdict(dict)
        for index, (problem, text) in enumerate(zip(problems, texts, strict=True)):
            first = self._first_stage(problem, text)
            if isinstance(first, Grade):
                grades[index] = first
            else:
                open_answers[problem.grader][index] = first
        for name, answers in open_answers.items():
            grades |= zip(answers, self._judge(name, [*answers.values()]), strict=True)
        return [grades[index] for index in range(len(texts))]

    def _judge(self, name: str, arguments: Sequence[GraderArguments]) -> list[Grade]:
        """Have the workers judge each; what one of our own functions is asked twice is judged once."""
        team = self._team(name)
        if name not in GRADERS:  # a user's own may look at the whole text, or at a clock
            return team.run(arguments)
        distinct = list(dict.fromkeys(map(tuple, arguments)))
        grades = dict(zip(distinct, team.run(distinct), strict=True))
        return [grades[tuple(each)] for each in arguments]

    def _first_stage(self, problem: Problem, text: str) -> Grade | GraderArguments:
        try:
            return _find_first_stage(problem.grader)(problem, text)
        except (KeyError, ValueError) as error:  # the problem lacks what this grader reads
            self._errors.setdefault(problem.grader, f"problem {problem.id}: {error}")
            return GRADER_ERROR

    def _team(self, name: str) -> WorkerPool:
        if name not in self._teams:
            self._teams[name] = WorkerPool(name, _function(name), self._config, self._size)
        return self._teams[name]


def check_grader(name: str) -> None:
    """Make sure that a grader can be called: a user's own is imported, in a process of its own.

    Raises:
        ConfigError: in a line, what is wrong with it.
    """
    if name in GRADERS:
        return
    team = WorkerPool(name, _function(name), GradingConfig(), size=1)
    try:
        team.start()
    finally:
        team.close()


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


def _close(teams: dict[str, WorkerPool]) -> None:
    for team in teams.values():
        team.close()


def _cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
