"""`bandpo sweep`: run every combination of the given settings; its plan, and a live table of the variants."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from bandpo_cli.cli import options as opt
from bandpo_cli.cli.console import Console, ExperimentView, format_duration, make_table, open_console
from bandpo_cli.cli.report import print_report
from bandpo_cli.cli.signals import exit_on_sigterm
from bandpo_cli.errors import RunError, SignalExit, UserError, plural

if TYPE_CHECKING:
    from bandpo_cli.storage.sweep_folder import SweepRun
    from bandpo_cli.sweeps.power import Components, PlanRow
    from bandpo_cli.sweeps.sweep_run import States, SweepInfo, SweepResult

_EXECUTION = {
    "--resume", "--jobs", "--gpus-per-run", "--stop-behind", "--executor", "--ray-address", "--runs-dir", "--x"
}  # fmt: skip
"""The options that say how runs are executed, and not which."""
_OF_POWER = {"--power", "--pilot", "--baseline", "--jobs", "--runs-dir"}


@opt.takes_settings
def sweep(
    *,
    context: typer.Context,
    file: Annotated[Path | None, opt.argument("[FILE]")] = None,
    settings: opt.Settings,
    seeds: Annotated[str | None, opt.option("S,S", "0")] = None,
    axis: Annotated[list[str] | None, opt.option("KEY=V,V")] = None,
    fork: Annotated[str | None, opt.option("RUN[@STEP]", complete=opt.folder_of("run"))] = None,
    recorded: Annotated[str | None, opt.option("RUN", complete=opt.folder_of("run"))] = None,
    tuned_on: Annotated[str | None, opt.option("SWEEP", complete=opt.folder_of("sweep"))] = None,
    baseline: Annotated[str | None, opt.option("VARIANT")] = None,
    jobs: Annotated[int | None, opt.option("N", "as many as there are GPUs for, else cores", min=1)] = None,
    gpus_per_run: Annotated[int | None, opt.option("K", "1", min=1)] = None,
    stop_behind: Annotated[float | None, opt.option("MARGIN", "no run is ended")] = None,
    executor: Annotated[str, opt.option("EXECUTOR", complete=opt.one_of(("local", "ray")))] = "local",
    ray_address: Annotated[
        str | None, opt.option("ADDRESS", "a local cluster that ends with the sweep")
    ] = None,
    x: opt.AxisName = "step",
    name: Annotated[str | None, opt.option("NAME", "sweep-time")] = None,
    config: opt.ConfigFiles = None,
    set_: opt.Assignments = None,
    runs_dir: opt.RunsDir = opt.RUNS,
    tracking: opt.Tracking,
    dry_run: Annotated[bool, opt.option()] = False,
    power: Annotated[float | None, opt.option("DIFFERENCE")] = None,
    pilot: Annotated[Path | None, opt.option("SWEEP", complete=opt.folder_of("sweep"))] = None,
    resume: Annotated[str | None, opt.option("SWEEP", complete=opt.folder_of("sweep"))] = None,
) -> None:
    """Run every combination of the given values as an ordinary run, in one folder.

    The values of several lists are combined; each combination is run with each
    seed of --seeds. Each run is a folder in <runs-dir>/<sweep>, as `bandpo train`
    writes it. A failed run does not stop the other runs; --resume starts it again.

    [bold]bandpo sweep --delta 0.01,0.05,0.1 --divergence kl,tv --seeds 0,1,2[/bold]
    [bold]bandpo sweep --method band,clip,clip-higher,none --seeds 0,1,2 --baseline clip[/bold]
    [bold]bandpo sweep --divergence kl,tv --delta match:clip --recorded RUN[/bold]  at equal clipping
    [bold]bandpo sweep --method band,clip --lr 2e-5,5e-5,1e-4 --seeds 100,101 --name tuning[/bold]
    [bold]bandpo sweep --tuned-on tuning --seeds 0,1,2,3,4,5[/bold]  each at its best, other seeds
    [bold]bandpo sweep --fork RUN@50 --method band,clip --seeds 0,1[/bold]  from one checkpoint
    [bold]bandpo sweep --axis optim.updates=4,8,16 --steps 40 --dry-run[/bold]
    [bold]bandpo sweep --delta 0.01,0.05 --gpus-per-run 2[/bold]  each run on two GPUs
    [bold]bandpo sweep sweep.yaml[/bold]  axes, named variants and exclusions from a file
    [bold]bandpo sweep --power 0.02 --pilot NAME[/bold]  seeds and problems that show 0.02
    [bold]bandpo sweep --resume NAME[/bold]  after Ctrl-C, a crash or a failed run

    Args:
        file: A sweep file with the keys fixed, axes, variants, exclude, seeds, fork and baseline.
        seeds: Seeds; every variant runs once per seed.
        axis: Any other setting's values; repeatable.
        fork: Continue a checkpoint of RUN in every run, by default the last one. The settings of RUN are the defaults;
            a seed decides the random numbers after this step.
        recorded: For --delta match:clip: the run on whose recorded tokens the radius is matched to the clip
            fraction of clip.
        tuned_on: Run each method with the settings that were best in that sweep, with other seeds.
        baseline: The variant that the report compares all other variants with.
        jobs: Runs at a time; a resume keeps the number.
        gpus_per_run: Number of GPUs per run, one process per GPU. Without a GPU, a run has K processes on the
            CPU.
        stop_behind: Stop a run after half of its steps or later if its held-out accuracy is more than MARGIN
            below another variant's.
        executor: Where runs are executed: local, or ray for a cluster (the extra 'ray').
        ray_address: A running Ray cluster, or auto.
        name: Name of the sweep's folder.
        dry_run: Print the runs and the estimate of the time, check by dry runs that the runs start, and stop.
        power: Run nothing; print how many seeds and problems show this difference of accuracy.
        pilot: For --power: a finished sweep, whose results show the spread.
        resume: Resume a sweep: runs that are not finished are executed again.
    """
    if (power is None) != (pilot is None):
        missing = "--pilot NAME, a finished sweep with two or more seeds" if pilot is None else "--power 0.02"
        raise UserError(f"{'--power' if pilot is None else '--pilot'}: goes with {missing}")
    if power is not None and pilot is not None:
        opt.refuse_with(context, "--power", "the pilot has the settings", lambda name: name not in _OF_POWER)
        from bandpo_cli.sweeps.power import plan_power

        print_power(open_console(), *plan_power(pilot, power, runs_dir, jobs, baseline), power)
        return
    from bandpo_cli.config.layers import nest, read_assignments, read_config
    from bandpo_cli.experiments import sweep as run_sweep
    from bandpo_cli.experiments.plan import choose_run_name, extreme_settings
    from bandpo_cli.storage.run_folder import shell_command
    from bandpo_cli.sweeps.estimate import check_starts
    from bandpo_cli.sweeps.sweep_plan import SweepPlan, plan_sweep
    from bandpo_cli.sweeps.sweep_run import Executor, dry_run_info

    chosen = Executor(executor, ray_address, jobs, stop_behind, gpus_per_run)
    request: SweepPlan | str
    if resume is not None:
        used = "the plan of the sweep is used"
        opt.refuse_with(context, "--resume", used, lambda name: name not in _EXECUTION)
        request = resume
    else:
        compared = [flag.setting for flag in opt.SETTINGS if flag.sweep == "several values"]
        axes = {key: settings.pop(key) for key in compared if key in settings}
        layers = [*map(read_config, config or []), nest(settings | tracking), read_assignments(set_ or [])]
        if not (axes or axis or file) and seeds is None and tuned_on is None:
            example = "--delta 0.01,0.05 --seeds 0,1"
            raise UserError(f"nothing is swept: give a sweep file or values, as in: {example}")
        options = {
            "seeds": seeds,
            "baseline": baseline,
            "fork": fork,
            "recorded": recorded,
            "tuned_on": tuned_on,
        }
        request = plan_sweep(file, axes, axis or [], options, layers, runs_dir)
    console = open_console(long_running=not dry_run)
    for kind, note in request.notes() if isinstance(request, SweepPlan) else ():
        console.print_line(note, kind, "cyan")
    with closing(SweepView(console, runs_dir)) as view:
        if isinstance(request, SweepPlan):
            lines = chain.from_iterable(map(extreme_settings, request.runs.values()))
            console.print_warnings(dict.fromkeys(lines))
        if dry_run and isinstance(request, SweepPlan):
            choose_run_name(runs_dir, name, "sweep")
            info = dry_run_info(request, chosen)
            view.phase("check")
            check_starts(info, request.about.get("fork"))
            view.print_plan(info)
            return
        with exit_on_sigterm():
            result = run_sweep(request, executor=chosen, runs_dir=runs_dir, name=name, callbacks=[view], x=x)
    if result.failures:
        again = shell_command("sweep --resume", result.folder, runs_dir)
        raise RunError(f"{len(result.failures)} of {result.runs} runs failed; try them again: {again}")


def print_power(
    console: Console, size: str, components: Components, rows: Sequence[PlanRow], difference: float
) -> None:
    """Print the spreads of a pilot by their cause, and the seeds that show a difference by number of problems."""
    console.print_line(f"{size}; standard deviations of a difference:", "pilot")
    names = "between seeds", "between problems", "of a problem in a seed", "  of its completions alone"
    spreads = [f"{variance**0.5:.3f}" for variance in components]
    if components.completions > components.cell:  # equal seeds give similar methods equal completions
        spreads[-1] += " if both methods sampled independently"
    console.print_rows(zip(names, spreads, strict=True), 27)
    console.print_line(f"seeds that show a difference of {difference:g} with a probability of 80%:")
    table = make_table(">problems", ">seeds", ">90% interval", ">for other problems", ">runs", ">time")
    for row in rows:
        other = "–" if row.seeds_elsewhere is None else f"{row.seeds_elsewhere:,}"
        counts = f"{row.problems:,}", f"{row.seeds:,}", f"{row.low:,} to {row.high:,}", other, f"{row.runs:,}"
        table.add_row(*counts, format_duration(row.seconds))
    console.print(table)


class SweepView(ExperimentView):
    """Console view of a sweep: a live table on a terminal, elsewhere a line when a run ends and every minute."""

    spinners: Mapping[str, str] = {
        "tracking": "opening the sweep at MLflow …",
        "check": "dry runs, one for all runs with the same start, about 10 seconds each …",
        "trial": "a trial of three steps, for an estimate of the time; it takes about half a minute …",
        "report": "writing the report …",
    }

    def __init__(self, console: Console, runs_dir: Path) -> None:
        super().__init__(console, runs_dir)
        self._info: SweepInfo | None = None
        self._states: States = {}
        self._start = 0.0
        self._ended = -1

    def start(self, info: SweepInfo) -> None:
        self._info, self._start = info, time.perf_counter()
        self.print_start(info.folder, "sweep")
        self.print_plan(info)

    def print_plan(self, info: SweepInfo) -> None:
        """Print the table of runs and the estimate of the time."""
        self.spin(None)
        from bandpo_cli.sweeps.estimate import estimate_disk_space, estimate_time

        self.console.print(plan_table(info), highlight=False)
        finished = len(info.runs) - len(info.pending)
        processes = "" if info.ranks == 1 else f"{info.ranks} processes of "
        runs = f"{plural(len(info.runs), 'run')}{f', {finished} of them finished' if finished else ''}"
        each = f"{info.slots} at a time, {processes}{plural(info.threads, 'thread')} each"
        self.console.print_line(f"{runs}, {each}")
        if not info.pending:
            return
        needed, free = (size / 1e9 for size in estimate_disk_space(info, self.runs_dir))
        if needed >= 1:
            line = f"checkpoints: about {needed:,.0f} GB in the end; {free:,.0f} GB are free"
            if needed > free:
                line += "; --set checkpoint.keep_last=1 --set checkpoint.keep_best=0 keeps one per run"
            self.console.print_line(line, "warning:" if needed > free else "", "yellow")
        try:
            estimate = estimate_time(info, self.runs_dir, lambda: self.phase("trial"))
        finally:
            self.spin(None)
        line = "no time estimate yet, because no finished run has these settings"
        if estimate is not None:
            total, run, source = estimate
            line = f"about {format_duration(total)} in total, {format_duration(run)} per run ({source})"
        self.console.print_line(line)

    def phase(self, name: str) -> None:
        """Show the live table while the runs are executed, a spinner in other phases; a file gets lines instead."""
        if name == "run":
            self.show_progress()
        if name == "report":
            self.stop_progress()
            self.console.print()
        super().phase(name)
        if name in ("check", "trial") and not self.console.is_terminal:
            self.console.print_line(self.spinners[name])

    def step(self, report: States) -> None:
        self._states = report
        self.update_progress()

    def end(self, result: SweepResult) -> None:
        """Print the report and what failed; after Ctrl-C or SIGTERM print how to resume."""
        from bandpo_cli.storage.run_folder import shell_command

        self.close()
        if self._info is None:
            return
        finished = f"{result.finished} of {len(self._info.runs)} runs"
        if result.error is not None:
            if isinstance(result.error, KeyboardInterrupt | SignalExit):
                how = str(result.error) or "stopped by Ctrl-C"
                again = shell_command("sweep --resume", result.folder, self.runs_dir)
                self.console.print_line(f"{how} with {finished} finished; resume with: {again}")
            return
        if result.report is None:
            self.console.print_line(str(result.report_error), "no report:", "yellow")
        else:
            print_report(self.console, result.report)
            self.console.print()
        duration = format_duration(time.perf_counter() - self._start)
        self.console.print_line(f"{finished} finished{f' in {duration}' if self._info.pending else ''}")
        self.console.print_rows([("MLflow", result.mlflow or "")], 6)
        stopped = (f"{name}: {why}" for name, why in result.stopped.items())
        self.console.print_warnings(stopped, "stopped early")
        for name, why in result.failures.items():
            self.console.print_line(f"{name}: {why}", "failed", "red")

    def render(self) -> RenderableType:
        """Return the table of the variants; nothing before the first states."""
        if self._info is None or not self._states:
            return ""
        table = variants_table(self._info.runs, self._states)
        table.title, table.title_justify = self._counts_text(), "left"
        return table

    def line(self) -> str | None:
        """Return a line if a run has ended since the last line, or it was long ago."""
        ended = sum(state.status in ("finished", "failed", "stopped") for state in self._states.values())
        if ended == self._ended and not self.is_overdue:
            return None
        self._ended = ended
        states = self._states.items()
        running = [f"{name} {run.step}/{run.steps}" for name, run in states if run.status == "running"]
        return self._counts_text() + (f"  running: {', '.join(running)}" if running else "")

    def _counts_text(self) -> str:
        """Return `2/6 runs finished · 1 failed · 0:01:05 left`."""
        counts: Counter[str] = Counter(state.status for state in self._states.values())
        parts = [f"{counts['finished']}/{len(self._states)} runs finished"]
        for status, text in (("failed", "failed"), ("stopped", "stopped early")):
            parts += [f"{counts[status]} {text}"] if counts[status] else []
        if self._info is not None and (left := seconds_left(self._states, self._info.slots)) is not None:
            parts.append(f"{format_duration(left)} left")
        return " · ".join(parts)


def plan_table(info: SweepInfo) -> Table:
    """Return one row per variant, with its seeds and steps."""
    from bandpo_cli.storage.sweep_folder import by_variant

    table = make_table("variant", "seeds", ">steps", ">runs")
    for variant, runs in by_variant(info.runs).items():
        steps = " ".join(map(str, sorted({info.configs[run.name].steps for run in runs})))
        table.add_row(Text(variant), ", ".join(str(run.seed) for run in runs), steps, str(len(runs)))
    return table


def variants_table(runs: Sequence[SweepRun], states: States) -> Table:
    """Return a row per variant; without evaluations, accuracy or reward are of the last training step."""
    from bandpo_cli.storage.sweep_folder import by_variant

    known = [state for state in states.values() if state.score is not None]
    held_out = not known or any(state.evaluations for state in known)
    metric = "reward" if any(state.metric == "reward" for state in known) else "accuracy"
    heading = f">{'held-out' if held_out else 'training'} {metric}"
    table = make_table("variant", ">finished", "running at step", heading, ">entropy", ">left")
    for variant, members in by_variant(runs).items():
        own = [states[run.name] for run in members]
        counts = Counter(state.status for state in own)
        running = [state for state in own if state.status == "running"]
        scores = [state.score for state in own if state.evaluations or not held_out]
        left = [state.seconds_left for state in running if state.seconds_left is not None]
        table.add_row(
            Text(variant),
            Text.assemble(
                f"{counts['finished']}/{len(own)}",
                (f" {counts['failed']} failed" if counts["failed"] else "", "red"),
                (f" {counts['stopped']} stopped" if counts["stopped"] else "", "yellow"),
            ),
            "  ".join(f"{state.step}/{state.steps}" for state in running) or "·",
            _mean_text(scores),
            _mean_text(state.entropy for state in own),
            format_duration(max(left)) if left else "·",
        )
    return table


def _mean_text(values: Iterable[float | None]) -> str:
    """Return the mean of the known values as text; `·` without any."""
    known = [value for value in values if value is not None]
    return f"{fmean(known):.3f}" if known else "·"


def seconds_left(states: States, jobs: int) -> float | None:
    """Return the remaining seconds by the mean seconds per step of the running runs; None before their first step.

    `jobs` runs share the remaining steps, but the time is not shorter than the time of the slowest running run.
    """
    active = [state for state in states.values() if state.status in ("waiting", "running")]
    left = [(state.steps - state.step, state.seconds_left) for state in active if state.step < state.steps]
    timed = [(seconds, seconds / steps) for steps, seconds in left if seconds is not None]
    if not timed:
        return None
    steps, per_step = sum(steps for steps, _ in left), fmean(seconds for _, seconds in timed)
    return max(steps * per_step / jobs, *(seconds for seconds, _ in timed))
