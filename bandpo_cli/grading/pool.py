"""Graders by name: bounded work in this process, unbounded work in worker processes that a deadline ends."""

import logging
import re
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from bandpo_cli.config.sampling import GradingConfig
from bandpo_cli.errors import ConfigError, RunError, one_line, plural
from bandpo_cli.grading.answers import reference_of
from bandpo_cli.grading.quantities import FONT, read_plain_number
from bandpo_cli.grading.signatures import Answer, answer_of
from bandpo_cli.grading.workers import Failure, GraderArguments, GraderWorkers, default_workers
from bandpo_cli.processes.ranks import rank_count
from bandpo_cli.registries import GRADERS, load_attribute
from bandpo_cli.storage.files import write_text
from bandpo_cli.types import GRADER_ERROR, Grade, Problem, is_ungraded

DELAY_NOTICE_S = 30.0
"""Seconds after which a warning says what grading is waiting for; the next ones follow after 60, 120, 240, ... s."""

FAILURE_ADVICE = (
    "the run continues without these rewards; see whether the server of the function answers, and try a longer "
    "grading.deadline, more grading.retries or a smaller grading.concurrency"
)

IMPORT_ADVICE = (
    "; try a longer one, and move imports of large packages to the top of the file, where it does not apply"
)

MAX_PARSED = 200
"""Different references that are parsed, evenly spaced among those that are neither numbers nor words."""
_WORDS = re.compile(r"[A-Za-z .,;'()-]*")

log = logging.getLogger("bandpo_cli")


@dataclass
class GraderUse:
    """The number of answers that one grader has graded, those without a verdict because it failed, and the first error.

    A timeout without a reward (`grading.timeout_reward`) is a failure too.
    """

    graded: int = 0
    failed: int = 0
    error: str | None = None
    asynchronous: bool = False


