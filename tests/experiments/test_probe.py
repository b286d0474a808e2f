"""Advice where nothing can be learned, and the probe of a run that is not trained."""

import re
from unittest import mock

import pytest

from bandpo_cli.callbacks import StepReport
from bandpo_cli.cli.preview import clipping_text, time_text
from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.experiments import train
from bandpo_cli.experiments.monitor import StepMonitor, advice, destroyed_policy
from bandpo_cli.experiments.plan import plan_training
from bandpo_cli.experiments.trials import ProbeReport, probe
from tests.cli.eval_command import succeed
from tests.cli.train_runs import SMALL as SMALL_FLAGS
from tests.experiments.test_api import SMALL

DATA = {"model": {"path": "org/none"}, "task": {"name": "gsm8k"}}
PLAIN = {**DATA, "task": {"name": "gsm8k", "template": "plain", "grader": "gsm8k"}}
DYNAMIC = {**DATA, "sampling": {"dynamic": True}}
BURST = {"clip/active_fraction": 0.45, "ratio/max": 5000.0}


def metrics(accuracy=0.5, useful=0.6, truncated=0, unreadable=0, ungraded=0):
    return {
        "train/accuracy": accuracy,
        "train/reward": accuracy,
        "train/uniform_group_fraction": 1 - useful,
        "train/truncated_fraction": truncated,
        "grade/malformed_fraction": unreadable,
        "train/ungraded_fraction": ungraded,
    }


@pytest.mark.parametrize(
    ("layer", "record", "parts"),
    [
        (DATA, metrics(), []),
        (DATA, metrics(0, 0), ["solves sometimes|partial credit|--set sampling.samples=32, since 0.0%"]),
        (DATA, metrics(0.5, 0), ["solves sometimes"]),
        (DATA, metrics(1, 0), ["harder problems, since 100.0%"]),
        (DATA, metrics(0.02, 0.1), ["sampling.samples=32", "sampling.dynamic=true|only 10.0% of the groups"]),
        (DATA, metrics(0, 0, truncated=1), ["--max-tokens 2048, since 100.0%|truncated at 1,024 tokens"]),
        (DATA, metrics(0, 0, unreadable=0.9), ["to the form that the prompt asks for|--grader, since 90.0%"]),
        (PLAIN, metrics(0, 0, unreadable=0.9), ["--template hashes, which asks|--grader, since 90.0%"]),
        (DYNAMIC, metrics(0.5, 0.1), ["solves sometimes"]),
        (DATA, {**metrics(0, 0, truncated=1), **BURST}, ["lower optim.lr (1e-06)|to --lr 1e-07|5,000; 45%"]),
        (DATA, metrics(0, 0, ungraded=0.5), ["a repaired grader, since 50.0%"]),
        (
            DATA,
            {**metrics(0, 0, truncated=1, ungraded=1), "grade/timeout_fraction": 1.0},
            ["a longer grading.deadline|imports at the top of the file|since 100.0%", "--max-tokens 2048"],
        ),
        (DATA, {**metrics(), "clip/active_fraction": 0.5}, ["--lr 5e-07, since 50.0%"]),
        ({}, metrics(0, 0, 0.5, 0.9), ["--max-tokens 256|at 8 tokens", "another --task, since 90.0%"]),
    ],
)
def test_advice_names_settings_with_their_reasons(layer, record, parts):
    lines = advice(resolve([layer]), record)
    assert len(lines) == len(parts)
    for line, words in zip(lines, parts, strict=True):
        assert all(word in line for word in words.split("|")), line


@pytest.mark.parametrize(
    ("entropies", "step"),
    [
        ((1.5, 1.4, 0.02, 0.01), 2),
        ((1.5, 9.1), 1),
        ((1.5, 0.5, 0.2, 0.06, 0.03), None),
        ((0.05, 0.001), None),
        ((0.6, 1.5, 2.9), None),
        ((1.5, None, 0.02), None),
    ],
)
def test_a_destroyed_policy_is_the_cause_of_all_that_follows(entropies, step):
    """A slow fall of the entropy, or of that of a nearly deterministic policy, has other causes."""
    config, lines = resolve([{"optim": {"lr": 1}}]), list[str]()
    monitor, sample = StepMonitor(config, ()), mock.Mock(text="a")
    records = [
        {"step": number, **metrics(0, 0, truncated=1), "train/entropy": entropy}
        for number, entropy in enumerate([*entropies, *[entropies[-1]] * 3], start=1)
    ]
    for record in records:
        lines += monitor.add(StepReport(record["step"], record, sample))
    cause = destroyed_policy(config, records)
    assert (cause is None) == (step is None)
    if step is not None:
        before, after = entropies[step - 1 : step + 1]
        assert "lower optim.lr (1), for example to --lr 5e-05" in str(cause)
        assert f"in step {step}, entropy {before:.3f} → {after:.3f}" in str(cause)
        assert cause in lines
        assert "try: " not in "".join(lines)
    else:
        assert "try: --max-tokens 256" in "".join(lines)


