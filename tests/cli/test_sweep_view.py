"""Console view of a sweep: nothing before the first states, then a row per variant, and at last how the sweep ended."""

import io
from pathlib import Path

import pytest

from bandpo_cli.cli.console import Console
from bandpo_cli.cli.sweep import SweepView
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import SignalExit
from bandpo_cli.storage.sweep_folder import SweepRun
from bandpo_cli.sweeps.scheduler import RunState
from bandpo_cli.sweeps.sweep_run import SweepInfo, SweepResult
from tests.conftest import output_of

RUNS = [SweepRun(f"{variant}-s{seed}", variant, seed) for variant in ("clip", "band") for seed in (0, 1)]
WAITING = {run.name: RunState("waiting", 0, 40) for run in RUNS}
STATES = WAITING | {
    "clip-s0": RunState("finished", 40, 40, score=0.25, entropy=0.5, evaluations={40: 0.25}),
    "clip-s1": RunState("failed", 3, 40),
    "band-s0": RunState("running", 10, 40, score=0.5, entropy=0.25, seconds_left=60.0, evaluations={10: 0.5}),
}


@pytest.fixture
def view(tmp_path: Path) -> SweepView:
    view = SweepView(Console(file=io.StringIO(), width=100), tmp_path)
    view.start(SweepInfo(tmp_path / "s", RUNS, {run.name: RunConfig(steps=40) for run in RUNS}, (), 1, 1))
    return view


def printed(view: SweepView) -> list[str]:
    return view.console.file.getvalue().splitlines()


def result(view: SweepView, **values: object) -> SweepResult:
    return SweepResult(view.runs_dir / "s", 4, values.pop("finished", 1), {}, {}, **values)


def test_a_terminal_has_a_row_per_variant_after_the_first_states(view):
    assert view.render() == ""
    view.step(STATES)
    # 30 and 40 steps at 2 s each, one run at a time
    title, _, clip, band = output_of(Console.print, view.render(), width=100).rstrip().splitlines()
    assert title.strip() == "1/4 runs finished · 1 failed · 0:02:20 left"
    assert clip.split() == ["clip", "1/2", "1", "failed", "·", "0.250", "0.500", "·"]
    assert band.split() == ["band", "0/2", "10/40", "0.500", "0.250", "0:01:00"]


def test_a_file_has_a_line_whenever_a_run_has_ended(view):
    view.phase("run")
    already = len(printed(view))
    for states in (WAITING, WAITING, STATES, STATES, STATES | {"band-s0": RunState("stopped", 11, 40)}):
        view.step(states)
    assert printed(view)[already:] == [
        "0/4 runs finished",
        "1/4 runs finished · 1 failed · 0:02:20 left  running: band-s0 10/40",
        "1/4 runs finished · 1 failed · 1 stopped early",
    ]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            KeyboardInterrupt(),
            "stopped by Ctrl-C with 1 of 4 runs finished; resume with: bandpo sweep --resume s",
        ),
        (SignalExit(15), "stopped by SIGTERM with 1 of 4 runs finished; resume with: "),
        (OSError("disk full"), ""),  # the command prints the error itself
    ],
)
def test_the_end_after_a_signal_names_the_command_that_resumes(view, error, line):
    already = len(printed(view))
    view.end(result(view, error=error))
    assert " ".join(printed(view)[already:]).startswith(line)
    assert bool(printed(view)[already:]) == bool(line)


def test_the_end_names_what_failed_and_why_there_is_no_report(view):
    view.step(STATES)
    already = len(printed(view))
    ended = result(view, report_error="no run has finished", mlflow="http://h/1", finished=0)
    ended.failures["clip-s1"] = "out of memory"
    ended.stopped["band-s0"] = "below the others"
    view.end(ended)
    lines = printed(view)[already:]
    for line, words in zip(
        lines, ["no report", "0 of 4 runs finished", "MLflow", "stopped", "out"], strict=True
    ):
        assert words in line
