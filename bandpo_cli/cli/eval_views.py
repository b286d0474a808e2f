"""How an evaluation looks: its progress, its figures with intervals, the histogram of problems."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from bandpo_cli.evaluation.metrics import Interval
from bandpo_cli.evaluation.scores import Scores, success_histogram

PLAIN_LINES = 20
"""About this many progress lines in a log file, however many completions."""

_BAR_WIDTH = 40
_LABEL_WIDTH = 20  # of a set's name beside the bar: 80 columns hold it with the counts


class EvalProgress(Protocol):
    """Something that shows how far an evaluation has come."""

    def __enter__(self) -> EvalProgress: ...

    def __exit__(self, *exc: object) -> None: ...

    def advance(self, label: str, completions: int) -> None:
        """Take in that so many more completions of a set are judged and stored."""


class ProgressRate:
    """Counts completions; the ones that were there before do not count for the rate."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done = total, done
        self._before, self._start = done, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    @property
    def rate(self) -> float:
        """Completions a second."""
        return (self.done - self._before) / max(self.seconds, 1e-9)

    def words(self) -> str:
        """Return `1,024/2,048 completions · 310/s · 0:00:03 left`."""
        words = f"{self.done:,}/{self.total:,} completions"
        if self.done == self._before:
            return words
        left = (self.total - self.done) / self.rate
        return f"{words} · {self._rate_words()}/s · {format_duration(left)} left"

    def summary(self) -> str:
        """Return `2,048 completions in 0:00:07, 310 a second`, counting what came since the start."""
        new = self.done - self._before
        before = f" after {self._before:,} that were there" if self._before else ""
        rate = f", {self._rate_words()} a second" if new else ""
        return f"{new:,} completions{before} in {format_duration(self.seconds)}{rate}"

    def _rate_words(self) -> str:
        return f"{self.rate:,.0f}" if self.rate >= 10 else f"{self.rate:.2g}"


def format_duration(seconds: float) -> str:
    """Return hours, minutes and seconds: `0:01:05`."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def make_progress(console: Console, pace: ProgressRate) -> EvalProgress:
    """Return a bar on a terminal, plain lines elsewhere."""
    return _Bar(console, pace) if console.is_terminal else _Lines(console, pace)


class _Bar:
    def __init__(self, console: Console, pace: ProgressRate) -> None:
        self._pace = pace
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[words]}", markup=False),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task(
            "evaluating", total=pace.total, completed=pace.done, words=pace.words()
        )

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def advance(self, label: str, completions: int) -> None:
        self._pace.done += completions
        name = label if len(label) <= _LABEL_WIDTH else label[: _LABEL_WIDTH - 1] + "…"
        self._progress.update(
            self._task, description=name, completed=self._pace.done, words=self._pace.words()
        )


class _Lines:
    def __init__(self, console: Console, pace: ProgressRate) -> None:
        self._console, self._pace = console, pace
        self._stride = max(1, pace.total // PLAIN_LINES)
        self._next = pace.done + self._stride

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def advance(self, label: str, completions: int) -> None:
        self._pace.done += completions
        if self._pace.done >= self._next:
            self._next = self._pace.done + self._stride
            self._console.print(f"{label}: {self._pace.words()}", highlight=False, soft_wrap=True)


def print_scores(console: Console, scores: Mapping[str, Scores]) -> None:
    """Print a table and a histogram for each evaluation set."""
    for label, each in scores.items():
        console.print()
        console.print(
            Text.assemble((label, "bold"), f"  {plural(len(each.by_problem), 'problem')} × {_n(each)}"
                          f" = {each.completions:,} completions"),
            highlight=False,
            soft_wrap=True,
        )  # fmt: skip
        console.print(_table(each))
        console.print()
        for line in histogram(each):
            console.print(line, highlight=False)


def metric_label(name: str) -> str:
    """Return a figure's name as the field writes it: `mean@16`, `pass@4`, `answer format`."""
    words = name.replace("_at_", "@").removesuffix("_rate").replace("_", " ")
    return f"{words}, tokens" if name == "response_length" else words


def metric_text(name: str, value: float) -> str:
    """Return a value with its unit: shares as they are, tokens with one decimal."""
    if math.isnan(value):
        return "–"
    return f"{value:,.1f}" if name == "response_length" else f"{value:.3f}"


def interval_text(name: str, figure: Interval) -> str:
    """Return `0.412 to 0.478`, or a dash where there is no interval; a difference may have minus signs."""
    if math.isnan(figure.low):
        return "–"
    return f"{metric_text(name, figure.low)} to {metric_text(name, figure.high)}"


def histogram(scores: Scores) -> Iterable[Text]:
    """Yield lines with the number of problems by the share of their completions that is right."""
    shares = [next(iter(values.values())) for values in scores.by_problem.values()]
    yield Text("problems by share of right completions", style="dim")
    bars = success_histogram(shares)
    most = max(count for _, count in bars)
    for words, count in bars:
        length = math.ceil(_BAR_WIDTH * count / most) if count else 0
        yield Text.assemble(f"{words:>11}  ", ("█" * length, "cyan"), f" {count:,}" if count else " ·")


def _table(scores: Scores) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_column("95% interval", justify="right")
    for name, figure in scores.metrics.items():
        if name.endswith(("timeout_rate", "error_rate")) and figure.value == 0:
            continue
        table.add_row(metric_label(name), metric_text(name, figure.value), interval_text(name, figure))
    return table


def _n(scores: Scores) -> str:
    return str(scores.fewest) if scores.fewest == scores.most else f"{scores.fewest} to {scores.most}"


def plural(count: int, noun: str) -> str:
    """Return `1 problem` or `1,024 problems`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
