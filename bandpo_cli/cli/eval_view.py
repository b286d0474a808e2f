"""Console view of evaluations: progress, metrics with intervals, the histogram of problems, comparisons."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from bandpo_cli.cli.console import (
    PLAIN_LINES,
    ExperimentView,
    format_duration,
    make_table,
    print_column,
    print_json,
    print_line,
)
from bandpo_cli.cli.statement import describe_model, print_statement
from bandpo_cli.errors import plural
from bandpo_cli.experiments.eval_comparison import ComparisonResult
from bandpo_cli.experiments.eval_request import EvalRequest, SamplesFile
from bandpo_cli.experiments.eval_run import EvalInfo, EvalProgress, EvalResult
from bandpo_cli.storage.eval_folder import EvalFolder
from bandpo_cli.storage.run_folder import resume_command
from bandpo_cli.types import GRADER_ERROR, TIMEOUT

if TYPE_CHECKING:
    from bandpo_cli.evaluation.metrics import Interval
    from bandpo_cli.evaluation.scores import Scores
    from bandpo_cli.experiments.eval_comparison import Comparison

SPINNERS = {"load": "loading torch and the model …", "score": "intervals by bootstrap …"}
"""Text beside the spinner, by phase."""

_MIN_SIGNIFICANT, _FEW_PROBLEMS = 6, 20
"""5 problems that all change in one direction have p = 2 · 2⁻⁵ = 0.0625."""

_BAR_WIDTH = 40
_LABEL_WIDTH = 20  # of a set's name beside the bar: 80 columns hold it with the counts


class EvalView(ExperimentView):
    """Console view of an evaluation.

    Args:
        console: for everything but the JSON record.
        style: `table` or `json`: how the metrics are printed.
        runs_dir: the folder of evaluations, for the command that resumes one.
    """

    spinners = SPINNERS

    def __init__(self, console: Console, style: str, runs_dir: Path) -> None:
        super().__init__(console, runs_dir)
        self._style = style
        self._info: EvalInfo | None = None
        self._progress: EvalProgressBar | None = None

    def start(self, info: EvalInfo) -> None:
        """Print the notes and the folder."""
        self._info = info
        if info.rescored:
            self.spinner.show(None)
            print_line(self.console, f"{info.folder} has all its completions: scoring them again")
            return
        self.print_start(info.folder, "evaluation", info.notes)
        self._progress = EvalProgressBar(info.completions, info.stored)
        self.show_progress(self._progress.bar.get_renderable, self._progress.line)

    def phase(self, name: str) -> None:
        """Show a spinner in phases without progress; after the last batch print the rate."""
        if name == "record" and self._progress is not None:
            self.stop_progress()
            print_line(self.console, self._progress.summary())
        super().phase(name)

    def step(self, report: EvalProgress) -> None:
        """Show the progress."""
        if self._progress is not None:
            self._progress.add(report.label, report.completions)
            self.update_progress()

    def end(self, result: EvalResult) -> None:
        """Print the metrics; for an evaluation that ended early, print how it can be resumed."""
        self.close()
        if result.error is not None:
            if self._info is not None and not self._info.rescored:
                stored = EvalFolder(result.folder).count_stored()
                print_line(
                    self.console,
                    f"{result.record['status']}: {stored:,} of {self._info.completions:,} completions are stored; "
                    f"resume with: {resume_command('eval', result.folder, self.runs_dir)}",
                )
            return
        if self._style == "json":
            print_json(result.record)
        else:
            print_scores(self.console, result.scores)
            self.console.print()
        if self._info is not None and self._info.request.config.tracking.mlflow:
            self.spinner.show("sending the metrics to MLflow …")


def print_request(console: Console, request: EvalRequest) -> None:
    """Print what is evaluated."""
    config, settings = request.config, request.config.evaluation
    if isinstance(request.source, SamplesFile):
        file = request.source
        total = sum(len(stored.completions_G) for stored_P in file.sets.values() for stored in stored_P)
        rows = [("samples", f"{file.path}, {total:,} completions"), ("tasks", _counts(file.sets))]
        print_statement(console, rows, [], [])
        return
    _, task = request.source
    sets = {label: problems[: settings.problems] for label, problems in task.heldout_sets().items()}
    total = sum(map(len, sets.values())) * settings.samples
    rows = [
        ("model", describe_model(config)),
        ("tasks", _counts(sets, "held-out problem")),
        (
            "samples",
            f"{settings.samples} per problem = {total:,} completions of at most {config.sampling.max_tokens:,} tokens, "
            f"T = {settings.temperature:g}, seed {config.seed}",
        ),
    ]
    # Notes that only count problems repeat the row "tasks".
    notes = [note for note in task.notes() if not note.endswith((" problem", " problems"))]
    print_statement(console, rows, notes, [])


def print_files(console: Console, result: EvalResult) -> None:
    """Print where the results are."""
    folder = EvalFolder(result.folder)
    for heading, text in (
        ("metrics", str(folder.path / "eval.json")),
        ("samples", str(folder.samples_path)),
        ("histogram", str(folder.path / "plots" / "success.png")),
        ("MLflow", result.mlflow),
    ):
        if text:
            print_column(console, text, heading, 9)


def print_comparison(console: Console, result: ComparisonResult, show: int, style: str) -> None:
    """Print what changed from A to B, with the `show` most changed problems of each set."""
    if style == "json":
        sets = {label: value.as_json() for label, value in result.sets.items()}
        print_json({"a": str(result.path_a), "b": str(result.path_b), "sets": sets})
        return
    print_line(console, str(result.path_a), "A")
    print_line(console, str(result.path_b), "B")
    for label, item in result.sets.items():
        _print_set(console, label, item, show)


class EvalProgressBar:
    """Progress of an evaluation. Completions stored before the start do not count for the rate.

    Attributes:
        bar: the bar on a terminal.
    """

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done, self._label = total, done, "evaluating"
        self._before, self._start = done, time.perf_counter()
        self._stride = max(1, total // PLAIN_LINES)
        self._next_line = done + self._stride
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[words]}", markup=False),
        )
        self._task = self.bar.add_task(self._label, total=total, completed=done, words=self._words())

    def add(self, label: str, completions: int) -> None:
        """Add completions of the evaluation set `label`."""
        self._done += completions
        self._label = label
        name = label if len(label) <= _LABEL_WIDTH else label[: _LABEL_WIDTH - 1] + "…"
        self.bar.update(self._task, description=name, completed=self._done, words=self._words())

    def line(self) -> str | None:
        """Return `gsm8k: 1,024/2,048 completions · 310/s · 0:00:03 left` about twenty times in all."""
        if self._done < self._next_line:
            return None
        self._next_line = self._done + self._stride
        return f"{self._label}: {self._words()}"

    def summary(self) -> str:
        """Return `2,048 completions in 0:00:07, 310 per second`, counting what came since the start."""
        new = self._done - self._before
        before = f" after {self._before:,} that were there" if self._before else ""
        rate = f", {self._rate_text()} per second" if new else ""
        return f"{new:,} completions{before} in {format_duration(time.perf_counter() - self._start)}{rate}"

    def _words(self) -> str:
        count = f"{self._done:,}/{self._total:,} completions"
        if self._done == self._before:
            return count
        left = (self._total - self._done) / self._rate()
        return f"{count} · {self._rate_text()}/s · {format_duration(left)} left"

    def _rate(self) -> float:
        """Return completions per second."""
        return (self._done - self._before) / max(time.perf_counter() - self._start, 1e-9)

    def _rate_text(self) -> str:
        rate = self._rate()
        return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def print_scores(console: Console, scores: Mapping[str, Scores]) -> None:
    """Print a table and a histogram for each evaluation set."""
    for label, score in scores.items():
        console.print()
        console.print(
            Text.assemble((label, "bold"), f"  {plural(len(score.by_problem), 'problem')} × {_n(score)}"
                          f" = {score.completions:,} completions"),
            highlight=False,
            soft_wrap=True,
        )  # fmt: skip
        console.print(_table(score))
        console.print()
        if ungraded := ungraded_line(score):
            print_line(console, ungraded)
        for line in histogram(score):
            console.print(line, highlight=False)


def ungraded_line(scores: Scores) -> str:
    """Return how many answers have no verdict, and the mean with all of them correct; '' where there are none."""
    failures = (GRADER_ERROR.verdict, TIMEOUT.verdict)
    counts = {name: scores.verdicts[name] for name in failures if name in scores.verdicts}
    if not counts:
        return ""
    name, mean = next(iter(scores.metrics.items()))
    most = math.fsum(
        values[name] + values["timeout_rate"] + values["grader_error_rate"]
        for values in scores.by_problem.values()
    ) / len(scores.by_problem)
    parts = ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items())
    return (
        f"{sum(counts.values()):,} of {scores.completions:,} answers were not graded ({parts}) and count as not "
        f"correct; with all of them correct, {metric_label(name)} would be {most:.3f} instead of {mean.value:.3f}"
    )


def metric_label(name: str) -> str:
    """Return a metric's name as the literature writes it: `mean@16`, `pass@4`, `answer format`."""
    words = name.replace("_at_", "@").removesuffix("_rate").replace("_", " ")
    return f"{words}, tokens" if name == "response_length" else words


