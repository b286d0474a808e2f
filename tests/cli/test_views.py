"""Console views of training runs, sweeps and evaluations."""

import io
import math
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.panel import Panel

from bandpo_cli.callbacks import RunInfo, RunResult, StepReport
from bandpo_cli.cli.console import Console, ExperimentView
from bandpo_cli.cli.eval import histogram, print_comparison, print_scores, ungraded_line
from bandpo_cli.cli.signals import StopSignals
from bandpo_cli.cli.sweep import plan_table, seconds_left, variants_table
from bandpo_cli.cli.train_view import (
    TrainView,
    eval_metrics_text,
    flagged_shares,
    phases_text,
    print_summary,
    settings_rows,
    sparkline,
)
from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.evaluation.scores import Scores, score
from bandpo_cli.experiments.eval_comparison import ComparisonResult, compare_records
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.sweep_folder import SweepRun
from bandpo_cli.storage.tables import EvalRow
from bandpo_cli.sweeps.scheduler import RunState
from bandpo_cli.sweeps.sweep_run import SweepInfo
from bandpo_cli.tasks.task import build_task
from bandpo_cli.types import Completion, Grade, Problem, Rollout
from tests.conftest import output_of
from tests.evaluation.test_scores import row

TRACKED = {"tracking": {"mlflow": True}}


def report(step: int, evaluated: bool = False) -> StepReport:
    record = {"step": step, "time/step": 1.5}
    if step:
        record |= {"train/accuracy": 0.25 + step / 1000, "train/entropy": 0.5, "clip/active_fraction": 0.002}
    if evaluated:
        record |= {"eval/countdown/mean_at_16": 0.3125, "eval/countdown/pass_at_16": 0.9}
    problem = Problem("1 2=3", "1 2=3:", "3", "countdown", "countdown")
    completion = Completion((1, 2), (-0.1, -0.2), "stop", 0)
    rollout = Rollout(problem, "1 2=3:", (1,), completion, "1+2[bold]", Grade(1.0, True, "correct"))
    return StepReport(step, record, rollout if step else None)


def shown(terminal, reports, steps, folder=Path("runs/r"), first_step=0):
    """Return what the view of a run prints until the end of the run."""
    out = io.StringIO()
    view = TrainView(Console(file=out, force_terminal=terminal, width=100), Path("runs"))
    view.phase("load")
    view.start(RunInfo(folder, TRACKED, {}, steps, first_step, (), None))
    for item in reports:
        view.step(item)
    view.phase("close")
    view.end(RunResult(folder, "FINISHED", []))
    return out.getvalue()


def test_output_to_a_file_is_few_plain_lines():
    text = shown(False, [report(step, evaluated=step in (0, 200)) for step in range(201)], steps=200)
    assert "\x1b" not in text
    assert 15 <= len(text.splitlines()) <= 30
    assert "step 200/200" in text
    assert "held-out mean@16 0.312" in text


def test_a_file_gets_a_line_per_minute_of_slow_steps_and_one_before_the_first_evaluation():
    reports = [report(step) for step in range(1, 8)]
    for item in reports:
        item.record["time/step"] = 31.0
    text = shown(False, reports, steps=200)
    assert re.findall(r"step +(\d+)/200", text) == ["2", "4", "6"]
    out = io.StringIO()
    view = TrainView(Console(file=out, width=100), Path("runs"))
    view.start(RunInfo(Path("runs/r"), TRACKED, {}, 200, 0, (), None))
    view.phase("eval")
    view.step(report(0, evaluated=True))
    view.phase("eval")
    assert out.getvalue().count("evaluating the policy before the first step") == 1


def test_a_terminal_shows_one_panel_with_curves_and_the_tokens_per_second_of_the_last_step():
    reports = [report(step, evaluated=step in (0, 5)) for step in range(6)]
    for step, sampled in ((1, 1000.0), (5, 12345.6)):
        rates = {"perf/sampled_tokens_per_s": sampled, "perf/trained_tokens_per_s": 2 * sampled}
        reports[step].record.update(rates)
    text = shown(True, reports, steps=5)
    last = text.split("╭")[-1]
    assert re.search(r"tokens per second +12,346 sampled +24,691 trained", last)
    assert "writing the plots, finishing the record in MLflow" in text
    held_out = ("held-out before", "held-out now")
    for part in ("accuracy", "entropy", "clip fraction", "5/5", *held_out, "1+2[bold]", "correct"):
        assert part in last


CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class StateView(ExperimentView):
    state = "first"

    def render(self) -> Panel:
        return Panel(self.state)


def test_the_cursor_is_below_a_live_display_until_its_end():
    """At the end of a full line, the ^C that a terminal writes would begin a new line and so move the display."""
    out = io.StringIO()
    view = StateView(Console(file=out, force_terminal=True, width=20))
    view.show_progress()
    assert CONTROL.sub("", out.getvalue()).endswith("╯\n")
    view.state = "last"
    view.stop_progress()
    final = CONTROL.sub("", out.getvalue())
    assert final.endswith(f"│ {'last':<16} │\n╰{'─' * 18}╯\n")
    up = "\x1b[1A"
    assert out.getvalue().count(up) == 3, "three lines of the panel are above the empty one"


def test_a_signal_is_shown_within_the_panel(capfd):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with StopSignals() as signals:
        view = TrainView(console, Path("runs"), signals)
        view.start(RunInfo(Path("runs/r"), TRACKED, {}, 3, 0, (), None))
        signals.start(None)
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 60
        while "stopping after this step" not in out.getvalue():  # drawn by the thread of the display
            assert time.monotonic() < deadline
            time.sleep(0.01)
        out.truncate(0)
        view.phase("close")
        assert "stopping after" not in out.getvalue(), "the final state"
        assert capfd.readouterr().err == ""
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        view.end(RunResult(Path("runs/r"), "KILLED", []))
    assert "stopped" in capfd.readouterr().err
    assert "stopped by SIGTERM before the first step" in out.getvalue()


def test_a_resumed_run_shows_its_earlier_steps(tmp_path):
    """Values that were not finite are null in metrics.jsonl. The time left counts from the first new step."""
    folder = RunFolder(tmp_path)
    for step in range(41):
        record = dict(report(step, evaluated=step in (0, 40)).record)
        if step == 7:
            lost = {"train/entropy": math.nan, "clip/active_fraction": math.inf}
            record |= lost | {"optim/skipped_updates": 2}
        folder.append_metrics(record)
    text = CONTROL.sub("", shown(True, [], 60, tmp_path, first_step=41)).split("╭")[-1]
    assert "40/60" in text
    curve = sparkline([0.25 + n / 1000 for n in range(1, 41)])
    assert re.search(rf"training accuracy +0\.290 +{curve}", text)
    assert re.search(r"updates skipped +2", text)
    assert re.search(r"held-out before +step 0 ", text)
    assert re.search(r"held-out now +step 40 ", text)
    assert "left -:--:--" in text


def test_the_accuracy_of_a_sweep_is_held_out_where_its_runs_evaluate():
    runs = [SweepRun("r", "kl", 0), SweepRun("s", "clip", 0)]
    trained = RunState("running", 3, 10, score=0.7)
    evaluated = RunState("running", 3, 10, score=0.25, evaluations={0: 0.2, 3: 0.25})

    def table(**states: RunState) -> str:
        return output_of(Console.print, variants_table(runs, states), width=120)

    assert "held-out accuracy" in table(r=trained, s=evaluated)
    assert "0.700" not in table(r=trained, s=evaluated)
    assert "training accuracy" in table(r=trained, s=trained)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_step_whose_updates_were_all_skipped_is_shown(terminal):
    """Its record has no clip metrics, and its entropy is NaN if the policy is broken."""
    skipped = report(2)
    del skipped.record["clip/active_fraction"]
    skipped.record.update({"train/entropy": math.nan, "optim/skipped_updates": 4})
    assert re.search(r"updates skipped +4", shown(terminal, [report(1), skipped], 2))


def test_sparklines_span_their_range():
    assert sparkline([]) == ""
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert len(sparkline([float(i) for i in range(1000)], width=40)) == 40


