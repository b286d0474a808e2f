"""Profiler traces of training runs."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from bandpo_cli.callbacks import RunInfo, StepReport
from bandpo_cli.cli.train_view import print_profile
from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import UserError
from bandpo_cli.experiments.monitor import PhaseTime, ProfileCallback, check_profile_steps
from bandpo_cli.experiments.run import train
from bandpo_cli.metric_names import without_clock
from bandpo_cli.training.performance import StepTimer
from tests.conftest import output_of
from tests.experiments.test_api import SMALL

RUN: list[Any] = [
    SMALL,
    {"steps": 2, "sampling": {"max_tokens": 3}, "optim": {"updates": 2}},
    {"evaluation": {"every": 50, "samples": 1, "k": [1]}, "checkpoint": {"every": 0}},
]


def test_the_evaluation_and_the_first_trained_step_are_not_traced(tmp_path):
    callback = ProfileCallback(1)
    callback.start(RunInfo(tmp_path, {}, {}, 3, 0, (), None))
    for step in range(4):
        with StepTimer(lambda phase: None).phase(f"of step {step}"):
            torch.ones(3).sum()
        callback.step(StepReport(step, {"time/step": 0.25 * step}, None))
    assert (callback.steps, callback.seconds, [*callback.phases]) == ([2], 0.5, ["of step 2"])
    trace = gzip.decompress(callback.trace.read_bytes()).decode()
    assert [name for name in ("of step 1", "of step 2", "of step 3") if name in trace] == ["of step 2"]


@pytest.mark.slow
def test_a_profile_changes_no_number_and_has_the_phases_after_the_first_step(tmp_path):
    """The labels are counted in the trace, and the record measures with another clock."""
    profile = ProfileCallback(5)  # the run ends early, and has the trace of the steps until then
    traced = train(resolve(RUN), tmp_path, "traced", [profile])
    plain = train(resolve(RUN), tmp_path, "plain")
    assert [*map(without_clock, traced.records)] == [*map(without_clock, plain.records)]
    name = "checkpoints/step-000002/model.safetensors"
    assert (traced.folder / name).read_bytes() == (plain.folder / name).read_bytes()
    assert not (plain.folder / "profile").exists()

    assert (profile.trace.name, profile.steps) == ("step-000002.json.gz", [2])
    events = json.loads(gzip.decompress(profile.trace.read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    labels = Counter(name.removeprefix("bandpo/") for name in names if "bandpo/" in name)
    phases = dict.fromkeys("sample grade logprobs update sync record eval checkpoint".split(), 1)  # noqa: SIM905
    parts = dict.fromkeys(("forward", "backward", "optimizer"), 2)
    assert labels == phases | parts
    calls = {key: phase.calls for key, phase in profile.phases.items()}
    assert calls == phases | {f"update/{name}": number for name, number in parts.items()}
    assert profile.seconds == traced.records[-1]["time/step"]
    measured = traced.records[-1]["time/update"]
    assert profile.phases["update"].seconds == pytest.approx(measured, rel=0.2, abs=0.1)
    assert sum(profile.phases[f"update/{name}"].seconds for name in parts) <= profile.phases["update"].seconds


def test_the_table_has_seconds_per_step_and_the_way_to_open_the_trace():
    profile = ProfileCallback(2)
    profile.trace, profile.steps, profile.seconds = Path("runs/a/profile/t.json.gz"), [2, 3], 8.0
    times = {"sample": (2.0, 1.0, 2), "update": (5.0, 4.0, 2), "update/backward": (3.0, 2.5, 8)}
    profile.phases = {name: PhaseTime(*values) for name, values in times.items()}
    text = output_of(print_profile, profile, width=120)
    rows = [line.split() for line in text.splitlines()]
    assert ["sampling", "1.000", "25.0%", "0.500", "1"] in rows
    assert ["backward", "1.500", "37.5%", "1.250", "4"] in rows
    # 8 s without sampling and updates, of which backward is a part.
    assert ["other", "0.500", "12.5%"] in rows
    assert ["complete", "step", "4.000", "100.0%"] in rows
    assert "runs/a/profile/t.json.gz" in text
    assert "https://ui.perfetto.dev" in text


@pytest.mark.parametrize(("wanted", "first", "last"), [(2, 0, 2), (0, 0, 9), (-1, 0, 9), (3, 8, 10)])
def test_the_run_must_have_the_steps_that_are_traced(wanted, first, last):
    """The first step that a process trains is not traced; a resumed run begins at a later one."""
    with pytest.raises(UserError, match=f"--profile {wanted}: the first step is not traced"):
        check_profile_steps(wanted, first, last)
    check_profile_steps(1, first, last)
