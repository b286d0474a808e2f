"""Checkpoints written by a thread: equal to those written without one, in the same order, and none is lost silently."""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import ModelConfig, RunConfig
from bandpo_cli.errors import RunError, SignalExit
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.storage.checkpoints import (
    complete_checkpoints,
    model_checkpoints,
    remove_checkpoints_after,
)
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.training import checkpoint_writer
from bandpo_cli.training.build import load_checkpoint
from bandpo_cli.training.checkpoint_writer import CheckpointWriter, StateCopy, TrainedState
from bandpo_cli.training.optimizer import NonFiniteError
from tests.training.trained import (
    STEP,
    State,
    Trained,
    contents,
    fresh,
    save_checkpoint,
    state_of,
    tensors,
    update,
)


@pytest.fixture(scope="module")
def embedded() -> Policy:
    return load_policy(ModelConfig())


@dataclass(frozen=True)
class Setting:
    """A run folder with a small policy."""

    trained: Trained
    run: RunFolder

    def writer(self, **checkpoint: Any) -> CheckpointWriter:
        return CheckpointWriter(settings(**checkpoint), State(*self.trained), self.run)  # type: ignore[arg-type]

    def save(self, writer: CheckpointWriter, step: int) -> None:
        """Save a step in the order of the loop."""
        writer.prepare(step)
        self.run.append_metrics({"step": step})
        writer.commit()

    def names(self) -> list[str]:
        return sorted(path.name for path in (self.run.path / "checkpoints").glob("*"))


def settings(**checkpoint: Any) -> RunConfig:
    return resolve([{"steps": 100, "checkpoint": {"every": 1, "keep_last": None, **checkpoint}}])


@pytest.fixture
def setting(embedded: Policy, tmp_path: Path) -> Setting:
    trained = fresh(embedded, torch.float32)
    update(trained, 1)
    return Setting(trained, RunFolder.create(tmp_path, "a"))


class Gate:
    """Holds a checkpoint that a thread writes: its weights are in the hidden folder, the optimizer state is not.

    Attributes:
        reached: set when a write is held.
        open: set it to let this write and all others pass.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._write = checkpoint_writer.write_tensors
        monkeypatch.setattr(checkpoint_writer, "write_tensors", self._held)

    def _held(self, path: Path, tensors: Mapping[str, torch.Tensor], check: Callable[[], None]) -> str:
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            while not self.open.wait(0.002):
                check()
        return self._write(path, tensors, check)

    def wait_until_reached(self) -> None:
        """Return when a write is held."""
        assert self.reached.wait(60)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()
    assert [item.name for item in threading.enumerate() if item.name == "checkpoint"] == []


@pytest.mark.parametrize(("kind", "dtype"), [("qwen2", torch.bfloat16), ("llama", torch.float32)])
def test_a_thread_writes_the_state_of_its_step_whatever_changes_meanwhile(
    embedded: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str
) -> None:
    """All bytes are those that a write without a thread gives before the changes. Tied and untied, with masters."""
    changed, save_policy = threading.Event(), checkpoint_writer.save_policy

    def save_later(*arguments: Any) -> None:
        assert changed.wait(60)
        save_policy(*arguments)

    trained = fresh(embedded, dtype, kind)
    run = RunFolder.create(tmp_path, "a")
    update(trained, 1, 2)
    save_checkpoint(*trained, State(*trained).progress(7), tmp_path / "direct" / "step-000007")
    monkeypatch.setattr(checkpoint_writer, "save_policy", save_later)
    with CheckpointWriter(settings(), State(*trained), run) as writer:  # type: ignore[arg-type]
        writer.prepare(7)
        writer.commit()
        update(trained, 3, 4)
        with torch.no_grad():
            for parameter in trained.policy.model.parameters():
                parameter.zero_()
        changed.set()
    direct = contents(tmp_path / "direct" / "step-000007")
    assert len(direct["trainer/optimizer.safetensors"]) > 1000
    assert contents(run.checkpoint_dir(7)) == direct


def test_a_second_copy_takes_the_new_state_and_no_further_memory(embedded: Policy) -> None:
    trained = fresh(embedded, torch.bfloat16)
    update(trained, 1)
    copy, state = StateCopy(), state_of(*trained)
    assert copy.missing_bytes(state) == state.nbytes
    first = copy.take(state)
    places = {name: value.data_ptr() for name, value in {**first.weights, **first.optimizer}.items()}
    update(trained, 2)
    later = state_of(*trained)
    assert copy.missing_bytes(later) == 0
    second = copy.take(later)
    now = {**second.weights, **second.optimizer}
    assert {name: value.data_ptr() for name, value in now.items()} == places
    assert not [name for name, tensor in tensors(trained).items() if not torch.equal(now[name], tensor)]
    in_use = {tensor.data_ptr() for tensor in tensors(trained).values()}
    assert in_use.isdisjoint(places.values())
    assert second.nbytes == later.nbytes, "tied weights are copied once"


def test_the_copy_of_a_gpu_is_pinned_and_complete_when_it_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stand-ins record the calls: there is no GPU here. torch rounds pinned memory up to a power of two."""
    place = {"shape": torch.Size([3]), "dtype": torch.float32, "device": torch.device("cuda:1"), "nbytes": 12}
    source, target, calls = Mock(**place), Mock(), Mock()
    calls.allocate.return_value = target
    calls.attach_mock(target.copy_, "copy")
    monkeypatch.setattr(torch, "empty_like", calls.allocate)
    monkeypatch.setattr(torch.cuda, "synchronize", calls.wait)
    state = TrainedState({"weight": source}, {}, STEP)
    assert StateCopy().missing_bytes(state) == 16
    StateCopy().take(state)
    assert calls.mock_calls == [
        call.allocate(source, device="cpu", pin_memory=True),
        call.copy(source.detach(), non_blocking=True),
        call.wait(torch.device("cuda:1")),
    ]


