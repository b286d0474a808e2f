"""`bandpo eval`, scores of a model or of stored completions with intervals, and `bandpo eval compare`."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Iterable, Mapping, Sized
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from bandpo_cli.cli import options as opt
from bandpo_cli.cli.console import (
    PLAIN_LINES,
    Console,
    ExperimentView,
    format_duration,
    make_table,
    open_console,
    print_json,
)
from bandpo_cli.cli.signals import exit_on_sigterm
from bandpo_cli.errors import plural
from bandpo_cli.processes.ranks import RUN_NAME_VARIABLE, ranks_to_start
from bandpo_cli.types import UNGRADED_VERDICTS

if TYPE_CHECKING:
    from bandpo_cli.evaluation.evaluate import Batch
    from bandpo_cli.evaluation.scores import Scores
    from bandpo_cli.experiments.eval_comparison import ComparisonResult
    from bandpo_cli.experiments.eval_plan import EvalPlan
    from bandpo_cli.experiments.eval_run import EvalInfo, EvalResult

eval_app = typer.Typer(**opt.GROUP, invoke_without_command=True)

_OF_SAMPLING = {
    "--model", "--task", "--template", "--n", "--temperature", "--max-tokens", "--sampler", "--limit", "--seed",
    "--nproc",
}  # fmt: skip
_OF_RESUME = {
    "--resume", "--format", "--runs-dir", "--tracking-uri", "--mlflow", "--no-mlflow", "--nproc", "--stall-after",
}  # fmt: skip
"""The options without effect where stored completions are scored, and the options with an effect in a resume."""

_TASK_HELP = f"{opt.TASKS_TEXT}, or a .jsonl, .json, .csv or .parquet file; repeatable."
_TASK = opt.option("NAME|FILE", "the evaluation sets of the run", complete=opt.complete_task, help=_TASK_HELP)


@eval_app.callback()
@opt.takes_settings
def evaluate(
    *,
    context: typer.Context,
    model: Annotated[
        str | None, opt.option("MODEL", "the bundled model", complete=opt.folder_of("run"))
    ] = None,
    task: Annotated[list[str] | None, _TASK] = None,
    samples: Annotated[Path | None, opt.option("FILE")] = None,
    n: Annotated[int | None, opt.option("N", "the run's, else 16 or 4", flags=["--n"], min=1)] = None,
    k: Annotated[str | None, opt.option("K,K", "4, 16, ... up to n", flags=["--k"])] = None,
    settings: opt.EvalSettings,
    format_: opt.TableOrJson = "table",
    resume: Annotated[str | None, opt.option("NAME", complete=opt.folder_of("evaluation"))] = None,
    name: Annotated[str | None, opt.option("NAME", "from model, tasks, n, seed and time")] = None,
    config: opt.ConfigFiles = None,
    set_: opt.Assignments = None,
    runs_dir: opt.RunsDir = opt.RUNS,
    tracking: opt.Tracking,
    nproc: opt.Nproc = None,
) -> int | None:
    """Evaluate a model on problem sets, with confidence intervals, and store every completion.

    mean@n, unbiased pass@k, maj@k, and the shares of answers without a readable
    form, truncated completions and timeouts. Every metric has a 95% interval
    by bootstrap over problems. A checkpoint of a run is evaluated with the
    tasks, template and seed of the run, so the metrics equal the metrics of the run.

    [bold]bandpo eval --model NAME[/bold]  a run's latest checkpoint
    [bold]bandpo eval --model NAME@40 --n 64 --k 1,8,64[/bold]  an earlier one, more samples
    [bold]bandpo eval --model NAME@0[/bold]  the model before training, on the run's own problems
    [bold]bandpo eval --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --task math500[/bold]
    [bold]bandpo eval --samples completions.jsonl --grader math[/bold]  completions from anywhere
    [bold]bandpo eval compare EVAL_A EVAL_B[/bold]  the difference, problem by problem

    Args:
        model: A run: NAME or its folder for the latest checkpoint, NAME@STEP for another, NAME@0 for the model
            before training. Or a Hugging Face folder, an adapter folder of peft, or a hub id.
        samples: Score stored completions, without a model: .jsonl, .json, .csv or .parquet rows with question,
            answer and completions, or an earlier samples.parquet.
        n: Completions per problem.
        k: The k of pass@k and maj@k.
        resume: Resume an interrupted evaluation with the settings that it was started with.
        name: Name of the evaluation's folder.
    """
    if context.invoked_subcommand is not None:
        return None
    opt.print_members(task or [])
    # The imports create 175,000 objects and hardly any garbage; Python's threshold of 700 costs 0.35 s.
    gc.set_threshold(50_000, 10, 10)
    from bandpo_cli.cli.launch_and_watch_ranks import launch
    from bandpo_cli.config.layers import nest, read_config
    from bandpo_cli.experiments import evaluate as run_evaluation
    from bandpo_cli.experiments.eval_plan import (
        MAX_K,
        eval_assignments,
        plan_evaluation,
        plan_evaluation_resume,
    )
    from bandpo_cli.experiments.plan import choose_run_name, read_numbers
    from bandpo_cli.storage.run_folder import EvalFolder

    console = open_console(stderr=format_ == "json", long_running=True)
    asked = os.environ.get(RUN_NAME_VARIABLE) if name is None else name
    if resume is not None:
        used = "the settings of the evaluation are used"
        opt.refuse_with(context, "--resume", used, lambda name: name not in _OF_RESUME)
        folder = EvalFolder.open(runs_dir, resume)
        request = plan_evaluation_resume(folder, nest(tracking).get("tracking"))
    else:
        if samples is not None:
            opt.refuse_with(context, "--samples", "nothing is sampled", _OF_SAMPLING.__contains__)
        request = plan_evaluation(
            "embedded" if model is None else model,
            task or [],
            samples=samples,
            n=n,
            k=None if k is None else sorted({*read_numbers("--k", k, 1, MAX_K)}),
            grader=settings.pop("task.grader", None),
            base=[*map(read_config, config or []), nest(tracking | settings)],
            settings=[eval_assignments(set_ or [], samples is not None)],
            runs_dir=runs_dir,
        )
        # The name is chosen again at the start: another process may take the default one until then.
        folder = EvalFolder(runs_dir / choose_run_name(runs_dir, asked, request.default_name()))
    if nproc is not None and (ranks := ranks_to_start(nproc)) is not None:
        return launch(ranks, request.config, "eval", folder.path, runs_dir)
    if not folder.samples_path.exists():
        print_request(console, request)
    with exit_on_sigterm(), closing(EvalView(console, format_, runs_dir)) as view:
        result = run_evaluation(request, runs_dir=runs_dir, name=asked, callbacks=[view])
    files = {"metrics": "eval.json", "samples": "samples.parquet", "histogram": "plots/success.png"}
    rows = [(heading, str(result.folder / name)) for heading, name in files.items()]
    console.print_rows([*rows, ("MLflow", result.mlflow or "")], 9)
    return None


@eval_app.command()
@opt.documented
def compare(
    a: Annotated[str, opt.argument("A", complete=opt.folder_of("evaluation", "run"))],
    b: Annotated[str, opt.argument("B", complete=opt.folder_of("evaluation", "run"))],
    show: Annotated[int, opt.option("N", min=0)] = 5,
    margin: Annotated[float, opt.option("M")] = 0.02,
    format_: opt.TableOrJson = "table",
    runs_dir: opt.RunsDir = opt.RUNS,
) -> None:
    """Compare two evaluations problem by problem: B − A, paired, with intervals and verdicts.

    An evaluation is its name in --runs-dir, its folder, or its eval.json. A
    problem is a win if B has a higher share of correct completions than A. Only
    problems that both have are compared, and settings that differ are listed.

    [bold]bandpo eval compare before after[/bold]  two evaluations
    [bold]bandpo eval compare NAME@0 NAME@100[/bold]  two steps of a run

    Args:
        a: An evaluation, or RUN or RUN@STEP as evaluated in training.
        b: The evaluation to compare with A, in the same forms.
        show: Number of the most changed problems to list.
        margin: Differences of accuracy within ±M can be found equivalent.
    """
    from bandpo_cli.experiments import compare as compare_evaluations

    console, result = open_console(), compare_evaluations(a, b, runs_dir, margin)
    if format_ == "json":
        sets = {label: value.as_json() for label, value in result.sets.items()}
        differences = {key: {"a": a, "b": b} for key, (a, b) in result.differences.items()}
        paths = {"a": str(result.path_a), "b": str(result.path_b)}
        print_json(paths | {"differences": differences, "sets": sets})
    else:
        print_comparison(console, result, show)


_UNGRADED_RATES = ("timeout_rate", "grader_error_rate", "not_applicable_rate")


class EvalView(ExperimentView):
    """Console view of an evaluation. Completions that were stored before the start do not count for the rate."""

    spinners: Mapping[str, str] = {**ExperimentView.spinners, "score": "intervals by bootstrap …"}

    def __init__(self, console: Console, style: str, runs_dir: Path) -> None:
        super().__init__(console, runs_dir)
        self._style, self._label, self._start = style, "evaluating", 0.0
        self._info: EvalInfo | None = None
        self._total = self._stored = self._done = self._stride = self._next_line = 0

    def start(self, info: EvalInfo) -> None:
        self._info = info
        if info.rescored:
            self.spin(None)
            self.console.print_line(f"{info.folder} has all its completions: scoring them again")
            return
        self.print_start(info.folder, "evaluation", info.notes)
        self._total, self._stored, self._done = info.completions, info.stored, info.stored
        self._stride = max(1, info.completions // PLAIN_LINES)
        self._next_line = info.stored + self._stride
        self._start = time.perf_counter()
        self.show_progress()

    def phase(self, name: str) -> None:
        """Show a spinner in phases without progress; after the last batch print the rate."""
        if name == "record" and self.in_progress:
            self.stop_progress()
            new = f"{self._done - self._stored:,} completions"
            new += f" after {self._stored:,} that were there" if self._stored else ""
            duration = format_duration(time.perf_counter() - self._start)
            self.console.print_line(f"{new} in {duration}, {self._rate()[1]} per second")
        super().phase(name)

    def step(self, report: Batch) -> None:
        self._done += len(report.rows)
        self._label = report.label
        self.update_progress()

    def end(self, result: EvalResult) -> None:
        """Print the metrics; for an evaluation that ended early, print how it can be resumed."""
        from bandpo_cli.storage.run_folder import EvalFolder, shell_command

        self.close()
        if self._info is None:  # it ended before the start
            return
        if result.error is None:
            if self._style == "json":
                print_json(result.record)
            else:
                print_scores(self.console, result.scores)
            if self._info.request.config.tracking.with_mlflow:
                self.spin("sending the metrics to MLflow …")
        elif not self._info.rescored:
            stored = EvalFolder(result.folder).count_stored()
            again = shell_command("eval --resume", result.folder, self.runs_dir)
            line = f"{stored:,} of {self._total:,} completions are stored; resume with: {again}"
            self.console.print_line(f"{result.record['status']}: {line}")

    def render(self) -> RenderableType:
        """Return the bar, with the name of the evaluation set before it and the counts after it."""
        label = Column(no_wrap=True, max_width=20, overflow="ellipsis")  # 80 columns hold it with the counts
        grid = Table.grid(label, Column(), Column(no_wrap=True), padding=(0, 1))  # the bar gets the rest
        grid.add_row(Text(self._label), ProgressBar(self._total, self._done), Text(self._counts_text()))
        return grid

    def line(self) -> str | None:
        """Return `gsm8k: 1,024/2,048 completions · 310/s · 0:00:03 left` about twenty times in all."""
        if self._done < self._next_line:
            return None
        self._next_line = self._done + self._stride
        return f"{self._label}: {self._counts_text()}"

    def _counts_text(self) -> str:
        count = f"{self._done:,}/{self._total:,} completions"
        if self._done == self._stored:
            return count
        rate, text = self._rate()
        return f"{count} · {text}/s · {format_duration((self._total - self._done) / rate)} left"

    def _rate(self) -> tuple[float, str]:
        """Return the completions per second, also as a text."""
        rate = (self._done - self._stored) / max(time.perf_counter() - self._start, 1e-9)
        return rate, f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def print_request(console: Console, request: EvalPlan) -> None:
    """Print what is evaluated."""
    from bandpo_cli.cli.train_view import describe_model
    from bandpo_cli.config.task import DataTask
    from bandpo_cli.experiments.eval_plan import SamplesFile

    def counts(sets: Mapping[str, Sized], noun: str) -> str:
        return ", ".join(f"{label} ({plural(len(problems), noun)})" for label, problems in sets.items())

    config, settings, file = request.config, request.config.evaluation, request.source
    notes: list[str] = []
    if isinstance(file, SamplesFile):
        total = sum(len(stored.completions_G) for stored_P in file.sets.values() for stored in stored_P)
        rows = {"samples": f"{file.path}, {total:,} completions", "tasks": counts(file.sets, "problem")}
    else:
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
        notes = [note for note in task.notes if not note.endswith((" problem", " problems"))]
    console.print_settings(rows.items(), notes)


def print_scores(console: Console, scores: Mapping[str, Scores]) -> None:
    """Print a table and a histogram for each evaluation set."""
    for label, score in scores.items():
        n = f"{score.fewest}" if score.fewest == score.most else f"{score.fewest} to {score.most}"
        size = f"{plural(len(score.by_problem), 'problem')} × {n} = {score.completions:,} completions"
        console.print()
        console.print_line(size, label)
        if not score.graded:
            counts = ", ".join(f"{count:,} {verdict}" for verdict, count in score.verdicts.items())
            console.print_line(f"no answer was graded ({counts}): there is no accuracy and no reward")
            continue
        table = make_table("", ">mean", ">95% interval")
        first = ["reward"] if score.nonbinary_rewards else []
        for name in [*first, *(name for name in score.metrics if name != "reward")]:
            metric = score.metrics[name]
            if metric.value or not name.endswith(_UNGRADED_RATES):
                interval = metric_text(name, metric.low, metric.high)
                table.add_row(metric_label(name), metric_text(name, metric.value), interval)
        console.print(table, "")
        if ungraded := ungraded_line(score):
            console.print_line(ungraded)
        for line in histogram(score):
            console.print(line, highlight=False)
    console.print()


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
        f"{sum(counts.values()):,} of {scores.completions:,} answers were not graded ({parts}) and count as not correct"
        f"{reward}; with all of them correct, {metric_label(name)} would be {most:.3f} instead of {mean.value:.3f}"
    )


def metric_label(name: str) -> str:
    """Return a metric's name as the literature writes it: `mean@16`, `pass@4`, `answer format`."""
    words = name.replace("_at_", "@").removesuffix("_rate").replace("_", " ")
    return f"{words}, tokens" if name == "response_length" else words


