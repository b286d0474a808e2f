"""Console view of evaluations: progress, metrics with intervals, the histogram of problems, comparisons."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sized
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from bandpo_cli.cli.console import (
    PLAIN_LINES,
    ExperimentView,
    format_duration,
    make_table,
    print_json,
    print_line,
    print_rows,
    print_settings,
)
from bandpo_cli.cli.train_view import describe_model
from bandpo_cli.config.task import DataTask
from bandpo_cli.errors import plural
from bandpo_cli.experiments.eval_comparison import ComparisonResult
from bandpo_cli.experiments.eval_plan import EvalPlan, SamplesFile
from bandpo_cli.experiments.eval_run import EvalInfo, EvalResult
from bandpo_cli.reports.run_variants import format_setting
from bandpo_cli.storage.eval_folder import SAMPLES_FILE, EvalFolder
from bandpo_cli.storage.run_folder import shell_command
from bandpo_cli.types import UNGRADED_VERDICTS

if TYPE_CHECKING:
    from bandpo_cli.evaluation.evaluate import Batch
    from bandpo_cli.evaluation.scores import Interval, Scores

_MIN_SIGNIFICANT, _FEW_PROBLEMS = 6, 20
"""5 problems that all change in one direction have p = 2 · 2⁻⁵ = 0.0625."""

_UNGRADED_RATES = ("timeout_rate", "grader_error_rate", "not_applicable_rate")
_BAR_WIDTH = 40
_LABEL_WIDTH = 20  # of a set's name beside the bar: 80 columns hold it with the counts


class EvalView(ExperimentView):
    """Console view of an evaluation. Completions that were stored before the start do not count for the rate.

    Args:
        console: for everything but the JSON record.
        style: `table` or `json`: how the metrics are printed.
        runs_dir: the folder of evaluations, for the command that resumes one.
    """

    spinners: Mapping[str, str] = {
        "load": "loading torch and the model …",
        "score": "intervals by bootstrap …",
    }

    def __init__(self, console: Console, style: str, runs_dir: Path) -> None:
        super().__init__(console, runs_dir)
        self._style = style
        self._info: EvalInfo | None = None
        self._label = "evaluating"
        self._total = self._stored = self._done = self._next_line = 0
        self._start = 0.0

    def start(self, info: EvalInfo) -> None:
        """Print the notes and the folder."""
        self._info = info
        if info.rescored:
            self.spin(None)
            print_line(self.console, f"{info.folder} has all its completions: scoring them again")
            return
        self.print_start(info.folder, "evaluation", info.notes)
        self._total, self._stored, self._done = info.completions, info.stored, info.stored
        self._next_line = info.stored + self._stride
        self._start = time.perf_counter()
        self.show_progress()

    def phase(self, name: str) -> None:
        """Show a spinner in phases without progress; after the last batch print the rate."""
        if name == "record" and self.in_progress:
            self.stop_progress()
            new, _, text = self._progress()
            before = f" after {self._stored:,} that were there" if self._stored else ""
            duration = format_duration(time.perf_counter() - self._start)
            print_line(self.console, f"{new:,} completions{before} in {duration}, {text} per second")
        super().phase(name)

    def step(self, report: Batch) -> None:
        """Show the progress."""
        self._done += len(report.rows)
        self._label = report.label
        self.update_progress()

    def end(self, result: EvalResult) -> None:
        """Print the metrics; for an evaluation that ended early, print how it can be resumed."""
        self.close()
        if self._info is None:  # it ended before the start
            return
        if result.error is None:
            if self._style == "json":
                print_json(result.record)
            else:
                print_scores(self.console, result.scores)
                self.console.print()
            if self._info.request.config.tracking.with_mlflow:
                self.spin("sending the metrics to MLflow …")
        elif not self._info.rescored:
            stored = EvalFolder(result.folder).count_stored()
            again = shell_command("eval --resume", result.folder, self.runs_dir)
            line = f"{stored:,} of {self._total:,} completions are stored; resume with: {again}"
            print_line(self.console, f"{result.record['status']}: {line}")

    def render(self) -> RenderableType:
        """Return the bar, with the name of the evaluation set before it and the counts after it."""
        name = Text(self._label)
        name.truncate(_LABEL_WIDTH, overflow="ellipsis")
        grid = Table.grid(*[Column(no_wrap=True) for _ in range(3)], padding=(0, 1))
        grid.add_row(name, ProgressBar(self._total, self._done), Text(self._counts_text()))
        return grid

    def line(self) -> str | None:
        """Return `gsm8k: 1,024/2,048 completions · 310/s · 0:00:03 left` about twenty times in all."""
        if self._done < self._next_line:
            return None
        self._next_line = self._done + self._stride
        return f"{self._label}: {self._counts_text()}"

    @property
    def _stride(self) -> int:
        return max(1, self._total // PLAIN_LINES)

    def _counts_text(self) -> str:
        count = f"{self._done:,}/{self._total:,} completions"
        new, rate, text = self._progress()
        left = format_duration((self._total - self._done) / rate) if new else ""
        return f"{count} · {text}/s · {left} left" if new else count

    def _progress(self) -> tuple[int, float, str]:
        """Return how many completions are new, and how many per second, also as a text."""
        new = self._done - self._stored
        rate = new / max(time.perf_counter() - self._start, 1e-9)
        return new, rate, f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def print_request(console: Console, request: EvalPlan) -> None:
    """Print what is evaluated."""

    def counts(sets: Mapping[str, Sized], noun: str) -> str:
        return ", ".join(f"{label} ({plural(len(problems), noun)})" for label, problems in sets.items())

    config, settings, file = request.config, request.config.evaluation, request.source
    if isinstance(file, SamplesFile):
        total = sum(len(stored.completions_G) for stored_P in file.sets.values() for stored in stored_P)
        about = ("samples", f"{file.path}, {total:,} completions")
        print_settings(console, [about, ("tasks", counts(file.sets, "problem"))])
        return
    _, task = file
    sets = {label: problems[: settings.problems] for label, problems in task.heldout_sets().items()}
    total = sum(map(len, sets.values())) * settings.samples
    names_sets = isinstance(config.task, DataTask) and bool(config.task.heldout)
    rows = {
        "model": describe_model(config),
        "tasks": counts(sets, "problem" if names_sets else "held-out problem"),
        "samples": f"{settings.samples} per problem = {total:,} completions of at most "
        f"{config.sampling.max_tokens:,} tokens, T = {settings.temperature:g}, seed {config.seed}",
    }
    # Notes that only count problems repeat the row "tasks".
    notes = [note for note in task.notes() if not note.endswith((" problem", " problems"))]
    print_settings(console, [*rows.items()], notes)


def print_files(console: Console, result: EvalResult) -> None:
    """Print where the results are."""
    names = {"metrics": "eval.json", "samples": SAMPLES_FILE, "histogram": "plots/success.png"}
    rows = [(heading, str(result.folder / name)) for heading, name in names.items()]
    print_rows(console, [*rows, ("MLflow", result.mlflow or "")], 9)


def print_scores(console: Console, scores: Mapping[str, Scores]) -> None:
    """Print a table and a histogram for each evaluation set."""
    for label, score in scores.items():
        n = f"{score.fewest}" if score.fewest == score.most else f"{score.fewest} to {score.most}"
        size = f"{plural(len(score.by_problem), 'problem')} × {n} = {score.completions:,} completions"
        console.print()
        print_line(console, size, label)
        if not score.graded:
            counts = ", ".join(f"{count:,} {verdict}" for verdict, count in score.verdicts.items())
            print_line(console, f"no answer was graded ({counts}): there is no accuracy and no reward")
            continue
        table = make_table("", ">mean", ">95% interval")
        first = ["reward"] if score.nonbinary_rewards else []
        for name in [*first, *(name for name in score.metrics if name != "reward")]:
            metric = score.metrics[name]
            if metric.value or not name.endswith(_UNGRADED_RATES):
                cells = metric_text(name, metric.value), interval_text(name, metric)
                table.add_row(metric_label(name), *cells)
        console.print(table)
        console.print()
        if ungraded := ungraded_line(score):
            print_line(console, ungraded)
        for line in histogram(score):
            console.print(line, highlight=False)


def ungraded_line(scores: Scores) -> str:
    """Return how many answers have no verdict, and the mean with all of them correct; '' where there are none."""
    counts = {name: scores.verdicts[name] for name in sorted(UNGRADED_VERDICTS) if name in scores.verdicts}
    if not counts:
        return ""
    name, mean = next(iter(scores.metrics.items()))
    problems = scores.by_problem.values()
    most = fmean(math.fsum(row[key] for key in (name, *_UNGRADED_RATES)) for row in problems)
    reward = " and as a reward of 0" if scores.nonbinary_rewards else ""
    parts = ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items())
    return (
        f"{sum(counts.values()):,} of {scores.completions:,} answers were not graded ({parts}) and count as not "
        f"correct{reward}; with all of them correct, {metric_label(name)} would be {most:.3f} instead of "
        f"{mean.value:.3f}"
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


def print_comparison(console: Console, result: ComparisonResult, show: int, style: str) -> None:
    """Print what changed from A to B, with the `show` most changed problems of each set."""
    if style == "json":
        sets = {label: value.as_json() for label, value in result.sets.items()}
        differences = {key: {"a": a, "b": b} for key, (a, b) in result.differences.items()}
        paths = {"a": str(result.path_a), "b": str(result.path_b)}
        print_json({**paths, "differences": differences, "sets": sets})
        return
    print_rows(console, [("A", str(result.path_a)), ("B", str(result.path_b))])
    for key, (a, b) in result.differences.items():
        null = "all" if key == "evaluation.problems" else "not set"
        before, after = (null if value is None else format_setting(value)[:200] for value in (a, b))
        print_line(console, f"{key} is {before} in A and {after} in B", "differs", "yellow")
    for label, compared in result.sets.items():
        only = [f"{n:,} only in {name}" for name, n in (("A", compared.only_a), ("B", compared.only_b)) if n]
        console.print()
        print_line(console, ", ".join([f"{plural(compared.shared, 'problem')} in both", *only]), label)
        table = make_table("", ">A", ">B", ">B − A", ">95% interval")
        for name, (a, b, change) in compared.metrics.items():
            difference = metric_text(name, change.value)
            if not difference.startswith("-") and float(difference.replace(",", "")):  # no sign before a zero
                difference = f"+{difference}"
            before, after = metric_text(name, a), metric_text(name, b)
            table.add_row(metric_label(name), before, after, difference, interval_text(name, change))
        console.print(table)
        compared_by = "mean reward" if "reward" in compared.metrics else "share of correct completions"
        print_line(
            console,
            f"{compared_by}: higher in B on {plural(compared.wins, 'problem')}, lower on "
            f"{compared.losses:,}, the same on {compared.ties:,}",
        )
        if compared.sign_test_p is not None:
            print_line(console, _sign_test_line(compared.wins + compared.losses, compared.sign_test_p))
        for id_, share_a, share_b in compared.changed_problems[:show]:
            digits = 2 if f"{share_a:.2f}" != f"{share_b:.2f}" else 4
            print_line(console, f"  {share_a:.{digits}f} → {share_b:.{digits}f}  {id_}")


def _sign_test_line(differing: int, p: float) -> str:
    """Return the p-value of the sign test; with few problems that differ, also what that means."""
    relation = "< 0.001" if p < 0.001 else f"= {p:.3f}"
    text = f"exact sign test, problems that differ: {differing:,}, p {relation}"
    if differing < _MIN_SIGNIFICANT:
        return f"{text}; with fewer than {_MIN_SIGNIFICANT} it cannot be below 0.05"
    return f"{text}; with so few, the 95% interval is approximate" if differing < _FEW_PROBLEMS else text
