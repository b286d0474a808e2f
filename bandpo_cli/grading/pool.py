"""Graders by name, their failures, and the weighted sum of several rewards.

Bounded work is done in this process, unbounded work in worker processes that a deadline ends.
"""

import re
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from bandpo_cli.config.batch_and_sampling import GradingConfig, RewardComponent, needs_answer
from bandpo_cli.errors import ConfigError, GraderFailedError, RunError, log, one_line, plural
from bandpo_cli.grading.signatures import answer_of
from bandpo_cli.grading.workers import Failure, GraderArguments, GraderWorkers
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.registries import GRADERS, load_attribute
from bandpo_cli.storage.files import write_text
from bandpo_cli.types import ANSWER_GRADER, GRADER_ERROR, NOT_APPLICABLE, Grade, Grader, Problem, is_ungraded

DELAY_NOTICE_S = 30.0
"""Seconds after which a warning says what grading is waiting for; the next ones follow after 60, 120, 240, ... s."""

FAILURE_ADVICE = (
    "the run continues without these rewards; see whether the server of the function answers, and try a longer "
    "grading.deadline, more grading.retries or a smaller grading.concurrency"
)

IMPORT_ADVICE = (
    "; try a longer one, and move imports of large packages to the top of the file, where it does not apply"
)

DUMMY_TEXT = "This is a dummy completion."
"""The completion of a trial call for a problem without a reference answer."""

MAX_FAILED_BATCHES = 10
"""Batches in a row in which every call of an asynchronous function may fail before the run ends."""


@dataclass
class GraderUse:
    """What one grader has done: numbers of answers, failures (timeouts without a reward too), and the first error."""

    graded: int = 0
    failed: int = 0
    error: str | None = None
    asynchronous: bool = False  # it has graded answers with an asynchronous function


Uses = Sequence[Mapping[str, GraderUse]]
"""What the graders of each of several pools have done, by name, such as the pools of all ranks."""