def metric_text(name: str, value: float) -> str:
    """Return a value with its unit: shares as they are, tokens with one decimal."""
    if math.isnan(value):
        return "–"
    return f"{value:,.1f}" if name == "response_length" else f"{value:.3f}"


def interval_text(name: str, interval: Interval) -> str:
    """Return `0.412 to 0.478`, or a dash where there is no interval; a difference may have minus signs."""
    if math.isnan(interval.low):
        return "–"
    return f"{metric_text(name, interval.low)} to {metric_text(name, interval.high)}"


def histogram(scores: Scores) -> Iterable[Text]:
    """Yield lines with the number of problems by their number of correct completions."""
    from bandpo_cli.evaluation.scores import success_axis, success_histogram

    n = scores.fewest if scores.fewest == scores.most else None
    shares = [next(iter(values.values())) for values in scores.by_problem.values()]
    yield Text(f"problems by {success_axis(n)}", style="dim")
    bars = success_histogram(shares, n)
    most = max(count for _, count in bars)
    for words, count in bars:
        length = math.ceil(_BAR_WIDTH * count / most) if count else 0
        yield Text.assemble(f"{words:>11}  ", ("█" * length, "cyan"), f" {count:,}" if count else " ·")


def _table(scores: Scores) -> Table:
    table = make_table("", ">mean", ">95% interval")
    for name, interval in scores.metrics.items():
        if name.endswith(("timeout_rate", "error_rate")) and interval.value == 0:
            continue
        table.add_row(metric_label(name), metric_text(name, interval.value), interval_text(name, interval))
    return table


