"""Runs that train while a thread writes their checkpoints: killed, stopped and failed meanwhile, then resumed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import RunError, SignalExit
from bandpo_cli.experiments.resume_run import resume
from bandpo_cli.experiments.train_run import train
from bandpo_cli.storage.checkpoints import complete_checkpoints, model_checkpoints
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.run_record import is_finished, read_summary
from bandpo_cli.training import checkpoint_writer
from bandpo_cli.types import CallbackBase, StepReport
from tests.training import trained
from tests.training.held_writes import Gate

pytestmark = pytest.mark.usefixtures("one_thread")


SMALL: dict[str, Any] = {
    **trained.SMALL,
    "steps": 6,
    "checkpoint": {"every": 2, "keep_last": 1, "keep_best": 1},
    "tracking": {"mlflow": False},
}


def record(folder: Path) -> list[dict[str, Any]]:
    return trained.record(RunFolder(folder))


def check_equal(folder: Path, uninterrupted: Path) -> None:
    trained.check_equal(RunFolder(folder), RunFolder(uninterrupted))


class AtStep(CallbackBase):
    """Calls a function after a step."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self._step, self._act = step, act

    def step(self, report: StepReport) -> None:
        if report.step == self._step:
            self._act()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that waits for its checkpoints."""
    config = resolve([SMALL, {"checkpoint": {"background": False}}])
    return train(config, tmp_path_factory.mktemp("runs"), "a").folder


@pytest.mark.slow
def test_a_run_equals_one_that_waits_for_its_checkpoints(uninterrupted: Path, tmp_path: Path) -> None:
    """Every metric and every byte, with checkpoints removed meanwhile; and threads were at work."""
    threads: list[str] = []
    start = threading.Thread.start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: (threads.append(self.name), start(self)))
        done = train(resolve([SMALL]), tmp_path, "a")
    check_equal(done.folder, uninterrupted)
    assert threads.count("checkpoint") == 2, "those of steps 2 and 4; step 6 is the last"
    assert is_finished(done.folder)
    for folder in (done.folder, uninterrupted):
        lines = RunFolder(folder).read_metrics()
        assert [line["step"] for line in lines if "time/checkpoint" in line] == [2, 4, 6]
        assert all(0 < line.get("time/checkpoint", 1e-9) < line["time/step"] for line in lines)


@pytest.mark.parametrize(("first_kept", "after"), [(True, 4), pytest.param(False, 2, marks=pytest.mark.slow)])
def test_a_run_killed_while_a_checkpoint_is_written_resumes_from_the_one_before(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_kept: bool, after: int
) -> None:
    """SIGKILL leaves what the system was given: the folder as it is then, with the lines of later steps.

    Killed in the second checkpoint, with the first complete; and in the first, before which there is none.
    """
    gate = Gate(monkeypatch)
    killed = tmp_path / "killed" / "a"

    def kill() -> None:
        gate.wait_until_reached()
        shutil.copytree(tmp_path / "runs" / "a", killed)
        gate.open.set()

    callbacks: list[Any] = [AtStep(after + 1, kill)]
    if first_kept:
        gate.open.set()
        callbacks.insert(0, AtStep(3, lambda: _close(gate)))
    train(resolve([SMALL]), tmp_path / "runs", "a", callbacks=callbacks)
    assert (killed / "checkpoints" / f".step-{after:06d}.writing" / "model.safetensors").exists()
    assert list(complete_checkpoints(RunFolder(killed)).complete) == ([2] if first_kept else [])
    assert [line["step"] for line in record(killed)] == list(range(after + 2))
    monkeypatch.undo()
    done = resume("a", killed.parent)
    assert done.status == "FINISHED"
    check_equal(killed, uninterrupted)


def _close(gate: Gate) -> None:
    """Hold the writes from now on; the thread of the checkpoint before has ended by then."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    gate.open.clear()
    gate.reached.clear()


@pytest.mark.slow
def test_a_stop_waits_for_the_checkpoint_in_progress(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop comes with the checkpoint of step 2 in progress; that of step 3 follows, and both are complete."""
    gate, stop, phases = Gate(monkeypatch), threading.Event(), []

    class Phases(CallbackBase):
        def phase(self, name: str) -> None:
            phases.append(name)

    def interrupt() -> None:
        gate.wait_until_reached()
        threading.Timer(0.1, gate.open.set).start()
        stop.set()

    config = resolve([SMALL, {"checkpoint": {"keep_last": None}}])
    callbacks = [AtStep(3, interrupt), Phases()]
    done = train(config, tmp_path, "a", callbacks=callbacks, stop_requested=stop.is_set)
    assert done.status == "KILLED"
    assert list(complete_checkpoints(RunFolder(done.folder)).complete) == [2, 3]
    assert phases[-2:] == ["checkpoint", "close"]
    again = resume("a", tmp_path)
    assert record(again.folder) == record(uninterrupted)


@pytest.mark.slow
def test_the_second_signal_ends_the_run_without_the_checkpoint(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes within a callback. The thread gives up the checkpoint, and the gate is never opened."""
    gate = Gate(monkeypatch)

    def interrupt() -> None:
        gate.wait_until_reached()
        raise SignalExit(2)

    with pytest.raises(SignalExit):
        train(resolve([SMALL]), tmp_path, "a", callbacks=[AtStep(3, interrupt)])
    folder = tmp_path / "a"
    assert list((folder / "checkpoints").iterdir()) == []
    summary = read_summary(folder)
    assert summary is not None
    assert summary.status == "KILLED"
    monkeypatch.undo()
    check_equal(resume("a", tmp_path).folder, uninterrupted)


@pytest.mark.slow
def test_a_disk_that_fills_up_meanwhile_ends_the_run_in_one_line(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 4 fails; the run ends at a later step, and resumes from step 2."""
    write = checkpoint_writer.write_checkpoint

    def fail(policy: Any, state: Any, progress: Any, folder: Path, *check: Any) -> None:
        if progress.step == 4:
            raise RunError(f"{folder}: the checkpoint cannot be written: No space left on device")
        write(policy, state, progress, folder, *check)

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", fail)
    with pytest.raises(RunError, match="step-000004: the checkpoint cannot be written: No space left"):
        train(resolve([SMALL]), tmp_path, "a")
    folder = tmp_path / "a"
    summary = read_summary(folder)
    assert summary is not None
    assert summary.status == "FAILED"
    assert summary.content["error"].startswith("RunError: ")
    assert list(model_checkpoints(RunFolder(folder))) == [2]
    monkeypatch.undo()
    check_equal(resume("a", tmp_path).folder, uninterrupted)


@pytest.mark.slow
def test_the_summary_is_written_after_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an error of a callback, with a checkpoint in progress."""
    gate, seen = Gate(monkeypatch), []
    write = RunFolder.write_summary

    def note(run: RunFolder, summary: Any) -> Path:
        seen.append((summary["status"], list(complete_checkpoints(run).complete)))
        return write(run, summary)

    def fail() -> None:
        gate.wait_until_reached()
        threading.Timer(0.1, gate.open.set).start()
        raise ValueError

    monkeypatch.setattr(RunFolder, "write_summary", note)
    config = resolve([SMALL, {"steps": 4}])
    with pytest.raises(ValueError):  # noqa: PT011
        train(config, tmp_path, "a", callbacks=[AtStep(2, fail)])
    train(config, tmp_path, "b")
    assert seen[0] == ("FAILED", [2])
    assert seen[1][0] == "FINISHED"
    assert 4 in seen[1][1]