def test_a_checkpoint_becomes_visible_after_its_line_is_on_the_disk(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rename and every flush of metrics.jsonl is noted with the steps in the file at that time."""
    events: list[tuple[str, list[int]]] = []
    rename, flush = os.rename, RunFolder.sync_metrics

    def steps() -> list[int]:
        return [record["step"] for record in setting.run.read_metrics()]

    def note_rename(old: Path, new: Path) -> None:
        rename(old, new)
        events.append((Path(new).name, steps()))

    def note_flush(run: RunFolder) -> None:
        flush(run)
        events.append(("flush", steps()))

    monkeypatch.setattr(os, "rename", note_rename)
    monkeypatch.setattr(RunFolder, "sync_metrics", note_flush)
    with setting.writer(keep_last=1, keep_best=0) as writer:
        setting.save(writer, 1)
        writer.wait()
        setting.save(writer, 2)
    assert events == [
        ("flush", [1]), ("step-000001", [1]), ("flush", [1]),
        ("flush", [1, 2]), ("step-000002", [1, 2]), ("flush", [1, 2]), (".step-000001.removing", [1, 2]),
    ]  # fmt: skip
    assert setting.names() == ["step-000002"]


def test_the_next_checkpoint_waits_for_the_one_in_progress(setting: Setting, gate: Gate) -> None:
    """The first is complete, with its own state, before the second copy is taken."""
    with setting.writer() as writer:
        setting.save(writer, 1)
        gate.wait_until_reached()
        assert setting.names() == [".step-000001.writing"]
        update(setting.trained, 5)
        timer = threading.Timer(0.1, gate.open.set)
        timer.start()
        writer.prepare(2)
        timer.join()
        assert setting.names() == ["step-000001"]
        writer.commit()
    first, second = (fresh(setting.trained.policy, torch.float32) for _ in range(2))
    load_checkpoint(*first, setting.run.checkpoint_dir(1))
    load_checkpoint(*second, setting.run.checkpoint_dir(2))
    assert first.optimizer.state()["model.norm.weight.step"] == 1
    assert second.optimizer.state()["model.norm.weight.step"] == 2


def test_the_last_step_and_a_run_without_background_use_no_thread(setting: Setting) -> None:
    """The checkpoint is complete before the step's line is written; so are those without memory for a copy."""
    for writer, step in ((setting.writer(), 100), (setting.writer(background=False), 3)):
        with writer:
            writer.prepare(step)
            assert step in complete_checkpoints(setting.run).complete
            writer.commit()


@pytest.mark.parametrize("available", ["little", "unknown"])
def test_without_memory_for_a_copy_training_waits(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, available: str
) -> None:
    """The system reports how little is available, or the allocation fails."""
    state = state_of(*setting.trained)
    found = 2 * state.nbytes - 1 if available == "little" else None
    monkeypatch.setattr(checkpoint_writer, "available_memory", lambda: found)
    if available == "unknown":
        no_memory = RuntimeError("DefaultCPUAllocator: can't allocate memory")

        def fail(*_: Any, **__: Any) -> None:
            raise no_memory

        monkeypatch.setattr(torch, "empty_like", fail)
    with caplog.at_level(logging.WARNING, "bandpo_cli"), setting.writer() as writer:
        for step in (1, 2):
            writer.prepare(step)
            assert step in complete_checkpoints(setting.run).complete
            writer.commit()
    (message,) = caplog.messages
    assert message.startswith("training waits for its checkpoints")
    assert ("are available" in message) == (found is not None)


def test_weights_that_are_not_finite_are_refused_before_anything_is_written(setting: Setting) -> None:
    with torch.no_grad():
        setting.trained.policy.model.get_parameter("model.norm.weight")[0] = torch.nan
    with setting.writer() as writer, pytest.raises(NonFiniteError, match="no checkpoint was written"):
        writer.prepare(1)
    assert setting.names() == []


def full_disk(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_fills_up_is_reported_at_the_next_step(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older checkpoint stays, and the error is raised once."""
    with setting.writer() as writer:
        setting.save(writer, 1)
        writer.wait()
        with monkeypatch.context() as patch:
            setting.run.append_metrics({"step": 2})
            writer.prepare(2)
            patch.setattr(os, "fsync", full_disk)
            patch.setattr(RunFolder, "sync_metrics", lambda _: None)
            writer.commit()
            assert writer._call is not None
            writer._call.join()
        with pytest.raises(RunError, match="step-000002: the checkpoint cannot be written: No space left"):
            writer.check()
        writer.check()
    assert setting.names() == ["step-000001"]


@pytest.mark.parametrize("call", ["prepare", "save_on_stop", "end"])
def test_no_error_of_the_thread_is_lost(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, gate: Gate, call: str
) -> None:
    """The write fails after the step was done, while the run waits for it."""
    monkeypatch.setattr(checkpoint_writer.checkpoints, "prune_checkpoints", lambda *_: full_disk(0))
    with pytest.raises(OSError, match="No space left"), setting.writer() as writer:  # noqa: PT012
        setting.save(writer, 1)
        gate.wait_until_reached()
        writer.check()  # does not wait
        gate.open.set()
        if call != "end":
            getattr(writer, call)(2)
            pytest.fail("the error is raised before")


class CallerError(Exception):
    """An error of the code that trains."""


@pytest.mark.parametrize("error", [CallerError, GeneratorExit, KeyboardInterrupt])
def test_a_pending_checkpoint_is_finished_after_an_error(
    setting: Setting,
    gate: Gate,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error of the thread does not hide the one that ended the run."""
    monkeypatch.setattr(checkpoint_writer.checkpoints, "prune_checkpoints", lambda *_: full_disk(0))
    with pytest.raises(error), setting.writer() as writer:  # noqa: PT012
        setting.save(writer, 1)
        gate.wait_until_reached()
        threading.Timer(0.05, gate.open.set).start()
        raise error
    assert list(complete_checkpoints(setting.run).complete) == [1]
    assert caplog.messages == ["[Errno 28] No space left on device"]


def test_a_second_signal_gives_the_checkpoint_up(setting: Setting, gate: Gate) -> None:
    """Its files are removed, the one before stays; the gate is never opened."""
    with setting.writer(background=False) as writer:
        setting.save(writer, 1)
    with pytest.raises(SignalExit), setting.writer() as writer:  # noqa: PT012
        setting.save(writer, 2)
        gate.wait_until_reached()
        assert setting.names() == [".step-000002.writing", "step-000001"]
        raise SignalExit(2)
    assert setting.names() == ["step-000001"]


def test_a_signal_while_the_end_waits_gives_the_checkpoint_up(
    setting: Setting, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: CheckpointWriter) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), setting.writer() as writer:  # noqa: PT012
        setting.save(writer, 1)
        gate.wait_until_reached()
        monkeypatch.setattr(CheckpointWriter, "wait", interrupted)
    assert setting.names() == []


def test_a_write_in_the_main_thread_that_a_signal_interrupts_leaves_nothing(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise SignalExit(2)

    with pytest.raises(SignalExit), setting.writer(background=False) as writer:  # noqa: PT012
        monkeypatch.setattr(os, "fsync", interrupted)
        writer.prepare(1)
    assert setting.names() == []


def test_without_a_further_thread_the_checkpoint_is_written_all_the_same(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with setting.writer() as writer:
        setting.save(writer, 1)
        assert list(complete_checkpoints(setting.run).complete) == [1]


def test_the_thread_of_a_gpu_uses_no_other_gpu(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins record the call: there is no GPU here. A new thread has GPU 0, where DCP would make a context."""
    chosen: list[tuple[str, str]] = []
    monkeypatch.setattr(Policy, "device", property(lambda _: torch.device("cuda:3")))
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, str(device)))
    )
    with setting.writer() as writer:
        setting.save(writer, 1)
    assert chosen == [("checkpoint", "cuda:3")]


def test_readers_see_no_checkpoint_before_it_is_complete(setting: Setting, gate: Gate) -> None:
    """`eval` and `show` list what has a model, `resume` what is complete; a resume removes what SIGKILL would leave."""
    with setting.writer() as writer:
        setting.save(writer, 1)
        gate.wait_until_reached()
        assert (setting.run.path / "checkpoints" / ".step-000001.writing" / "model.safetensors").exists()
        assert not model_checkpoints(setting.run)
        assert complete_checkpoints(setting.run) == ({}, {})
        killed = RunFolder(Path(shutil.copytree(setting.run.path, setting.run.path.parent / "b")))
        gate.open.set()
    remove_checkpoints_after(killed, 0)
    assert list((killed.path / "checkpoints").iterdir()) == []
    assert list(model_checkpoints(setting.run)) == [1]
