"""Rollouts ahead of their step: which weights sample a batch, what trains on it, and the thread that samples."""

import shutil
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bandpo_cli.errors import RunError, UserError
from bandpo_cli.metric_names import without_clock
from bandpo_cli.sampling.sampler import SampleRequest, SamplingParams
from bandpo_cli.training.performance import StepTimer
from bandpo_cli.training.rollout_batches import BackgroundCall, RolloutBatches, SampledGroups
from bandpo_cli.types import Completion, Grade, Problem
from tests.training.recording import (
    Recording,
    RecordingSampler,
    SampleCall,
    Sampled,
    execute,
    hashed_grade,
    prepare_run,
    run,
    same_weights,
)

AHEAD: dict[str, Any] = {"sampling": {"max_lag": 1}, "reward": {"overlong_buffer": 0}}
STEPS = range(1, 6)


OLDER: dict[str, Any] = {"sampling": {"max_lag": 3, "engine_process": False}}


@pytest.fixture(scope="module", params=[{}, pytest.param(OLDER, marks=pytest.mark.slow)])
def ahead(
    tmp_path_factory: pytest.TempPathFactory, small_model: Path, request: pytest.FixtureRequest
) -> Recording:
    """Return a run of 5 steps of 2 updates whose sampler has a copy of the weights; tests must not change it."""
    return run(tmp_path_factory.mktemp("ahead") / "run", small_model, AHEAD, request.param)


@pytest.mark.parametrize("has_process", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 4, 12])
def test_the_batch_of_a_step_is_sampled_max_lag_steps_before(lag, has_process, monkeypatch):
    """After every second step the queue is that of a resumed run, or of a fork that drops it."""
    sampling = SimpleNamespace(max_lag=lag, engine_process=has_process)
    components: Any = SimpleNamespace(
        ahead=deque(), optimizer=SimpleNamespace(update=0), ranks=SimpleNamespace(for_thread=lambda: None)
    )

    def sample(_: object, number: int, age: int, version: int, *__: object) -> SampledGroups:
        return SampledGroups(number, version, age, 0, 0.0, [], [])

    monkeypatch.setattr(RolloutBatches, "_sample", sample)
    for step in range(1, 11):
        if step == 7:
            components.ahead.clear()  # the fork samples from the weights that it has
        batches = RolloutBatches(SimpleNamespace(sampling=sampling, steps=10), components)
        batch = batches.take(step, StepTimer())
        sampled_in = max(7 if step >= 7 else 1, step - lag)
        assert (batch.step, batch.age, batch.version) == (step, step - sampled_in, 2 * (sampled_in - 1))
        batches.start(step)
        components.optimizer.update += 2
        batches.wait(StepTimer())
        assert [item.step for item in components.ahead] == [*range(step + 1, min(step + lag, 10) + 1)]


def calls(recording: Recording) -> dict[int, SampleCall]:
    """Return the call that sampled the batch of each step: the first step has more than one, the last one none."""
    found = [call for step in STEPS for call in recording.steps[step].training]
    lag = recording.config.sampling.max_lag
    assert [len(recording.steps[step].training) for step in STEPS] == [lag + 1, *[1] * (4 - lag), *[0] * lag]
    return dict(zip(STEPS, found, strict=True))


def groups(recording: Recording) -> dict[int, list[list[Sampled]]]:
    """Return the groups that each step trains on."""
    found = [group for step in STEPS for group in recording.steps[step].training_groups()]
    size = recording.config.sampling.prompts
    return {step: found[(step - 1) * size : step * size] for step in STEPS}


@pytest.mark.parametrize("step", [1, 5])
def test_a_batch_is_sampled_from_the_weights_of_max_lag_steps_before(ahead, step):
    """The sampler has the weights of its version: a copy that `sync` replaces, with the version."""
    before = max(1, step - ahead.config.sampling.max_lag)
    versions = {item.completion.policy_version for group in groups(ahead)[step] for item in group}
    assert versions == {2 * (before - 1)}
    line = ahead.line(step)
    assert (line["sampler/lag"], line["sampler/lag_steps"]) == (2 * (step - before), step - before)


def test_problems_and_seeds_are_those_of_a_run_without_lag(ahead, recorded):
    for step, call in calls(ahead).items():
        (plain,) = recorded.steps[step].training
        assert (call.seed, call.prompts_P) == (plain.seed, plain.prompts_P)
        assert "sampler/lag" not in recorded.line(step)
    assert calls(ahead)[1].completions_PG == recorded.steps[1].training[0].completions_PG
    assert calls(ahead)[3].completions_PG != recorded.steps[3].training[0].completions_PG