def metric_text(name: str, *values: float) -> str:
    """Return a value with its unit, or the limits of an interval as `0.412 to 0.478`; a dash if there is none."""
    form = "{:z,.1f}" if name == "response_length" else "{:z.3f}"  # z: no sign before a zero
    return "–" if math.isnan(values[0]) else " to ".join(map(form.format, values))


def histogram(scores: Scores) -> Iterable[Text]:
    """Yield lines with the number of problems by their number of correct completions."""
    from bandpo_cli.evaluation.scores import success_axis, success_histogram

    n = scores.fewest if scores.fewest == scores.most else None
    yield Text(f"problems by {success_axis(n)}", style="dim")
    bars = success_histogram([next(iter(values.values())) for values in scores.by_problem.values()], n)
    most = max(count for _, count in bars)
    for words, count in bars:
        length = math.ceil(40 * count / most) if count else 0
        yield Text.assemble(f"{words:>11}  ", ("█" * length, "cyan"), f" {count:,}" if count else " ·")


def print_comparison(console: Console, result: ComparisonResult, show: int) -> None:
    """Print what changed from A to B, with the `show` most changed problems of each set."""
    from bandpo_cli.reports.run_variants import format_setting

    console.print_rows([("A", str(result.path_a)), ("B", str(result.path_b))])
    for key, (a, b) in result.differences.items():
        null = "all" if key == "evaluation.problems" else "not set"
        before, after = (null if value is None else format_setting(value)[:200] for value in (a, b))
        console.print_line(f"{key} is {before} in A and {after} in B", "differs", "yellow")
    for label, compared in result.sets.items():
        only = [f"{n:,} only in {name}" for name, n in (("A", compared.only_a), ("B", compared.only_b)) if n]
        console.print()
        console.print_line(", ".join([f"{plural(compared.shared, 'problem')} in both", *only]), label)
        gap = 1 if console.width < 100 else 2  # leaves the verdict more of 80 columns
        table = make_table("", ">A", ">B", ">B − A", ">95% interval", ">detectable", "verdict", gap=gap)
        for name, (a, b, change, conclusion) in compared.metrics.items():
            texts = [metric_text(name, value) for value in (a, b, change.value)]
            sign = "+" if change.value > 0 and texts[2].strip("0.") else ""
            texts[2:] = f"{sign}{texts[2]}", metric_text(name, change.low, change.high)
            shown = "–" if conclusion.detectable is None else metric_text(name, conclusion.detectable)
            table.add_row(metric_label(name), *texts, shown, conclusion.verdict)
        console.print(table)
        compared_by = "mean reward" if "reward" in compared.metrics else "share of correct completions"
        others = f"lower on {compared.losses:,}, the same on {compared.ties:,}"
        console.print_line(f"{compared_by}: higher in B on {plural(compared.wins, 'problem')}, {others}")
        if (p := compared.sign_test_p) is not None:
            differing = compared.wins + compared.losses
            line = f"exact sign test, problems that differ: {differing:,}, p {'< 0.001' if p < 0.001 else f'= {p:.3f}'}"
            if differing < 6:  # 5 problems that all change in one direction have p = 2 · 2⁻⁵ = 0.0625
                line += "; with fewer than 6 it cannot be below 0.05"
            elif differing < 20:
                line += "; with so few, the 95% interval is approximate"
            console.print_line(line)
        for id_, share_a, share_b in compared.changed_problems[:show]:
            digits = 2 if f"{share_a:.2f}" != f"{share_b:.2f}" else 4
            question = compared.questions[id_]
            name = id_ if not question or question.strip(" :=") in id_ else f"{question}  ({id_})"
            console.print_line(f"  {share_a:.{digits}f} → {share_b:.{digits}f}  {name}")