class GraderPool(AbstractContextManager["GraderPool"]):
    """Grades completions, each with the grader that its problem names (`problem.grader`).

    Workers are spawned for the first answer that needs one. Only one thread at a time may call the pool, except for
    `begin` and `cancel`. The pool closes itself when it is garbage-collected and when the interpreter ends.
    """

    def __init__(self, config: GradingConfig) -> None:
        """Create the pool without spawning any worker."""
        self._config = config
        self._worker_pools: dict[str, GraderWorkers] = {}
        self._uses: dict[str, GraderUse] = defaultdict(GraderUse)
        self._progress: tuple[int, str, str | None] = (0, "", None)
        """Number of graded answers, name of the grader, and the problem of the answer that has been in work for the
        longest time, or None while a worker imports the grader. A thread reads it for delay warnings."""
        self._cancelled = threading.Event()
        self.error_folder: Path | None = None
        """Folder for the traceback and the completion of a custom function's first error, a file per function."""
        self._closing = ExitStack()
        self.close = weakref.finalize(self, self._closing.close)
        """Terminate the workers; the pool cannot be used afterwards."""

    def __exit__(self, *_: object) -> None:
        """Terminate the workers."""
        self.close()

    @property
    def errors(self) -> Mapping[str, str]:
        """The first error, as one line, of each grader that gave the verdict `grader-error`, by name of the grader."""
        return {name: use.error for name, use in self._uses.items() if use.error is not None}

    def uses(self) -> dict[str, GraderUse]:
        """Return what each grader has graded, by name."""
        return dict(self._uses)

    def cancel(self) -> None:
        """Make a running call of `grade` in another thread raise RunError within about a second, and all later ones."""
        self._cancelled.set()

    def spawn(self, graders: Iterable[str]) -> None:
        """Spawn a worker for each grader of this package that may need one, without waiting for its import.

        The caller can do other work during the imports. Custom graders are left out: they are imported by
        `check_grader` first, which reports their mistakes.
        """
        for name in graders:
            if name in GRADERS and GRADERS[name].worker is not None:
                self._worker_pool(name).spawn()

    @property
    def asynchronous(self) -> frozenset[str]:
        """The names of the graders that have graded answers with an asynchronous function."""
        return frozenset(name for name, use in [*self._uses.items()] if use.asynchronous)

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
        """Return the grades [N] of completions [N], one per problem [N]; any text gets a grade.

        Raises:
            ConfigError: If the function of a grader cannot be imported.
            RunError: If the system refuses to start a worker process, or `cancel` was called.
        """
        return self.begin(problems, texts)()

    def begin(self, problems: Sequence[Problem], texts: Sequence[str]) -> Callable[[], list[Grade]]:
        """Submit completions [N] to workers; return the function that waits for the grades, which `grade` returns.

        While another thread waits for the grades of other completions, the workers grade these, too.
        """
        grades: dict[int, Grade] = {}
        errors: dict[str, str] = {}
        pending_answers: dict[str, dict[int, GraderArguments]] = defaultdict(dict)
        stages = {name: _first_stage(name) for name in {problem.grader for problem in problems}}
        with delay_warnings(lambda: self._describe_progress(len(texts))):
            for index, (problem, text) in enumerate(zip(problems, texts, strict=True)):
                if self._cancelled.is_set():
                    raise RunError("grading was cancelled")
                self._progress = (len(grades), problem.grader, problem.id)
                try:
                    first = stages[problem.grader](problem, text)
                except (KeyError, ValueError) as error:  # the problem lacks a field that this grader reads
                    errors.setdefault(problem.grader, _first_stage_error(problem, error))
                    first = GRADER_ERROR
                if isinstance(first, Grade):
                    grades[index] = first
                else:
                    pending_answers[problem.grader][index] = first
            calls = [self._call_workers(name, answers, problems) for name, answers in pending_answers.items()]

        def wait() -> list[Grade]:
            for name, error in errors.items():
                self._uses[name].error = self._uses[name].error or error
            with delay_warnings(lambda: self._describe_progress(len(texts))):
                for call in calls:
                    grades.update(call(len(grades)))
            self._count(problems, grades)
            return [grades[index] for index in range(len(texts))]

        return wait

    def _call_workers(
        self, name: str, answers: Mapping[int, GraderArguments], problems: Sequence[Problem]
    ) -> Callable[[int], dict[int, Grade]]:
        """Submit answers to the workers of a grader; functions of this package run once per distinct arguments.

        The returned function waits for the grades. It takes the number of answers that are already graded.
        """
        equal_answers: dict[object, list[int]] = defaultdict(list)
        for index, answer in answers.items():
            # A custom function may depend on the complete text, or on a clock.
            equal_answers[tuple(answer) if name in GRADERS else index].append(index)
        firsts = [indices[0] for indices in equal_answers.values()]
        ids, pool = [problems[index].id for index in firsts], self._worker_pool(name)
        keys = pool.submit([answers[index] for index in firsts], ids, _batches(ids, self._config.batch))

        def wait(graded: int) -> dict[int, Grade]:
            grades = pool.wait(keys, lambda more, label: self._report_progress(graded + more, name, label))
            use = self._uses[name]
            use.asynchronous = pool.asynchronous
            if pool.failure is not None and use.error is None:
                use.error = f"{pool.failure.error}{self._write_failure(name, pool.failure)}"
            by_answer = zip(grades, equal_answers.values(), strict=True)
            return {index: grade for grade, indices in by_answer for index in indices}

        return wait

    def _count(self, problems: Sequence[Problem], grades: Mapping[int, Grade]) -> None:
        """Count the grades; warn at the first failure of an asynchronous grader, and after 10, 100, ... of them."""
        before = {name: _digits(use.failed) for name, use in self._uses.items()}
        for index, problem in enumerate(problems):
            use = self._uses[problem.grader]
            use.graded += 1
            use.failed += is_ungraded(grades[index])
        for name, use in self._uses.items():
            if use.asynchronous and _digits(use.failed) > before.get(name, 0):
                [line] = failure_warnings([{name: use}])
                log.warning("%s; %s", line, FAILURE_ADVICE)

    def _write_failure(self, name: str, failure: Failure) -> str:
        """Write the error of a custom function with its answers; return the end of a message that names the file."""
        if self.error_folder is None or name in GRADERS:
            return ""
        path = self.error_folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}.txt"
        parts = [f"grader '{name}': {failure.error}", failure.traceback.rstrip()]
        for number, arguments in enumerate(failure.answers, start=1):
            answer = Answer(*arguments)
            parts += [f"Completion {number} of {len(failure.answers)} in the call:", answer.text]
            parts += [f"Reference: {answer.answer}", f"Columns: {answer.extra}", f"Prompt: {answer.prompt}"]
        path.parent.mkdir(exist_ok=True)
        content = "\n\n".join(filter(None, parts)) + "\n"
        write_text(path, content.encode(errors="replace").decode())  # it may have lone surrogates
        return f"; traceback and completion: {path}"

    def _report_progress(self, graded: int, grader: str, problem_id: str | None) -> None:
        """Store what a delay warning describes; raise RunError if grading was cancelled."""
        if self._cancelled.is_set():
            raise RunError("grading was cancelled")
        self._progress = (graded, grader, problem_id)

    def _describe_progress(self, answers: int) -> str:
        graded, grader, problem_id = self._progress
        name = f"grader '{grader}'"
        waiting = f"the import of {name}" if problem_id is None else f"{name} on problem {problem_id:.80}"
        return f"grading: {graded:,} of {answers:,} answers are graded, waiting for {waiting}"

    def _worker_pool(self, name: str) -> GraderWorkers:
        if name not in self._worker_pools:
            calls = max(1, self._config.concurrency // rank_count())
            pool = GraderWorkers(name, self._config, self._config.workers or default_workers(), calls)
            self._worker_pools[name] = self._closing.enter_context(closing(pool))
        return self._worker_pools[name]


def _digits(number: int) -> int:
    return len(str(number)) if number else 0


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


def check_grader(name: str, problems: Sequence[Problem] = (), trial: GradingConfig | None = None) -> None:
    """Raise ConfigError if the grader cannot be used on these problems.

    There is no such grader, or the function of a custom grader cannot be imported in a separate process or has other
    parameters, or none of the problems has what a grader of this package reads. With the settings `trial`, an
    asynchronous function is also called on the reference answer of a problem, since the server that it needs may not
    answer.
    """
    if name in GRADERS:
        errors = (problem_error(name, problem) for problem in problems)
        if (first := next(errors, None)) is not None and all(errors):
            raise ConfigError(
                f"grader '{name}': can grade none of {plural(len(problems), 'problem')}; {first}"
            )
        return
    config = trial or GradingConfig()
    pool = GraderWorkers(name, config, size=1)
    with closing(pool):
        with delay_warnings(lambda: f"waiting for the import of grader '{name}'"):
            pool.start()
        if trial is None or not problems or not pool.asynchronous:
            return
        arguments = answer_of(problems[0], problems[0].answer)
        [grade] = pool.wait(pool.submit([arguments], [problems[0].id], [[0]]), lambda graded, label: None)
        if is_ungraded(grade):
            late = f"no result within {config.deadline:g} s (grading.deadline)"
            raise ConfigError(
                f"grader '{name}' failed in a trial call: {pool.failure.error if pool.failure else late}; start "
                "the server that it calls, or correct the function or the address of the server, then try again"
            )


def unparsed_references(problems: Iterable[Problem], config: GradingConfig) -> str | None:
    """Return a line with the number of references that the grader `math` cannot parse and the first three, or None.

    Plain numbers and words need no parser: without other references no worker process is spawned.
    """
    golds = {reference_of(problem): problem.answer for problem in problems}
    formulas = [
        gold for gold in golds if not (read_plain_number(gold) or _WORDS.fullmatch(FONT.sub(r"\1", gold)))
    ]
    sample = formulas[:: -(-len(formulas) // MAX_PARSED) or 1]
    if not sample:
        return None
    with closing(GraderWorkers("math", config, size=1)) as workers:
        batches = [[index] for index in range(len(sample))]
        keys = workers.submit([(gold, gold) for gold in sample], sample, batches)
        grades = workers.wait(keys, lambda graded, label: None)
    unparsed = [gold for gold, grade in zip(sample, grades, strict=True) if not grade.correct]
    if not unparsed:
        return None
    count = f"{len(unparsed):,} of {len(sample):,} references that are formulas cannot be parsed"
    of_all = "" if len(sample) == len(formulas) else f" (a sample of {plural(len(formulas), 'formula')})"
    first = ", ".join(f"{golds[gold]!r:.60}" for gold in unparsed[:3])
    return f"grader 'math': {count}{of_all}, so that only the same text is correct: {first}"


def problem_error(name: str, problem: Problem) -> str | None:
    """Return why a grader of this package can grade no answer to the problem; None if it can."""
    try:
        _first_stage(name)(problem, "1")
    except (KeyError, ValueError) as error:
        return _first_stage_error(problem, error)
    return None


def _first_stage_error(problem: Problem, error: KeyError | ValueError) -> str:
    missing = f"it has no {error}, which the grader reads" if isinstance(error, KeyError) else f"{error}"
    return one_line(f"problem {problem.id}: {missing}")


def _batches(problem_ids: Sequence[str], size: int) -> list[list[int]]:
    """Divide answers into calls of consecutive answers, at most `size`; a call has all answers of a problem."""
    batches: list[list[int]] = [[]]
    for _, group in groupby(range(len(problem_ids)), key=problem_ids.__getitem__):
        indices = list(group)
        if batches[-1] and len(batches[-1]) + len(indices) > size:
            batches.append([])
        batches[-1] += indices
    return batches


def _first_stage(name: str) -> Callable[[Problem, str], Grade | GraderArguments]:
    """Return the function of a grader that returns the grade of a completion, or the arguments for the worker."""
    return load_attribute(GRADERS[name].first_stage) if name in GRADERS else answer_of


def failure_warnings(uses: Sequence[Mapping[str, GraderUse]]) -> list[str]:
    """Return a line for each grader that failed: the share of answers without a verdict, and the first error.

    `uses` is what each of several pools has graded, such as the pools of all ranks.
    """
    lines = []
    for name in dict.fromkeys(name for by_name in uses for name in by_name):
        parts = [by_name[name] for by_name in uses if name in by_name]
        graded, failed = sum(use.graded for use in parts), sum(use.failed for use in parts)
        late = f"no result within grading.deadline{'' if name in GRADERS else IMPORT_ADVICE}"
        error = next((use.error for use in parts if use.error), late)
        if failed:
            lines.append(
                f"grader '{name}' failed on {failed:,} of {graded:,} answers ({failed / graded:.1%}), which have no "
                f"reward and count as not correct; the first error: {error}"
            )
    return lines