def test_eval_metrics_are_formatted_with_at_signs():
    assert eval_metrics_text({"eval/countdown/mean_at_16": 0.25, "train/reward": 1.0}) == "mean@16 0.250"
    assert eval_metrics_text({"train/reward": 1.0}) == ""
    two_sets = {"eval/aime24/mean_at_32": 0.1, "eval/aime24/pass_at_32": 0.5, "eval/amc23/mean_at_32": 0.25}
    assert eval_metrics_text(two_sets) == "aime24: mean@32 0.100 · pass@32 0.500  amc23: mean@32 0.250"


def test_rewards_other_than_0_and_1_come_before_the_accuracy():
    """The panel shows the reward from the first step that has one; the evaluation before training has none yet.

    Rewards of a scale may never reach 1: an accuracy appears once a completion is correct.
    """
    scores = {"eval/countdown/mean_at_16": 0.0, "eval/countdown/reward": 0.0}
    reports = [report(0), report(1), report(2)]
    reports[0].record.update(scores)
    for step in (1, 2):
        reports[step].record.update({"train/reward": 0.125 * step, "train/accuracy": 0.0625 * (step - 1)})
    rollout = reports[2].sample
    reports[2] = replace(reports[2], sample=replace(rollout, grade=Grade(0.25, False, "wrong")))
    reports[2].record.update(scores | {"eval/countdown/reward": 0.5})
    lines = shown(False, reports, steps=2).splitlines()
    assert "step 0/2  held-out mean@16 0.000" in lines
    assert any(line.startswith("step 1/2  reward 0.125  entropy") for line in lines)
    assert any(line.startswith("step 2/2  reward 0.250  training accuracy 0.062  entropy") for line in lines)
    assert lines[-1].endswith("s/step  held-out reward 0.500")
    panel = shown(True, reports, steps=2).split("╭")[-1]
    assert re.search(r"reward +0.250 .*\n.*training accuracy +0.062 ", panel)
    assert "accuracy" not in shown(True, reports[:2], steps=2).split("╭")[-1]
    assert re.search(r"reward 0.250, \S*wrong", panel)
    assert "reward" not in shown(True, [report(0), report(1)], steps=1)
    result = RunResult(Path("runs/r"), "FINISHED", [item.record for item in reports])
    text = output_of(print_summary, resolve([{"tracking": {"mlflow": False}}]), result)
    assert re.search(r"reward +0.125 → 0.250\n.*training +accuracy 0.000 → 0.062", text)


def test_the_summary_has_the_phases_of_all_steps_also_those_before_a_resume():
    first = {"step": 1, "time/step": 6.0, "time/sample": 4.0, "time/update": 2.0, "time/total": 6.0}
    second = {"step": 2, "time/step": 4.0, "time/sample": 2.0, "time/update": 1.0, "time/total": 9.0}
    second |= {"time/sync": 0.01}
    before = {"step": 0, "time/step": 2.0, "time/eval": 2.0}
    result = RunResult(Path("runs/r"), "FINISHED", [before, first, second])
    text = output_of(print_summary, resolve([{"tracking": {"mlflow": False}}]), result, width=80)
    expected = "sampling 50% (3 s) · updates 25% (1.5 s) · evaluation 17% (1 s) other 8% (0.5 s)"
    assert f"a step {expected}" in " ".join(text.split())
    assert phases_text({"time/step": 2.0, "time/eval": 2.0}, 0) == "", "no step trained"


def test_no_line_of_a_terminal_ends_between_a_number_and_its_unit():
    quantities = ("1% (0.49 s)", "≤ 8 tokens", "T = 1", "64 prompts", "× 16 = 1,024 completions")
    text = "grading 1% (0.49 s), answers of ≤ 8 tokens, T = 1, 64 prompts × 16 = 1,024 completions"
    for width in range(40, 100):
        out = io.StringIO()
        Console(file=out, width=width, force_terminal=True, color_system=None).print_line(text, "a")
        assert all(quantity in out.getvalue() for quantity in quantities)
        assert max(map(len, out.getvalue().splitlines())) <= width


