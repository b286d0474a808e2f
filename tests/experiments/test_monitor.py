"""Criteria of `stop`: the steps that count, the run that they end, its resume, and several ranks."""

import logging
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bandpo_cli.callbacks import CallbackBase, RunResult, StepReport
from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import RunError, UserError
from bandpo_cli.experiments import fork, resume, train
from bandpo_cli.experiments.monitor import StepMonitor, stop_reason
from bandpo_cli.experiments.record import close_record
from bandpo_cli.metric_names import AXES
from bandpo_cli.processes.ranks import Ranks
from bandpo_cli.reports import run_plots
from bandpo_cli.results import describe_line
from bandpo_cli.storage.checkpoints import complete_checkpoints
from bandpo_cli.storage.run_folder import RunFolder
from tests.cli.train_runs import record, summary
from tests.experiments import test_api
from tests.training.several_ranks import run_ranks

LOW, HIGH = 0.05, 0.5
COUNTS: list[tuple[str, list[float | None], int]] = [
    ("entropy_below", [LOW, LOW], 2),
    ("entropy_below", [HIGH, LOW, LOW, LOW], 3),
    ("entropy_below", [LOW, HIGH, LOW], 1),
    ("entropy_below", [LOW, LOW, HIGH], 0),
    ("entropy_below", [LOW, 0.1], 0),  # the limit itself does not count
    ("entropy_below", [LOW, None, LOW], 1),  # not finite
    ("gap_above", [HIGH, LOW, HIGH, HIGH], 2),
    ("gap_above", [0.1], 0),
    ("truncation_above", [HIGH, HIGH, HIGH, HIGH], 4),
]
METRICS = {
    "entropy_below": "train/entropy",
    "gap_above": "sampler/logprob_gap_mean",
    "truncation_above": "train/truncated_fraction",
}


@pytest.mark.parametrize(("limit", "values", "count"), COUNTS)
def test_consecutive_steps_beyond_a_limit_are_counted(limit, values, count):
    """The run ends exactly if `stop.steps` is at most the count by hand, and a warning comes at half of it."""
    records = [{"step": step, METRICS[limit]: value} for step, value in enumerate(values, 1)]
    for steps in range(1, 8):
        config = resolve([{"stop": {limit: 0.1, "steps": steps}}])
        monitor = StepMonitor(config, records[:-1])
        warnings = monitor.add(StepReport(len(records), records[-1], None))
        reason = stop_reason(config, records)
        assert (monitor.is_over(), monitor.reason is None) == (reason is not None, reason is None)
        assert (reason is not None) == (count >= steps)
        assert len(warnings) == (count < steps and count in (steps / 2, (steps + 1) / 2))
        for line in filter(None, [reason, *warnings]):
            assert line.startswith(f"stop.{limit} = 0.1: {METRICS[limit]} was ")
    assert stop_reason(config, []) is None
    last = [*records, {"step": 100, METRICS[limit]: values[-1]}]
    assert stop_reason(resolve([{"stop": {limit: 0.1, "steps": 1}}]), last) is None, "all steps are done"
    assert stop_reason(resolve([{"stop": {"steps": 1}}]), records) is None, "there is no limit"


SMALL = {**test_api.SMALL, "steps": 5, "checkpoint": {"every": 2, "keep_last": None}}
STOP = {"stop": {"entropy_below": 10.0, "steps": 3}}
"""The entropy of the bundled model is never above 10 nats."""


@pytest.mark.parametrize("status", ["FINISHED", "KILLED", "FAILED"])
def test_only_a_finished_run_was_ended_by_a_criterion(status, tmp_path, monkeypatch):
    """Also one whose process ended before the summary; a run that was stopped in such a step would continue."""
    monkeypatch.setattr(run_plots, "plot_run", lambda path: None)
    folder = RunFolder.create(tmp_path, "a")
    for step in range(4):
        folder.append_metrics({"step": step, "time/step": 1.0, "train/entropy": 0.5})
    error = RunError("no memory") if status == "FAILED" else None
    end = RunResult(folder.path, status, [], error)
    result = close_record(resolve([SMALL, STOP]), folder, mock.Mock(), end)
    assert (result.stopped_by is not None) == (status == "FINISHED")
    assert summary(folder.path)["stopped_by"] == result.stopped_by


def test_a_step_whose_tokens_are_all_masked_is_warned_of_once():
    """The updates with an advantage may be those that were skipped."""
    trained = {"step": 1, "train/uniform_group_fraction": 0.5, "optim/skipped_updates": 0.0}
    masked = {**trained, "sampler/importance_masked_fraction": 1.0}
    skipped = {**trained, "optim/skipped_updates": 1.0}
    records = [{**trained, "gradient/zero_fraction": 0.9}, {"step": 2}, skipped, masked, masked]
    monitor = StepMonitor(resolve([]), [])
    warnings = [monitor.add(StepReport(number, line, None)) for number, line in enumerate(records)]
    assert [len(lines) for lines in warnings] == [0, 0, 0, 1, 0]
    assert "sampler/importance_masked_fraction 1" in warnings[3][0]


