"""Graders by name: bounded work in this process, unbounded work in worker processes that a deadline kills."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.errors import ConfigError, RunError, one_line
from bandpo_cli.grading.signatures import answer_of
from bandpo_cli.grading.workers import GraderArguments, Job, WorkerPool
from bandpo_cli.rank_process import local_rank_count
from bandpo_cli.registries import GRADERS, is_custom_grader, load_attribute
from bandpo_cli.storage.environment import usable_cores
from bandpo_cli.types import GRADER_ERROR, Grade, Problem

MAX_DEFAULT_WORKERS = 8
"""Maximal number of workers per grader if `grading.workers` is null."""

DELAY_NOTICE_S = 30.0
"""Seconds after which a warning says what grading is waiting for; the next ones follow after 60, 120, 240, ... s."""

log = logging.getLogger("bandpo_cli")


def default_workers() -> int:
    """Return the number of workers per grader if `grading.workers` is null: as many as this rank has cores."""
    return min(max(1, usable_cores() // local_rank_count()), MAX_DEFAULT_WORKERS)


FirstStage = Callable[[Problem, str], Grade | GraderArguments]
"""Returns a grade, or the arguments to call the function of the worker with."""


@dataclass(frozen=True)
class GraderUse:
    """The answers that one grader has graded.

    Attributes:
        graded: their number.
        failed: the number of those among them that have the verdict `grader-error`.
        error: the first error, as one line; None without one.
    """

    graded: int
    failed: int
    error: str | None


class GraderPool:
    """Grades completions, each with the grader that its problem names (`problem.grader`).

    Workers are spawned for the first answer that needs one. Only one thread at a time may call the
    pool, except for `cancel`. It closes
    itself when it is garbage-collected and when the interpreter ends.
    """

    def __init__(self, config: GradingConfig) -> None:
        """Create the pool without spawning any worker."""
        self._config = config
        self._size = config.workers or default_workers()
        self._worker_pools: dict[str, WorkerPool] = {}
        self._errors: dict[str, str] = {}
        self._graded: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._cancelled = threading.Event()
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

    def uses(self) -> dict[str, GraderUse]:
        """Return what each grader has graded, by name."""
        errors = self.errors
        return {
            name: GraderUse(graded, self._failed[name], errors.get(name))
            for name, graded in self._graded.items()
        }

    def warnings(self) -> list[str]:
        """Return a line for each grader that failed; see `failure_warnings`."""
        return failure_warnings([self.uses()])

    def cancel(self) -> None:
        """Make a running call of `grade` in another thread raise RunError within about a second, and all later ones."""
        self._cancelled.set()

    def _check_not_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise RunError("grading was cancelled")

    def spawn(self, graders: Iterable[str]) -> None:
        """Spawn a worker for each grader of this package that may need one, without waiting for its import.

        The caller can do other work during the imports. Custom graders are left out: they are imported by
        `check_grader` first, which reports their mistakes.
        """
        for name in graders:
            if name in GRADERS and GRADERS[name].worker is not None:
                self._worker_pool(name).spawn()

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
        """Grade completions; any text gets a grade.

        Args:
            problems: The problems [N].
            texts: The completions [N], one per problem.

        Returns:
            The grades [N].

        Raises:
            ConfigError: If the function of a grader cannot be imported.
            RunError: If the system refuses to start a worker process, or `cancel` was called.
        """
        grades: dict[int, Grade] = {}
        pending_answers: dict[str, dict[int, GraderArguments]] = defaultdict(dict)
        progress = _Progress(len(texts))
        with delay_warnings(progress.describe):
            for index, (problem, text) in enumerate(zip(problems, texts, strict=True)):
                self._check_not_cancelled()
                progress.update(len(grades), problem.grader, problem.id)
                first = self._first_stage(problem, text)
                if isinstance(first, Grade):
                    grades[index] = first
                else:
                    pending_answers[problem.grader][index] = first
            for name, answers in pending_answers.items():
                progress.update(len(grades), name)
                grades |= self._grade_in_workers(name, answers, problems, progress)
        found = [grades[index] for index in range(len(texts))]
        for problem, grade in zip(problems, found, strict=True):
            self._graded[problem.grader] += 1
            self._failed[problem.grader] += grade.verdict == GRADER_ERROR.verdict
        return found

    def _grade_in_workers(
        self,
        name: str,
        answers: Mapping[int, GraderArguments],
        problems: Sequence[Problem],
        progress: _Progress,
    ) -> dict[int, Grade]:
        """Call the function of a grader in workers; functions of this package run once per distinct arguments."""
        # A custom function may depend on the complete text, or on a clock.
        keys = {index: tuple(answer) if name in GRADERS else index for index, answer in answers.items()}
        first_index: dict[object, int] = {}
        for index, key in keys.items():
            first_index.setdefault(key, index)
        distinct = [*first_index.values()]
        graded_before = progress.graded

        def on_wait(graded: int, position: int | None) -> None:
            self._check_not_cancelled()
            waiting_for = None if position is None else problems[distinct[position]].id
            progress.update(graded_before + graded, name, waiting_for)

        batches = _batches([problems[index].id for index in distinct], self._config.batch)
        found = self._worker_pool(name).run([answers[index] for index in distinct], on_wait, batches)
        grades = dict(zip(first_index, found, strict=True))
        return {index: grades[key] for index, key in keys.items()}

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


@dataclass
class _Progress:
    """Progress of a batch: what a delay warning describes. One thread updates it, another one reads it."""

    answers: int
    graded: int = 0
    grader: str = ""
    problem_id: str | None = None
    """The problem of the answer that has been in work for the longest time; None while a worker imports the grader."""

    def update(self, graded: int, grader: str, problem_id: str | None = None) -> None:
        self.graded, self.grader, self.problem_id = graded, grader, problem_id

    def describe(self) -> str:
        problem_id = self.problem_id
        target = "the import of " if problem_id is None else ""
        place = "" if problem_id is None else f" on problem {problem_id:.80}"
        return (
            f"grading: {self.graded:,} of {self.answers:,} answers are graded, waiting for {target}grader "
            f"'{self.grader}'{place}"
        )


@contextmanager
def delay_warnings(describe: Callable[[], str]) -> Iterator[None]:
    """Log `describe()` while the body runs: after `DELAY_NOTICE_S` seconds, and each time this duration doubles.

    The warning comes from a thread, so the body may wait for worker processes or run Python code. C code that keeps
    the interpreter lock (a regular expression, a product of huge numbers) delays it until this code returns; such code
    of this package has bounded input, and custom graders run in worker processes.
    """
    done = threading.Event()

    def warn() -> None:
        waited, notice_at = 0.0, DELAY_NOTICE_S
        while not done.wait(notice_at - waited):
            log.warning("%s", one_line(f"{describe()}, for {notice_at:g} s so far"))
            waited, notice_at = notice_at, 2 * notice_at

    thread = threading.Thread(target=warn, name="grading-delays", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def check_grader(name: str) -> None:
    """Check that a grader can be called; a custom function is imported in a separate process.

    Raises:
        ConfigError: If there is no such grader, or its function cannot be imported.
    """
    if name in GRADERS:
        return
    pool = WorkerPool(name, _function(name), GradingConfig(), size=1)
    try:
        with delay_warnings(lambda: f"waiting for the import of grader '{name}'"):
            pool.start()
    finally:
        pool.close()


def _function(name: str) -> str | None:
    """Return the function that workers call for a grader of the table; None for a custom grader."""
    if name in GRADERS and (worker := GRADERS[name].worker) is not None:
        return worker
    if not is_custom_grader(name):
        raise ConfigError(f"grader '{name}': none of that name{GRADERS.suggestion(name)}")
    return None


def _batches(problem_ids: Sequence[str], size: int) -> list[Job]:
    """Return the answers of each call: consecutive ones, at most `size`; those of one problem are never split."""
    firsts = [index for index, (before, id_) in enumerate(pairwise(problem_ids), start=1) if before != id_]
    batches, start = [], 0
    for first, after in pairwise([*firsts, len(problem_ids)]):
        if after - start > size:
            batches.append(range(start, first))
            start = first
    return [*batches, range(start, len(problem_ids))]


def _find_first_stage(name: str) -> FirstStage:
    stage: FirstStage = load_attribute(GRADERS[name].first_stage) if name in GRADERS else answer_of
    return stage


def _close(pools: dict[str, WorkerPool]) -> None:
    for pool in pools.values():
        pool.close()


def failure_warnings(uses: Sequence[Mapping[str, GraderUse]]) -> list[str]:
    """Return a line for each grader that failed: the share of answers without a verdict, and the first error.

    Args:
        uses: what each of several pools has graded, such as those of all ranks.
    """
    lines = []
    for name in dict.fromkeys(name for each in uses for name in each):
        found = [each[name] for each in uses if name in each]
        graded, failed = sum(use.graded for use in found), sum(use.failed for use in found)
        if failed:
            error = next(use.error for use in found if use.failed)
            lines.append(
                f"grader '{name}' failed on {failed:,} of {graded:,} answers ({failed / graded:.1%}), which have "
                f"no reward and count as not correct; the first error: {error}"
            )
    return lines