def test_the_engine_is_synced_after_its_batch_and_evaluates_the_new_weights(ahead):
    for step in STEPS:
        order = ahead.steps[step].order
        sync = order.index("sync")
        last = max(index for index, name in enumerate(order[:sync]) if name in ("grade", "update"))
        assert order[:sync].count("grade") == order[:sync].count("sample")
        assert last < sync
        evaluated = [group for call in ahead.steps[step].evaluation for group in call.completions_PG]
        assert {item.policy_version for group in evaluated for item in group} <= {2 * step}
    assert ahead.steps[2].evaluation


class StreamingCopy(RecordingSampler):
    """Samples all requests of a batch in one call; before it yields the last ones, it waits for grades of the first."""

    streams = True
    waited: list[bool]

    def sample_stream(
        self, requests: Iterable[SampleRequest | None], params: SamplingParams, in_order: bool = True
    ) -> Generator[tuple[int, list[list[Completion]]], None, None]:
        every = [*filter(None, requests)]
        prompts = [prompt for request in every for prompt in request.prompts_P]
        starts = accumulate((len(request.prompts_P) for request in every), initial=every[0].seed)
        assert [request.seed for request in every] == [*starts][:-1]
        groups = iter(self.sample(prompts, params, every[0].seed))
        step = self.recording.current
        for number, request in enumerate(every[:-1]):
            yield number, [next(groups) for _ in request.prompts_P]
        until = time.monotonic() + 20
        while every[1:] and "grade" not in step.order and time.monotonic() < until:
            time.sleep(0.01)
        self.waited += ["grade" in step.order] * bool(every[1:])
        yield len(every) - 1, [*groups]


@pytest.mark.parametrize("rewards", [None, [{"weight": 1.0}, {"grader": "number", "weight": 0.5}]])
def test_grades_while_sampling_give_the_same_run(tmp_path, small_model, monkeypatch, rewards):
    """With dynamic sampling: several batches per step. Each of several rewards grades each part."""
    monkeypatch.setattr(
        "tests.training.recording.hashed_grade",
        lambda problem, text: hashed_grade(replace(problem, id=problem.id + problem.grader), text),
    )
    monkeypatch.setattr("tests.training.recording.RecordingSampler", StreamingCopy)
    StreamingCopy.waited = []
    recordings = [
        run(
            tmp_path / str(early),
            small_model,
            {"steps": 2, "evaluation": {"every": 0}, "sampling": {"dynamic": True}},
            {"grading": {"while_sampling": early, "batch": 4}, "task": {"rewards": rewards}},
            uniform=lambda ids: ids[1:4],
        )
        for early in (False, True)
    ]
    plain, early = (
        [without_clock(line) for line in recording.folder.read_metrics()] for recording in recordings
    )
    assert plain == early
    assert same_weights(*(recording.steps[2].updates[-1].weights for recording in recordings))
    batches = sum(len(step.training) for step in recordings[1].steps.values())
    assert StreamingCopy.waited == [True] * batches
    assert batches >= 3


def test_an_error_of_a_grader_that_grades_while_sampling_ends_the_run(tmp_path, small_model, monkeypatch):
    monkeypatch.setattr("tests.training.recording.RecordingSampler", StreamingCopy)
    StreamingCopy.waited = []
    recording = prepare_run(tmp_path / "a", small_model, {"grading": {"while_sampling": True, "batch": 4}})

    def fail(problems: Sequence[Problem], texts: Sequence[str]) -> list[Grade]:
        recording.current.order.append("grade")
        raise RunError("the grader has gone")

    monkeypatch.setattr(recording.components.grader, "grade", fail)
    with pytest.raises(RunError, match="the grader has gone"):
        execute(recording, first=1)
    assert not [item.name for item in threading.enumerate() if item.name.startswith("grading")]


class WaitingSampler(RecordingSampler):
    """Returns no batch but the first before an update was applied; `fail` raises in place of that."""

    def __init__(self, components: Any, fail: BaseException | None = None) -> None:
        super().__init__(components)
        self.fail, self.updated, self.closed = fail, threading.Event(), threading.Event()
        self.waited: list[bool] = []

    def sample(
        self, prompts_P: Sequence[Sequence[int]], params: SamplingParams, seed: int
    ) -> list[list[Completion]]:
        if threading.current_thread() is not threading.main_thread():
            if self.fail is not None:
                raise self.fail
            self.waited.append(self.updated.wait(20))
            self.updated.clear()
            if self.closed.is_set():
                raise RunError("the engine was closed")
        return super().sample(prompts_P, params, seed)

    def close(self) -> None:
        self.closed.set()
        self.updated.set()