def test_shares_of_completions_that_are_flagged():
    assert flagged_shares({"grade/malformed_fraction": 0.1, "train/truncated_fraction": 0.2}) == ""
    record = {"grade/malformed_fraction": 0.5, "grade/timeout_fraction": 0.002, "grade/error_fraction": 0.01}
    expected = "50.0% without a readable answer, 0.2% timed out, 1.0% grader errors"
    assert flagged_shares(record) == expected
    assert flagged_shares(record | {"train/truncated_fraction": 0.875}) == f"{expected}, 87.5% truncated"


def test_the_settings_has_batch_sizes_and_rollouts_ahead():
    config = resolve([{"sampling": {"max_lag": 1}}])
    assert dict(settings_rows(config, build_task(config.task)))["sampling"].startswith("one step ahead")
    text = " ".join(text for _, text in settings_rows(RunConfig(), build_task(RunConfig().task)))
    sizes = ("64 prompts × 16 = 1,024 completions", "≤ 8,192 tokens", "4 updates of 256", "400 updates")
    for part in (*sizes, "102,400", "128 held-out problems, 16 completions per problem"):
        assert part in text


def test_names_with_square_brackets_are_printed_unchanged():
    """Files, variants and evaluation sets are named by the user; Rich would read `[/b]` as markup and raise."""
    name = "a [/b] [red]b :smile:"
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, color_system=None)
    runs = [SweepRun("r", name, 0)]
    console.print_settings([("model", name)], [name], [name])
    console.print(plan_table(SweepInfo(None, runs, {"r": RunConfig()}, (), 1, 1)))
    console.print(variants_table(runs, {"r": RunState("waiting", 0, 1)}))
    view = StateView(console)
    view.spin(name)
    view.spin(None)
    assert out.getvalue().count(name) >= 6
    record = {"step": 0, "eval/[/b]/mean_at_4": 0.5, "eval/c/mean_at_4": 0.5}
    for terminal in (False, True):
        assert "[/b]: mean@4 0.500" in shown(terminal, [StepReport(0, record, None)], 1)


def test_the_time_left_of_a_sweep_is_not_shorter_than_that_of_its_slowest_run():
    done = RunState("finished", 10, 10)
    slow = RunState("running", 5, 10, seconds_left=100.0)
    fast = RunState("running", 5, 10, seconds_left=50.0)
    waiting = RunState("waiting", 0, 10)
    assert seconds_left({"a": done, "b": waiting}, 2) is None
    assert seconds_left({"a": done, "b": slow}, 4) == 100.0
    assert seconds_left({"a": slow, "b": fast}, 2) == 100.0
    # 20 waiting and 10 running steps of 15 s, in two slots.
    assert seconds_left({"a": slow, "b": fast, "c": waiting, "d": waiting}, 2) == 225.0


def _printed(ups: int, downs: int, ties: int) -> str:
    """Return the printed comparison of two evaluations with that many problems up, down and equal."""

    def record(values):
        shares = {f"id{i}": {"mean_at_4": value} for i, value in enumerate(values)}
        questions = {f"id{i}": f"What is {i}+{i}?" for i in range(len(values))}
        return {"sets": {"s": {"by_problem": shares, "questions": questions}}}

    values = [0.75] * ups + [0.0] * downs + [0.5] * ties
    sets = compare_records(record([0.5] * len(values)), record(values))
    result = ComparisonResult(Path("a"), Path("b"), {}, sets)
    return output_of(print_comparison, result, 1, width=200)


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ((4, 1, 3), "problems that differ: 5, p = 0.375; with fewer than 6 it cannot be below 0.05"),
        ((7, 1, 0), "problems that differ: 8, p = 0.070; with so few, the 95% interval is approximate"),
        ((30, 2, 9), "problems that differ: 32, p < 0.001\n"),
        ((0, 0, 4), None),
    ],
)
def test_a_comparison_counts_problems_and_tests_signs(counts, line):
    up, down, same = counts
    text = _printed(*counts)
    assert f"higher in B on {up} problems, lower on {down}, the same on {same}" in text
    assert "sign test" not in text if line is None else f"exact sign test, {line}" in text
    assert ("→" in text) == bool(up + down)
    if up or down:
        place = up if down else 0  # the largest change comes first
        assert f"  What is {place}+{place}?  (id{place})\n" in text