@pytest.mark.slow
def test_a_criterion_ends_a_run_which_resumes_with_another_limit(tmp_path, caplog):
    """It ends after step 3 with a checkpoint, also if it was killed after step 2, and is the start of the full run."""
    caplog.set_level(logging.WARNING, "bandpo_cli")
    full = train(resolve([SMALL]), tmp_path, "full")
    caplog.clear()
    result = train(resolve([SMALL, STOP]), tmp_path, "early")
    assert result.status == "FINISHED"
    assert record(result.folder) == record(full.folder)[:4]
    assert sorted(complete_checkpoints(RunFolder(result.folder)).complete) == [2, 3]
    reason = summary(result.folder)["stopped_by"]
    assert reason.startswith("stop.entropy_below = 10: train/entropy was below it in each of the last 3 step")
    entropy = record(result.folder)[2]["train/entropy"]
    warning = (
        "stop.entropy_below = 10: train/entropy was below it in each of the last 2 steps, most recently "
    )
    warning += f"{entropy:.3g} nats; the run ends after 3 such steps"
    assert caplog.messages == [warning, f"the run ends after step 3 of 5: {reason}"]
    assert describe_line(result.folder, tmp_path).stopped_by == reason
    assert summary(full.folder)["stopped_by"] is None

    killed = Path(shutil.copytree(result.folder, tmp_path / "killed"))
    (killed / "summary.json").unlink()
    shutil.rmtree(killed / "checkpoints" / "step-000003")
    assert resume("killed", tmp_path).status == "FINISHED"
    assert (summary(killed)["stopped_by"], record(killed)) == (reason, record(result.folder))

    with pytest.raises(UserError, match=r"has ended: stop\.entropy_below .* --set stop\.entropy_below=null$"):
        resume("early", tmp_path)
    with pytest.raises(UserError, match=r"early@3: the fork ends at once: .* stop\.entropy_below=null$"):
        fork("early", tmp_path)
    resumed = resume("early", tmp_path, [{"stop": {"entropy_below": None}}])
    assert record(resumed.folder) == record(full.folder)
    assert (resumed.status, summary(resumed.folder)["stopped_by"]) == ("FINISHED", None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tokens", "flops"])
def test_the_step_that_reaches_a_budget_is_the_last_with_evaluation_and_checkpoint(tmp_path, name):
    """Step 3 is neither due for an evaluation nor for a checkpoint; a resume without the budget is the full run."""
    full = record(train(resolve([SMALL]), tmp_path, "full").folder)
    metric = AXES[name].key
    budget = full[3][metric] if name == "flops" else full[2][metric] + 1
    result = train(resolve([SMALL, {"stop": {name: budget}}]), tmp_path, "early")
    ended = record(result.folder)
    assert (result.status, [line["step"] for line in ended]) == ("FINISHED", [0, 1, 2, 3])
    assert {key: ended[3][key] for key in full[3]} == full[3]
    evaluated = [key for key in full[2] if key.startswith("eval/")]
    assert [key for key in ended[3] if key not in full[3]] == evaluated
    assert sorted(complete_checkpoints(RunFolder(result.folder)).complete) == [2, 3]
    assert (result.folder / "token_values" / "step-000003.parquet").exists()
    reason = summary(result.folder)["stopped_by"]
    assert reason == f"stop.{name} = {budget:g}: the run has taken {full[3][metric]:.6g} ({metric})"
    with pytest.raises(UserError, match=f"has ended: stop.{name} = .*; to continue: .* stop.{name}=null"):
        resume("early", tmp_path)
    resumed = resume("early", tmp_path, settings=[{"stop": {name: None}}])
    assert record(resumed.folder)[4:] == full[4:]


def test_a_budget_is_compared_with_the_totals_unless_all_steps_are_done():
    config = resolve([{"stop": {"tokens": 5}}])
    assert stop_reason(config, [{"step": 1, "compute/sampled_tokens": 4}]) is None
    assert stop_reason(config, [{"step": 1, "compute/sampled_tokens": 5}]) is not None
    assert stop_reason(config, [{"step": 100, "compute/sampled_tokens": 5}]) is None, "all steps are done"


class StopsOnRankOne(CallbackBase):
    """Ends a run after step 1, on rank 1."""

    on_every_rank = True

    def __init__(self, ranks: Ranks) -> None:
        self.rank = ranks.rank

    def step(self, report: StepReport) -> None:
        if (self.rank, report.step) == (1, 1):
            report.stop("rank 1")


def on_ranks(ranks: Ranks, folder: Path, settings: dict[str, Any]) -> tuple[str, str, list[int]]:
    """Train and return the status, the reason and the steps that this rank reports."""
    connected = "bandpo_cli.experiments.run.connected_ranks"
    with mock.patch(connected, return_value=nullcontext(ranks)):
        result = train([SMALL, settings], folder, "r", [] if settings else [StopsOnRankOne(ranks)])
    return result.status, str(result.stopped_by)[:8], [line["step"] for line in result.records]


@pytest.mark.slow
def test_all_ranks_end_after_the_same_step(tmp_path):
    expected = ("FINISHED", "stop.ent", [0, 1, 2, 3])
    assert run_ranks(2, tmp_path / "a", on_ranks, tmp_path / "a-runs", STOP) == [expected] * 2
    expected = ("FINISHED", "rank 1", [0, 1])
    assert run_ranks(2, tmp_path / "b", on_ranks, tmp_path / "b-runs", {}) == [expected] * 2