class GraderPool(AbstractContextManager["GraderPool"]):
    """Grades completions, each with the grader that its problem names (`problem.grader`).

    Workers are spawned for the first answer that needs one. Only one thread at a time may call the pool, except for
    `begin` and `cancel`. The pool closes itself when it is garbage-collected and when the interpreter ends.
    """

    def __init__(self, config: GradingConfig) -> None:
        """Create the pool without spawning any worker."""
        self._config = config
        self._worker_pools: dict[str, GraderWorkers] = {}
        self.uses: dict[str, GraderUse] = defaultdict(GraderUse)  # what each grader has done, by name
        # Number of graded answers, grader, and the problem of the answer that has been in work for the longest time, or
        # None while a worker imports the grader. A thread reads it for delay warnings.
        self._progress: tuple[int, str, str | None] = (0, "", None)
        self._cancelled = threading.Event()
        self.error_folder: Path | None = None
        """Folder for the traceback and the completion of a custom function's first error, a file per function."""
        self._closing = ExitStack()
        self.close = weakref.finalize(self, self._closing.close)  # terminates the workers

    def __exit__(self, *_: object) -> None:
        """Terminate the workers; the pool cannot be used afterwards."""
        self.close()

    def cancel(self) -> None:
        """Make a running call of `grade` in another thread raise RunError within about a second, and all later ones."""
        self._cancelled.set()

    def spawn(self, graders: Iterable[str]) -> None:
        """Spawn a worker for each grader of this package that may need one, without waiting for its import."""
        # Custom graders are left out: `check_grader` imports them and reports their mistakes.
        for name in graders:
            if name in GRADERS and GRADERS[name].worker is not None:
                self._worker_pool(name).spawn()

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
        """Return the grades [N] of completions [N], one per problem [N]; any text gets a grade.

        Raise ConfigError if a grader cannot be imported, RunError if no worker can be started or after `cancel`.
        """
        return self.begin(problems, texts)()

    def begin(self, problems: Sequence[Problem], texts: Sequence[str]) -> Callable[[], list[Grade]]:
        """Submit completions [N] to workers; return the function that waits for the grades, which `grade` returns.

        While another thread waits for the grades of other completions, the workers grade these, too.
        """
        grades: dict[int, Grade] = {}
        errors: dict[str, str] = {}
        pending_answers: dict[str, dict[int, GraderArguments]] = defaultdict(dict)
        stages: dict[str, Callable[[Problem, str], Grade | GraderArguments]] = {
            name: load_attribute(GRADERS[name].first_stage) if name in GRADERS else answer_of
            for name in {problem.grader for problem in problems}
        }
        with delay_warnings(lambda: self._describe_progress(len(texts))):
            for index, (problem, text) in enumerate(zip(problems, texts, strict=True)):
                if self._cancelled.is_set():
                    raise RunError("grading was cancelled")
                self._progress = (len(grades), problem.grader, problem.id)
                try:
                    without = not problem.answer and needs_answer(problem.grader)
                    first = NOT_APPLICABLE if without else stages[problem.grader](problem, text)
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
                self.uses[name].error = self.uses[name].error or error
            with delay_warnings(lambda: self._describe_progress(len(texts))):
                for call in calls:
                    grades.update(call(len(grades)))
            self._count(problems, grades)
            return [grades[index] for index in range(len(texts))]

        return wait

    def _call_workers(
        self, name: str, answers: Mapping[int, GraderArguments], problems: Sequence[Problem]
    ) -> Callable[[int], dict[int, Grade]]:
        """Submit answers to workers; return the function from the number of graded answers to the grades."""
        equal_answers: dict[object, list[int]] = defaultdict(list)
        for index, answer in answers.items():
            # Functions of this package run once per distinct arguments; a custom one may depend on a clock.
            equal_answers[tuple(answer) if name in GRADERS else index].append(index)
        firsts = [indices[0] for indices in equal_answers.values()]
        ids, pool = [problems[index].id for index in firsts], self._worker_pool(name)
        keys = pool.submit([answers[index] for index in firsts], ids, _batches(ids, self._config.batch))

        def wait(graded: int) -> dict[int, Grade]:
            def on_wait(more: int, label: str | None) -> None:
                if self._cancelled.is_set():
                    raise RunError("grading was cancelled")
                self._progress = (graded + more, name, label)

            grades = pool.wait(keys, on_wait)
            use = self.uses[name]
            use.asynchronous = pool.asynchronous
            if pool.failure is not None and use.error is None:
                use.error = f"{pool.failure.error}{self._write_failure(name, pool.failure)}"
            by_answer = zip(grades, equal_answers.values(), strict=True)
            return {index: grade for grade, indices in by_answer for index in indices}

        return wait

    def _count(self, problems: Sequence[Problem], grades: Mapping[int, Grade]) -> None:
        """Count the grades; warn at the first failure of an asynchronous grader, and after 10, 100, ... of them."""
        before = {name: len(f"{use.failed or ''}") for name, use in self.uses.items()}
        for index, problem in enumerate(problems):
            use = self.uses[problem.grader]
            use.graded += 1
            use.failed += is_ungraded(grades[index])
        for name, use in self.uses.items():
            if use.asynchronous and len(f"{use.failed or ''}") > before.get(name, 0):
                [line] = failure_warnings([{name: use}])
                log.warning("%s; %s", line, FAILURE_ADVICE)

    def _write_failure(self, name: str, failure: Failure) -> str:
        """Write an error of a custom function with its answers; return the end of a message that names the file."""
        if self.error_folder is None or name in GRADERS:
            return ""
        path = self.error_folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}.txt"
        parts = [f"grader '{name}': {failure.error}", failure.traceback.rstrip()]
        for number, (text, reference, extra, prompt, _) in enumerate(failure.answers, start=1):
            parts += [f"Completion {number} of {len(failure.answers)} in the call:", text]
            parts += [f"Reference: {reference}", f"Columns: {extra}", f"Prompt: {prompt}"]
        path.parent.mkdir(exist_ok=True)
        content = "\n\n".join(filter(None, parts)) + "\n"
        write_text(path, content.encode(errors="replace").decode())  # it may have lone surrogates
        return f"; traceback and completion: {path}"

    def _describe_progress(self, answers: int) -> str:
        graded, grader, problem_id = self._progress
        name = f"grader '{grader}'"
        waiting = f"the import of {name}" if problem_id is None else f"{name} on problem {problem_id:.80}"
        return f"grading: {graded:,} of {answers:,} answers are graded, waiting for {waiting}"

    def _worker_pool(self, name: str) -> GraderWorkers:
        if name not in self._worker_pools:
            self._worker_pools[name] = self._closing.enter_context(closing(GraderWorkers(name, self._config)))
        return self._worker_pools[name]


@contextmanager
def delay_warnings(describe: Callable[[], str]) -> Iterator[None]:
    """Log `describe()` from a thread while the body runs: after `DELAY_NOTICE_S` seconds, and each time they double."""
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
    """Raise ConfigError if there is no such grader, its import fails, or it cannot be used on these problems.

    With the settings `trial`, an asynchronous function is called on a reference answer: its server may not answer.
    """
    if name in GRADERS:
        errors = (problem_error(name, problem) for problem in problems)
        if (first := next(errors, None)) is not None and all(errors):
            raise ConfigError(
                f"grader '{name}': can grade none of {plural(len(problems), 'problem')}; {first}"
            )
        return
    config = trial or GradingConfig()
    with closing(GraderWorkers(name, config, size=1)) as pool:
        with delay_warnings(lambda: f"waiting for the import of grader '{name}'"):
            pool.start()
        if trial is None or not problems or not pool.asynchronous:
            return
        arguments = answer_of(problems[0], problems[0].answer or DUMMY_TEXT)
        [grade] = pool.wait(pool.submit([arguments], [problems[0].id], [[0]]))
        if is_ungraded(grade):
            late = f"no result within {config.deadline:g} s (grading.deadline)"
            raise ConfigError(
                f"grader '{name}' failed in a trial call: {pool.failure.error if pool.failure else late}; start "
                "the server that it calls, or correct the function or the address of the server, then try again"
            )