def test_a_run_warns_once_after_three_steps_without_a_gradient():
    monitor, sample = StepMonitor(RunConfig(), ()), mock.Mock(text="the\nanswer " * 50)
    lines = monitor.add(StepReport(0, {"step": 0}, None))
    for step, useful in enumerate((0, 0, 0.1, 0, 0, 0, 0, 0, 0, 0), start=1):
        lines += monitor.add(StepReport(step, {"step": step, **metrics(0, useful, truncated=1)}, sample))
        assert len(lines) == (step >= 6)
    for part in ("in the last 3 steps", "100.0% truncated", "the answer the", "try: --max-tokens 256, since"):
        assert part in lines[0]
    assert "\n" not in lines[0]


def test_a_run_warns_once_when_no_completion_calls_a_tool():
    config = resolve([{"task": {"name": "calculator"}}])
    monitor, sample = StepMonitor(config, ()), mock.Mock(text='```json\n{"name": "calculate"}\n```')
    lines: list[str] = []
    for step, calls in enumerate((0.5, 0, 0), start=1):
        record = {"step": step, **metrics(), "conversation/calls": calls}
        assert len(advice(config, record)) == (calls == 0)
        lines += monitor.add(StepReport(step, record, sample))
        assert len(lines) == (step >= 2)
    assert 'of step 2 called a tool; one of them: \'```json {"name": "calculate"} ```\'' in lines[0]


@pytest.mark.slow
def test_a_probe_has_the_metrics_of_a_first_step_and_writes_nothing(tmp_path):
    whole = {"sampling": {"prompts": 32, "samples": 4}, "evaluation": {"every": 0}, "steps": 1}
    config = resolve([SMALL, whole, {"optim": {"updates": 2, "warmup_steps": 5}}])
    report = probe(plan_training(config, tmp_path))
    assert not list(tmp_path.iterdir())
    (record,) = train(config, tmp_path, "a").records
    sampled = [key for key in report.metrics if key.startswith(("train/", "grade/"))]
    assert len(sampled) >= 9
    assert [report.metrics[key] for key in sampled] == [record[key] for key in sampled]
    assert report.trial_groups == 32
    assert report.metrics["optim/lr"] == config.optim.lr
    assert report.metrics["ratio/max"] > 1
    assert report.update_seconds is not None
    assert report.run_seconds == pytest.approx(report.sample_seconds + report.update_seconds)


@pytest.mark.parametrize(
    ("every", "updates", "expected", "clipping"),
    [
        (5, 2.0,
         r"about 7\.0 s per step \(.* 5\.0 s, updates 2\.0 s\), 0:00:21 for 3 steps with their evaluations",
         "its updates were skipped, because the gradient overflows in float16"),
        (0, None,
         r"about 5\.0 s per step for .* alone, 0:00:21 for 3 steps without the updates; .* not measured, .*",
         "no group has different rewards, so no token has a gradient"),
    ],
)  # fmt: skip
def test_updates_that_were_not_measured_have_no_time_and_no_clipping(every, updates, expected, clipping):
    config = resolve([{"steps": 3, "evaluation": {"every": every}}])
    report = ProbeReport([], {}, 4, 5.0, updates, 21.0)
    assert re.fullmatch(expected, time_text(config, report))
    assert clipping_text(config, report) == f"not measured: {clipping}"


@pytest.mark.slow
def test_probe_from_the_command_line(tmp_path):
    printed = succeed("train", *SMALL_FLAGS, "--probe", "--probe-size", "9", cwd=tmp_path).out
    for part in (
        "probe       4 of 8 problems sampled, about 0:00:0", "left, then a trial step",
        "8 problems × 4 = 32 completions of the untrained model", "pass rate", "have different rewards", "truncated",
        "in a trial step of 2 updates on 8 groups", "s per step", "a sample", "GiB at the peak",
    ):  # fmt: skip
        assert part in printed
    assert not list(tmp_path.iterdir())