def _n(scores: Scores) -> str:
    """Return the number of completions per problem, a range where problems differ."""
    return str(scores.fewest) if scores.fewest == scores.most else f"{scores.fewest} to {scores.most}"


def _counts(problems: Mapping[str, Sized], noun: str = "problem") -> str:
    return ", ".join(f"{label} ({plural(len(problem), noun)})" for label, problem in problems.items())


def _print_set(console: Console, label: str, comparison: Comparison, show: int) -> None:
    console.print()
    print_line(console, _problems(comparison), label)
    table = make_table("", ">A", ">B", ">B − A", ">95% interval")
    for name, metric in comparison.metrics.items():
        table.add_row(
            metric_label(name),
            metric_text(name, metric.a),
            metric_text(name, metric.b),
            _signed(name, metric.change.value),
            interval_text(name, metric.change),
        )
    console.print(table)
    print_line(
        console,
        f"share of correct completions: higher in B on {plural(comparison.wins, 'problem')}, lower on "
        f"{comparison.losses:,}, the same on {comparison.ties:,}",
    )
    if comparison.sign_test_p is not None:
        print_line(console, _sign_test_line(comparison.wins + comparison.losses, comparison.sign_test_p))
    for id_, before, after in comparison.changed_problems[:show]:
        print_line(console, f"  {before:.2f} → {after:.2f}  {id_}")


def _sign_test_line(differing: int, p: float) -> str:
    """Return the p-value of the sign test; with few problems that differ, also what that means."""
    relation = "< 0.001" if p < 0.001 else f"= {p:.3f}"
    text = f"exact sign test, problems that differ: {differing:,}, p {relation}"
    if differing < _MIN_SIGNIFICANT:
        return f"{text}; with fewer than {_MIN_SIGNIFICANT} it cannot be below 0.05"
    return f"{text}; with so few, the 95% interval is approximate" if differing < _FEW_PROBLEMS else text


def _problems(comparison: Comparison) -> str:
    words = f"{plural(comparison.shared, 'problem')} in both"
    only_in_one = [
        f"{count:,} only in {which}"
        for which, count in (("A", comparison.only_a), ("B", comparison.only_b))
        if count
    ]
    return ", ".join([words, *only_in_one])


def _signed(name: str, value: float) -> str:
    """Return a difference with its sign; none if it rounds to zero."""
    text = metric_text(name, value)
    return text if text.startswith("-") or float(text.replace(",", "")) == 0 else f"+{text}"
