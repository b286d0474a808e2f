"""Runs that train while a thread writes their checkpoints: killed, stopped and failed meanwhile, then resumed."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.callbacks import CallbackBase, StepReport
from bandpo_cli.config.layers import resolve
from bandpo_cli.experiments.resume_run import resume
from bandpo_cli.experiments.train_run import train
from bandpo_cli.storage.checkpoints import complete_checkpoints
from bandpo_cli.storage.run_folder import RunFolder
from tests.training import trained
from tests.training.held_writes import Gate

pytestmark = pytest.mark.usefixtures("one_thread")


SMALL: dict[str, Any] = {
    **trained.SMALL,
    "steps": 4,
    "checkpoint": {"every": 1, "keep_last": 1, "keep_best": 1},
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
    start, write_summary = threading.Thread.start, RunFolder.write_summary
    complete: list[list[int]] = []

    def note(run: RunFolder, summary: Any) -> Path:
        complete.append([*complete_checkpoints(run).complete])
        return write_summary(run, summary)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: (threads.append(self.name), start(self)))
        patch.setattr(RunFolder, "write_summary", note)
        done = train(resolve([SMALL]), tmp_path, "a")
    check_equal(done.folder, uninterrupted)
    assert threads.count("checkpoint") == 3, "step 4 is the last"
    assert 4 in complete[0], "the summary is written after the last checkpoint"
    for folder in (done.folder, uninterrupted):
        lines = RunFolder(folder).read_metrics()
        assert [line["step"] for line in lines if "time/checkpoint" in line] == [1, 2, 3, 4]
        assert all(0 < line.get("time/checkpoint", 1e-9) < line["time/step"] for line in lines)


@pytest.mark.slow
def test_a_run_killed_while_a_checkpoint_is_written_resumes_from_the_one_before(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL leaves what the system was given: the folder as it is then, with the line of step 2."""
    gate = Gate(monkeypatch)
    gate.open.set()
    killed = tmp_path / "killed" / "a"

    def hold() -> None:
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()  # the first checkpoint is complete
        gate.open.clear()
        gate.reached.clear()

    def kill() -> None:
        gate.wait_until_reached()
        shutil.copytree(tmp_path / "runs" / "a", killed)
        gate.open.set()

    train(resolve([SMALL]), tmp_path / "runs", "a", callbacks=[AtStep(1, hold), AtStep(2, kill)])
    assert (killed / "checkpoints" / ".step-000002.writing" / "model.safetensors").exists()
    assert list(complete_checkpoints(RunFolder(killed)).complete) == [1]
    assert [line["step"] for line in record(killed)] == [0, 1, 2]
    monkeypatch.undo()
    assert resume("a", killed.parent).status == "FINISHED"
    check_equal(killed, uninterrupted)


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

    config = resolve([SMALL, {"checkpoint": {"every": 2, "keep_last": None}}])
    callbacks = [AtStep(3, interrupt), Phases()]
    done = train(config, tmp_path, "a", callbacks=callbacks, stop_requested=stop.is_set)
    assert done.status == "KILLED"
    assert list(complete_checkpoints(RunFolder(done.folder)).complete) == [2, 3]
    assert phases[-2:] == ["checkpoint", "close"]
    assert record(resume("a", tmp_path).folder) == record(uninterrupted)