def problem_error(name: str, problem: Problem) -> str | None:
    """Return why a grader of this package can grade no answer to the problem; None if it can."""
    try:
        load_attribute(GRADERS[name].first_stage)(problem, "1")
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


def training_grader(
    pool: GraderPool,
    components: Sequence[RewardComponent] | None,
    ranks: Ranks = SINGLE,
    failures: Counter[str] | None = None,
    grade: Grader | None = None,
) -> Grader:
    """Return the grader of the completions of training: the pool's, or the sum of `components` (`task.rewards`).

    Each of several ranks grades a part of the completions; all ranks must call the grader together. It raises
    GraderFailedError if every verdict of a component, on all ranks, is `grader-error`. Of asynchronous functions it
    does so after `MAX_FAILED_BATCHES` such batches in a row, since a server may be away for some minutes. `failures`
    has their number by names of graders, and is updated. `grade` returns the grades in place of `pool.grade`.
    """
    count = Counter() if failures is None else failures

    def checked_grades(problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
        grades = (grade or pool.grade)(problems, texts)
        verdicts = ranks.gather_all([item.verdict for item in grades])
        graders = ranks.gather_all([problem.grader for problem in problems])
        key = " ".join(sorted({*graders}))
        is_tolerated = count[key] + 1 < MAX_FAILED_BATCHES
        count[key] = count[key] + 1 if all_calls_failed(pool, verdicts, graders, ranks, is_tolerated) else 0
        return grades

    return partial(grade_components, checked_grades, components)


def grade_components(
    grade: Grader,
    components: Sequence[RewardComponent] | None,
    problems: Sequence[Problem],
    texts: Sequence[str],
) -> list[Grade]:
    """Return the grades [N] of texts [N]: with components, each grades every text, and `weighted_grade` adds them."""
    if not components:
        return grade(problems, texts)
    by_component = [grade(graded_by(component, problems), texts) for component in components]
    return [weighted_grade(components, grades) for grades in zip(*by_component, strict=True)]


def graded_by(component: RewardComponent | None, problems: Sequence[Problem]) -> Sequence[Problem]:
    """Return the problems with the grader of the component; unchanged if the component names none.

    A control also gets the name of the grader of the answers.
    """
    if component is None or (grader := component.grader) is None:
        return problems
    if not component.is_control:
        return [replace(problem, grader=grader) for problem in problems]
    return [
        replace(problem, grader=grader, extra={**problem.extra, ANSWER_GRADER: problem.grader})
        for problem in problems
    ]


def weighted_grade(components: Sequence[RewardComponent], grades: Sequence[Grade]) -> Grade:
    """Return the weighted sum of the rewards of the components that apply, with the verdict of the first component.

    If a component failed, there is no reward: the sum of the others cannot be compared with the rewards of the group.
    """
    failed = [grade for grade in grades if is_ungraded(grade)]
    first = failed[0] if failed and grades[0].verdict == NOT_APPLICABLE.verdict else grades[0]
    pairs = list(zip(components, grades, strict=True))
    rewards = [item.weight * grade.reward for item, grade in pairs if item.weight and grade.has_reward]
    values = {item.label: grade.reward if grade.has_reward else None for item, grade in pairs}
    has_reward = bool(rewards) and not failed
    return replace(first, reward=sum(rewards), has_reward=has_reward, components=values, failed=bool(failed))


def all_calls_failed(
    pool: GraderPool,
    verdicts: Collection[str],
    graders: Sequence[str],
    ranks: Ranks,
    is_tolerated: bool = True,
) -> bool:
    """Return True if all verdicts of all ranks, which call this together, are `grader-error`.

    Raise GraderFailedError then unless all graders are asynchronous, and their failures tolerated.
    """
    if {*verdicts} != {GRADER_ERROR.verdict}:
        return False
    uses = ranks.gather(dict(pool.uses))
    asynchronous = {name for by_name in uses for name, use in by_name.items() if use.asynchronous}
    if not is_tolerated or not {*graders} <= asynchronous:
        check_not_all_failed(verdicts, graders, uses)
    return True


def check_not_all_failed(verdicts: Collection[str], graders: Sequence[str], uses: Uses) -> None:
    """Raise GraderFailedError, with the first error of each grader, if there are only verdicts `grader-error`."""
    if {*verdicts} != {GRADER_ERROR.verdict}:
        return
    errors = {name: use.error for by_name in reversed(uses) for name, use in by_name.items() if use.error}
    causes = [f"grader '{name}': {errors.get(name, 'no message')}" for name in dict.fromkeys(graders)]
    raise GraderFailedError(
        f"all {len(verdicts):,} answers are grader errors, so there is no reward to learn from or to report: "
        f"{'; '.join(causes)}; once it works (a run folder has a copy of its file), --resume continues; another grader "
        "needs a new run"
    )


def failure_warnings(uses: Uses) -> list[str]:
    """Return a line for each grader that failed: the share of answers without a verdict, and the first error."""
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