def waiting(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Recording:
    """Return a run that is not started, with a `WaitingSampler`."""
    monkeypatch.setattr("tests.training.recording.RecordingSampler", WaitingSampler)
    recording = prepare_run(tmp_path / "a", model, AHEAD, {"evaluation": {"every": 0}, "steps": 3}, **options)
    sampler, step = recording.components.sampler, recording.components.optimizer.step
    assert isinstance(sampler, WaitingSampler)

    def note(*arguments: Any) -> float:
        norm = step(*arguments)
        sampler.updated.set()
        return norm

    recording.components.optimizer.step = note
    return recording


def test_a_step_is_trained_while_the_next_batch_is_sampled(tmp_path, small_model, monkeypatch):
    recording = execute(waiting(tmp_path, small_model, monkeypatch))
    sampler = recording.components.sampler
    assert sampler.waited == [True, True]
    assert list(recording.steps) == [1, 2, 3]


def test_an_error_while_sampling_ahead_ends_the_run(tmp_path, small_model, monkeypatch):
    recording = waiting(tmp_path, small_model, monkeypatch, fail=RunError("the engine has gone"))
    with pytest.raises(RunError, match="the engine has gone"):
        execute(recording)
    assert recording.folder.read_metrics() == []
    assert "rollouts" not in [item.name for item in threading.enumerate()]


def test_an_error_of_an_update_closes_the_engine_that_samples_ahead(tmp_path, small_model, monkeypatch):
    recording = waiting(tmp_path, small_model, monkeypatch)
    cancelled: list[bool] = []

    def fail(*_: Any) -> float:
        raise RunError("no update")

    recording.components.optimizer.step = fail
    monkeypatch.setattr(recording.components.grader, "cancel", lambda: cancelled.append(True))
    with pytest.raises(RunError, match="no update"):
        execute(recording)
    sampler = recording.components.sampler
    assert sampler.closed.is_set()
    assert cancelled == [True]
    assert "rollouts" not in [item.name for item in threading.enumerate()]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Path:
    """Return a checkpoint with a batch that was sampled ahead."""
    layer = {"steps": 2, "checkpoint": {"every": 1}, "evaluation": {"every": 0}}
    recording = run(tmp_path_factory.mktemp("saved") / "run", small_model, AHEAD, layer)
    return recording.folder.checkpoint_dir(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"\x10" + bytes(len(content) - 1),
        lambda content: content.replace(b'\\"step\\": 2', b'\\"step\\": 3'),
        lambda content: content.replace(b'"rollouts"', b'"rollout_"'),
    ],
)
def test_a_damaged_batch_is_one_line(tmp_path, small_model, checkpoint, damage):
    folder = shutil.copytree(checkpoint, tmp_path / "step-000001")
    path = folder / "trainer" / "ahead" / "rollouts.safetensors"
    content = damage(path.read_bytes())
    assert len(content) == path.stat().st_size
    path.write_bytes(content)
    fresh = prepare_run(tmp_path / "b", small_model, AHEAD)
    with pytest.raises(UserError, match=r"cannot be loaded: .*; remove .*trainer/state.json to resume"):
        fresh.components.resume_from(folder)


def test_after_an_error_the_pool_of_tools_is_closed_while_the_thread_samples():
    """The thread's next call of the pool then raises, so that it ends and starts no worker."""
    closed, events = threading.Event(), []
    components = SimpleNamespace(
        ranks=SimpleNamespace(for_thread=lambda: None),
        grader=SimpleNamespace(cancel=lambda: events.append("cancel")),
        sampler=SimpleNamespace(close=lambda: events.append("sampler")),
        conversations=SimpleNamespace(pool=SimpleNamespace(close=closed.set)),
    )
    config = SimpleNamespace(sampling=SimpleNamespace(max_lag=1, engine_process=True))
    batches = RolloutBatches(config, components)
    batches._call = BackgroundCall("rollouts", closed.wait, daemon=True)
    batches._call.start()
    batches.__exit__()
    assert events == ["cancel", "sampler"]
    assert not batches._call.is_alive()
