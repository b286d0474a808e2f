"""Commands that read run folders: `bandpo runs`, `show`, `samples`, `view` and `plot`."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from rich.cells import cell_len
from rich.rule import Rule
from rich.text import Text

from bandpo_cli.cli import options as opt
from bandpo_cli.cli.console import Console, format_duration, make_table, open_console, print_json, to_json
from bandpo_cli.errors import UserError, excerpt, nearest
from bandpo_cli.methods import METHODS
from bandpo_cli.metric_names import AXES
from bandpo_cli.processes.watch import read_stacks

RunName = Annotated[
    str, opt.argument("RUN", complete=opt.folder_of("run"), help="Its name in --runs-dir, or its folder.")
]

_STYLES = {
    "running": "cyan", "finished": "green", "failed": "red", "stopped": "yellow", "killed": "yellow", "damaged": "red"
}  # fmt: skip
"""The state of a run, and its color."""

_COLUMNS = (
    "run", "method", "task", "status", ">steps", ">held-out", ">training", ">entropy", ">held-out\nreward",
    ">training\nreward", "started", "fork of",
)  # fmt: skip
"""The columns of `bandpo runs`."""
_LEFT_OUT = ("fork of", "started", "task", ">entropy", "method", ">training", ">training\nreward")
"""The columns that a narrow terminal does not show, the first ones first. The name of a run is never broken."""

_STATUS = opt.choice("--status", *_STYLES, metavar="STATUS", help=f"Only runs that are {', '.join(_STYLES)}.")
_SORTS = ("time", "name", "heldout", "heldout_reward", "accuracy", "reward", "entropy", "step")
_SORT = opt.choice("--sort", *_SORTS, metavar="KEY")

_SHOWN_STEPS = 6
_FIRST_METRICS = (
    "train/accuracy", "train/reward", "train/entropy", "train/response_length", "clip/active_fraction",
    "clip/outside_fraction", "gradient/weight_mean", "ratio/max", "kl/old_new", "kl/ref", "optim/grad_norm",
    "optim/lr",
)  # fmt: skip
"""The metrics of `bandpo show`, in this order, before the scores of evaluations; --all prints every metric."""


@opt.documented
def runs(
    patterns: Annotated[
        list[str] | None, opt.argument("PATTERN...", "all", complete=opt.folder_of("run", "sweep"))
    ] = None,
    method: Annotated[str | None, opt.option("METHOD", complete=opt.one_of(METHODS))] = None,
    task: Annotated[str | None, opt.option("TASK", complete=opt.one_of(opt.TASK_NAMES))] = None,
    status: Annotated[str | None, _STATUS] = None,
    sort: Annotated[str, _SORT] = "time",
    format_: opt.TableOrJson = "table",
    runs_dir: opt.RunsDir = opt.RUNS,
) -> None:
    """List runs: method, task, steps, status, held-out and training accuracy, entropy.

    Held-out is the mean of mean@n over the evaluation sets at the last
    evaluation; training is the accuracy of the completions of the last step.
    If rewards are not just 0 and 1, the mean rewards follow. A narrow terminal shows fewer columns.

    [bold]bandpo runs[/bold]  all runs, the latest last
    [bold]bandpo runs 'kl-*' deltas --sort heldout[/bold]  by name, and a sweep's; the best first
    [bold]bandpo runs --status running --format json[/bold]  in scripts

    Args:
        patterns: Names, with * and ?; a sweep stands for its runs.
        method: Only runs of this method: clip, band, band-kl.
        task: Only runs of this task.
    """
    from bandpo_cli.results import list_runs

    runs = list_runs(runs_dir, patterns or (), method=method, task=task, status=status, sort=sort)
    if format_ == "json":
        print_json([asdict(run) for run in runs])
        return
    console = open_console()
    if not runs:
        is_filtered = patterns or method or task or status
        none = f"no such runs in {runs_dir}" if is_filtered else "no runs yet; bandpo train starts one"
        console.print_line(none)
        return
    columns: dict[str, list[Text]] = {heading: [] for heading in _COLUMNS}
    for run in runs:
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_ms / 1000))
        steps, started = ("", "") if run.status is None else (f"{run.step:,}/{run.steps:,}", started)
        is_scale = run.nonbinary_rewards and not (run.heldout or run.accuracy)  # that may never reach 1
        accuracies = (None, None) if is_scale else (run.heldout, run.accuracy)
        values = *accuracies, run.entropy, run.heldout_reward, run.reward
        numbers = ("" if value is None else f"{value:.3f}" for value in values)
        texts = run.name, run.method, run.task, run.state, steps, *numbers, started, run.parent or ""
        for (heading, cells), text in zip(columns.items(), texts, strict=True):
            cells.append(Text(text, _STYLES[text] if heading == "status" else ""))
    if not any(run.nonbinary_rewards for run in runs):
        del columns[">held-out\nreward"], columns[">training\nreward"]
    if not any(run.parent for run in runs):
        del columns["fork of"]
    gap = 2 if console.width >= 100 else 1
    for left_out in _LEFT_OUT:
        texts_of = {key: [*key.strip(">").split("\n"), *map(str, cells)] for key, cells in columns.items()}
        if sum(max(map(cell_len, texts)) + gap for texts in texts_of.values()) - gap <= console.width:
            break
        columns.pop(left_out, None)
    table = make_table(*columns, gap=gap)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(table, highlight=False)
    for run in runs:
        reason = run.stopped_by or (run.error if run.status != "KILLED" else None)
        if reason is not None:
            console.print_line(excerpt(reason, 400), run.name, "yellow")


@opt.documented
def show(
    run: RunName,
    all_: Annotated[bool, opt.option()] = False,
    stacks: Annotated[bool, opt.option()] = False,
    format_: opt.TableOrJson = "table",
    runs_dir: opt.RunsDir = opt.RUNS,
) -> None:
    """Show a run: the settings that differ from the defaults, the metrics, and the paths of its files.

    [bold]bandpo show first[/bold]
    [bold]bandpo show first --stacks[/bold]  where a run that stands still is
    [bold]bandpo show first --format json[/bold]  all settings and metrics, in scripts

    Args:
        all_: Every metric.
        stacks: Print the place of every thread of every process of a running run instead.
    """
    from bandpo_cli.results import describe_run

    if stacks:
        from bandpo_cli.paths import read_json_object
        from bandpo_cli.storage.files import LOCK
        from bandpo_cli.storage.run_folder import RunFolder

        owner = read_json_object(RunFolder.open(runs_dir, run).path / LOCK)
        texts = read_stacks(Path(owner.get("stacks") or os.devnull))
        print("\n".join(texts) or f"{run}: no process of bandpo train on this machine is writing it")
        return
    described = describe_run(run, runs_dir)
    if format_ == "json":
        print_json(described)
    else:
        _print_description(open_console(), described, runs_dir, all_)


def _print_description(console: Console, run: Mapping[str, Any], runs_dir: Path, every_metric: bool) -> None:
    from bandpo_cli.cli.train_view import describe_model, phases_text
    from bandpo_cli.config.layers import resolve, setting_text
    from bandpo_cli.storage.run_folder import shell_command
    from bandpo_cli.tracking.sender import tracker_rows

    config, changes = resolve([run["config"]]), run["changed"]
    reason = run["stopped_by"] or run["error"]
    progress = f"{run['state']}, step {run['step']:,} of {run['steps']:,}"
    progress += f", {format_duration(run['seconds'])}"

    def lines(settings: Mapping[str, Any]) -> list[str]:
        defaults = {key: f"  (default {setting_text(change['default'])})" for key, change in changes.items()}
        texts = (f"{key} = {setting_text(value)}{defaults.get(key, '')}" for key, value in settings.items())
        return [text.replace("\n", "\\n") for text in texts]

    values = {key: change["value"] for key, change in changes.items()}
    others = {key: value for key, value in values.items() if value is None or not key.startswith("task.")}
    rows = [
        ("run", str(run["path"])),
        ("status", f"{progress}: {reason.splitlines()[0]}" if reason else progress),
        *([("fork of", run["parent"])] if run["parent"] else []),
        ("a step", phases_text(run["times"], run["trained_steps"])),
        ("model", describe_model(config)),
        ("task", "\n".join([run["task"], *lines(run["task_settings"])])),
        ("bounds", config.bounds.describe()),
        ("settings", "\n".join(lines(others))),
        ("checkpoints", _steps(run["checkpoints"])),
        ("completions", _steps(run["sampled_steps"])),
        ("plots", ", ".join(path.name for path in run["plots"])),
    ]
    console.print_settings([(heading, text or "none") for heading, text in rows])
    # Not rows of the table, which would break an address into lines that a terminal does not link.
    console.print_rows(tracker_rows(config.tracking, run["path"]), len("completions"))
    table = make_table("metric", ">first", ">step", ">last", ">step")
    order = {key: index for index, key in enumerate(_FIRST_METRICS)}
    scores = r"eval/.*/(mean|pass|maj)_at_[^/]*"
    if run["nonbinary_rewards"]:
        order["train/reward"] = -1
        scores += "|eval/.*/reward"
    chosen = [key for key in run["metrics"] if every_metric or key in order or re.fullmatch(scores, key)]
    # Scores of evaluations come last, rewards first among them.
    last = {key: len(order) * key.startswith("eval/") for key in chosen} | order
    chosen.sort(key=lambda key: (last[key], not key.endswith("/reward")))
    for key in chosen:
        (first_step, first), (last_step, last) = run["metrics"][key].values()
        table.add_row(Text(key), f"{first:.4g}", f"{first_step}", f"{last:.4g}", f"{last_step}")
    console.print("", table, highlight=False)
    if run["status"] in ("FAILED", "KILLED"):
        console.print()
        console.print_line(shell_command("train --resume", run["path"], runs_dir), "resume with:")


def _steps(steps: Sequence[int]) -> str:
    """Return `step 0, 10, 20`; of many steps the first, the last ones and their number."""
    if len(steps) <= _SHOWN_STEPS:
        return f"step {', '.join(map(str, steps))}" if steps else ""
    shown = ", ".join(map(str, steps[-_SHOWN_STEPS + 1 :]))
    return f"step {steps[0]}, …, {shown} ({len(steps)} in all)"


@opt.documented
def samples(
    run: Annotated[str, opt.argument("RUN", complete=opt.folder_of("run", "evaluation"))],
    step: Annotated[int | None, opt.option("N", "the last step with samples", min=0)] = None,
    correct: Annotated[bool, opt.option()] = False,
    wrong: Annotated[bool, opt.option()] = False,
    problem: Annotated[str | None, opt.option("ID")] = None,
    limit: Annotated[int, opt.option("N", flags=["--limit", "-n"], min=0)] = 8,
    format_: Annotated[str, opt.choice("--format", "text", "jsonl")] = "text",
    runs_dir: opt.RunsDir = opt.RUNS,
) -> None:
    """Print completions with their reference answers and verdicts, grouped by prompt.

    [bold]bandpo samples first[/bold]  of the last step
    [bold]bandpo samples first --step 0 --wrong[/bold]  what went wrong before the training
    [bold]bandpo samples first --problem 3-7-8-9-24 --limit 0[/bold]  all completions of a problem
    [bold]bandpo samples first --limit 0 --format jsonl > completions.jsonl[/bold]  in scripts

    Args:
        run: A run or an evaluation: its name in --runs-dir, or its folder.
        step: Step of the run.
        correct: Only correct completions.
        wrong: Only completions that are not correct.
        problem: Only completions of this problem.
        limit: Maximum number of completions to print; 0 prints all.
    """
    from bandpo_cli.storage.run_record import completions_path
    from bandpo_cli.storage.tables import read_graded_completions

    if correct and wrong:
        raise UserError("--correct --wrong: give one of them; without either flag, both kinds are printed")
    path = completions_path(run, runs_dir, step)
    completions = read_graded_completions(path)
    ids = sorted({row["problem_id"] for row in completions})
    if problem is not None and problem not in ids:
        known = f"{', '.join(ids[:5])}{' …' if len(ids) > 5 else ''}"
        raise UserError(f"--problem {problem}: no such problem{nearest(problem, ids)}; there are {known}")
    chosen = [row for row in completions if problem in (None, row["problem_id"])]
    if correct or wrong:
        chosen = [row for row in chosen if (row["accuracy"] == 1) == correct]
    shown = chosen[:limit] if limit else chosen
    if format_ == "jsonl":
        for completion in shown:
            print(to_json(completion))
        return
    if not chosen:
        wanted = "correct" if correct else "wrong"
        raise UserError(f"{path}: none of its {len(completions):,} completions is {wanted}")
    console = open_console()
    # A group has one prompt, which may be longer than all of its completions together.
    of_prompt = itemgetter("label", "problem_id", "prompt", "reference")
    for (label, id_, prompt, reference), group in groupby(shown, of_prompt):
        name = id_ if id_.startswith(label) else f"{label} {id_}"
        console.print(Rule(Text(f"prompt · {name}", "bold"), align="left"))
        answer = Text.assemble(("reference  ", "bold"), reference, "\n") if reference else Text()
        console.print(Text(prompt, "dim"), answer, sep="\n", soft_wrap=not console.is_terminal)
        for completion in group:
            _print_completion(console, completion)
    right = sum(item["accuracy"] == 1 for item in chosen)
    more = f"; --limit 0 prints all {len(chosen):,}" if len(shown) < len(chosen) else ""
    console.print_line(f"{len(shown):,} of {len(chosen):,} completions of {path}, {right:,} correct{more}")


def _print_completion(console: Console, completion: Mapping[str, Any]) -> None:
    style = "green" if completion["accuracy"] == 1 else "red"
    reward, length = completion["reward"], completion["length"]
    facts = [
        "completion",
        completion["verdict"],
        "" if reward is None else f"reward {reward:g}",
        "" if length is None else f"{length:,} tokens",
        "truncated" if completion["finish_reason"] == "length" else "",
    ]
    console.print(Rule(Text(" · ".join(filter(None, facts)), style), align="left", style=style))
    console.print(Text(completion["text"] + "\n"), soft_wrap=not console.is_terminal)


@opt.documented
def view(
    names: Annotated[list[str], opt.argument("RUN [RUN]", complete=opt.folder_of("run", "evaluation"))],
    step: Annotated[int | None, opt.option("N", "the last recorded step", min=0)] = None,
    out: Annotated[Path | None, opt.option("FILE", "view/step-N.html in the folder of the run")] = None,
    x: opt.AxisName = "step",
    open_: Annotated[bool, opt.option()] = False,
    runs_dir: opt.RunsDir = opt.RUNS,
) -> None:
    """Write an HTML page of the completions of a step, with values per token: ratio, bounds, clipping, log-prob.

    The page works without a network. It shows the groups side by side, which
    tokens the method clips by which bound, and which of them the fixed clip 0.2
    would clip. Runs record the values of the first, every 20th and the last step
    (tracking.tokens_every). Of an evaluation it shows the completions only.

    [bold]bandpo view first --step 20 --open[/bold]  opens the page in the browser
    [bold]bandpo view kl clip[/bold]  two runs on the same problems

    Args:
        names: A run or an evaluation, or two: their names in --runs-dir, or their folders.
        step: A recorded step of the runs.
        out: File of the page. A page of more than 20 MB has a folder beside it.
        open_: Open the page in the browser.
    """
    from bandpo_cli.reports.view_page import default_path, open_sources, write_page

    if len(names) > 2:
        raise UserError(f"{' '.join(names)[:200]}: give one or two runs or evaluations")
    sources = open_sources(names, runs_dir, step)
    page, *parts = write_page(sources, out or default_path(sources), AXES[x])
    console = open_console()
    console.print_line(str(page))
    if parts:
        size = sum(path.stat().st_size for path in parts) / 1e6
        line = f"keep the folder {parts[0].parent} ({size:,.0f} MB) beside it"
        console.print_line(line, "note:", "yellow")
    if open_:
        import webbrowser

        webbrowser.open(page.absolute().as_uri())


@opt.documented
def plot(
    run: RunName,
    format_: Annotated[str, opt.choice("--format", "png", "pdf", "svg")] = "png",
    out: Annotated[Path | None, opt.option("DIR", "plots in the run folder")] = None,
    x: opt.AxisName = "step",
    runs_dir: opt.RunsDir = opt.RUNS,
) -> None:
    """Plot accuracy, entropy, clip fraction and the clip map of a run, which may be in progress.

    [bold]bandpo plot first[/bold]  again, with the steps that it has now
    [bold]bandpo plot first --format pdf --out figures[/bold]  for a paper

    Args:
        out: Folder of the plots.
    """
    from bandpo_cli.reports.run_plots import plot_run
    from bandpo_cli.storage.run_folder import RunFolder

    folder = RunFolder.open(runs_dir, run).path
    console = open_console()
    try:
        written = plot_run(folder, out, f".{format_}", AXES[x])
    except OSError as error:
        target = out or folder / "plots"
        raise UserError(f"--out {target}: cannot be written: {error.strerror or error}") from None
    if not written:
        raise UserError(f"{folder} has nothing to plot: the run has completed no step")
    for path in written:
        console.print_line(str(path))