def test_answers_without_a_verdict_are_counted_with_the_accuracy_they_could_add():
    """Problems of 2 and 4 completions have equal weights: (0 + 1/2)/2 of them correct, at most (1/2 + 3/4)/2."""
    verdicts = {"p": ["wrong", "timeout"], "q": ["correct", "correct", "grader-error", "wrong"], "r": []}

    def lines(of: str) -> str:
        rows = [row(name, None, verdict) for name in of for verdict in verdicts[name]]
        return ungraded_line(score("set", rows, (1,)))

    line = "2 of 6 answers were not graded (1 grader-error, 1 timeout) and count as not correct; "
    assert lines("pq") == line + "with all of them correct, mean@n would be 0.625 instead of 0.250"
    verdicts["r"] = ["wrong", "malformed"]
    assert lines("r") == ""


def test_the_scores_of_rewards_other_than_0_and_1_and_of_an_evaluation_without_grades():
    def printed(*rows: EvalRow) -> str:
        return output_of(print_scores, {"set": score("set", rows, (1,))}, width=200)

    nonbinary = printed(row("p", None, "wrong", reward=0.5), row("q", None, "not-applicable"))
    assert re.search(r"mean +95% interval\nreward +0.250 .*\nmean@1 +0.000 ", nonbinary)
    assert "1 of 2 answers were not graded (1 not-applicable) and count as not correct and as a" in nonbinary
    assert "reward" not in printed(row("p", None, "wrong", reward=0.0), row("q", None, "correct", reward=1.0))
    ungraded = printed(row("p", None, "not-applicable"), row("q", None, "timeout"))
    assert "no answer was graded (1 not-applicable, 1 timeout): there is no accuracy and no" in ungraded
    assert "mean@1" not in ungraded


@pytest.mark.parametrize(
    ("fewest", "most", "shares", "title", "lines"),
    [
        (4, 4, [0.0, 0.25, 0.25, 1.0], "number of correct completions, of 4",
         {"never": "1", "1": "2", "2": "·", "3": "·", "always": "1"}),
        (1, 1, [0.0, 1.0, 1.0], "result of the only completion", {"wrong": "1", "correct": "2"}),
        (2, 5, [0.2, 0.5], "share of correct completions", None),
    ],
)  # fmt: skip
def test_the_histogram_of_problems(fewest, most, shares, title, lines):
    by_problem = {str(i): {f"mean_at_{fewest}": share} for i, share in enumerate(shares)}
    first, *others = (line.plain for line in histogram(Scores(fewest, most, {}, by_problem, {})))
    assert first == f"problems by {title}"
    assert len(others) == (12 if lines is None else len(lines))
    assert lines is None or {line.split()[0]: line.split()[-1] for line in others} == lines


def test_steps_and_evaluations_in_an_outage_of_the_judge_have_no_accuracy(tmp_path):
    """Without a verdict there is none; answers that the judge alone did not grade have one."""
    records = [
        {"step": step, "time/step": 1.0, "train/accuracy": accuracy, "train/entropy": entropy}
        for step, accuracy, entropy in ((1, 0.3125, 1.0), (2, 0.25, 1.1), (3, 0.0, 1.2))
    ]
    records[0]["eval/a/mean_at_4"] = 0.25
    records[1]["train/ungraded_fraction"] = 1
    records[2] |= {"grade/error_fraction": 0.75, "grade/timeout_fraction": 0.25}
    records[2] |= {"train/truncated_fraction": 0.0, "eval/a/mean_at_4": 0.0, "eval/a/grader_error_rate": 1.0}
    text = output_of(print_summary, RunConfig(), RunResult(tmp_path, "FINISHED", records))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "training accuracy 0.312 → 0.250", "not graded the answers of 1 of 3 steps, which have no accuracy",
        "step 3 mean@4 not graded", "entropy 1.000 → 1.200 nats per token",
    ):  # fmt: skip
        assert line in lines
