"""The order of a sweep's runs, what is done again and what is not; the children are real and only write records."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from bandpo_cli.config.sweep import SweepConfig
from bandpo_cli.storage.checkpoints import Progress, write_trainer_state
from bandpo_cli.sweeps import scheduler as run_module
from bandpo_cli.sweeps.folder import SweepFolder
from bandpo_cli.sweeps.plan import plan_runs
from bandpo_cli.sweeps.pool import LocalPool
from bandpo_cli.sweeps.scheduler import RunState, run_sweep

WRITER = """
import json, sys, time
from pathlib import Path
folder, accuracy, wait = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
folder.mkdir()
status = "KILLED"
try:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(5):
            print(json.dumps({"step": step, "eval/x/mean_at_4": accuracy, "time/step": wait}), file=file, flush=True)
            time.sleep(wait)
    status = "FINISHED"
finally:
    (folder / "summary.json").write_text(json.dumps({"status": status, "steps": step}))
sys.exit(0 if accuracy >= 0 else 1)
"""


@pytest.fixture
def folder(tmp_path: Path) -> SweepFolder:
    sweep = SweepConfig(axes={"bounds.delta": [0.1, 0.2]}, fixed={"steps": 4}, seeds=(0, 1))
    return SweepFolder.create(tmp_path, "s", plan_runs(sweep), "0.1", {})


def execute(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, accuracy: Mapping[str, float], wait: float = 0.02,
    margin: float | None = None, slots: int = 2,
) -> tuple[dict[str, str], list[str], dict[str, RunState]]:  # fmt: skip
    started: list[str] = []

    def command(sweep: SweepFolder, name: str) -> list[str]:
        started.append(name)
        return [sys.executable, "-c", WRITER, str(sweep.run_path(name)), str(accuracy[name]), str(wait)]

    latest: dict[str, RunState] = {}
    monkeypatch.setattr(run_module, "run_command", command)
    monkeypatch.setattr(run_module, "POLL_S", 0.02)
    steps = {run.name: 4 for run in folder.runs}
    failures = run_sweep(folder, LocalPool([{}] * slots), steps, latest.update, margin=margin)
    return failures, started, latest


ALL = ["0.1-s0", "0.2-s0", "0.1-s1", "0.2-s1"]


def test_all_run_once_and_what_failed_is_run_again(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, started, states = execute(folder, monkeypatch, {**dict.fromkeys(ALL, 0.5), "0.2-s0": -1.0})
    assert started == ALL
    assert set(failures) == {"0.2-s0"}
    assert failures["0.2-s0"].startswith("exit code 1")
    assert [states[name].status for name in ALL] == ["whole", "failed", "whole", "whole"]
    # This writer leaves a whole record before it fails; a run that fails leaves none.
    (folder.run_path("0.2-s0") / "summary.json").write_text("{}")
    reopened = SweepFolder.open(folder.path.parent, "s")
    failures, started, _ = execute(reopened, monkeypatch, dict.fromkeys(ALL, 0.5))
    assert (failures, started) == ({}, ["0.2-s0"])
    assert (folder.path / "attempts" / "0.2-s0-1" / "metrics.jsonl").is_file()
    assert execute(reopened, monkeypatch, {}) == ({}, [], {})


def test_further_flags_reach_each_run(folder: SweepFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is resumed gets them too."""
    checkpoint(folder.run_path("0.1-s0"), 2, "KILLED")
    code = "import sys; print(sys.argv[1:])"
    for name in ("run_command", "resume_command"):
        monkeypatch.setattr(run_module, name, lambda *_: [sys.executable, "-c", code])
    monkeypatch.setattr(run_module, "POLL_S", 0.02)
    flags = ["--tracking-uri", "http://a server"]
    run_sweep(folder, LocalPool([{}] * 2), dict.fromkeys(ALL, 4), lambda _: None, flags)
    assert {folder.log_path(name).read_text() for name in ALL} == {f"{flags}\n"}


def test_a_hopeless_run_is_ended_and_stays_ended(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracy = {"0.1-s0": 0.9, "0.1-s1": 0.9, "0.2-s0": 0.2, "0.2-s1": 0.85}
    failures, started, states = execute(folder, monkeypatch, accuracy, wait=0.4, margin=0.3)
    assert failures == {}
    assert started == ALL
    assert [states[name].status for name in ALL] == ["whole", "stopped", "whole", "whole"]
    assert json.loads((folder.run_path("0.2-s0") / "summary.json").read_text())["status"] == "KILLED"
    assert "0.200 at step" in folder.stopped()["0.2-s0"]
    assert execute(folder, monkeypatch, accuracy)[:2] == ({}, [])


def checkpoint(run: Path, step: int, status: str | None) -> None:
    """What a run leaves that was ended after a checkpoint; None: killed outright."""
    place = run / "checkpoints" / f"step-{step:06d}"
    place.mkdir(parents=True)
    write_trainer_state(place, Progress(step=step, updates=0, skipped_in_a_row=0, position=0, problems=""))
    if status is not None:
        (run / "summary.json").write_text(json.dumps({"status": status}))


@pytest.mark.parametrize(("status", "goes_on"), [("KILLED", True), (None, True), ("FAILED", False)])
def test_a_run_that_was_ended_goes_on_and_one_that_failed_begins_anew(
    folder: SweepFolder, status: str | None, goes_on: bool
) -> None:
    run = folder.run_path("0.1-s0")
    checkpoint(run, 2, status)
    command = run_module._command(folder, "0.1-s0")
    assert ("--resume" in command, "--config" in command) == (goes_on, not goes_on)
    assert run.exists() == goes_on
    assert (folder.path / "attempts").exists() != goes_on


def test_what_cannot_be_gone_on_with_is_set_aside(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume that is refused leaves the ground free: the next attempt begins anew."""
    checkpoint(folder.run_path("0.1-s0"), 2, "KILLED")
    monkeypatch.setattr(
        run_module, "resume_command", lambda *_: [sys.executable, "-c", "import sys; sys.exit(2)"]
    )
    failures, started, _ = execute(folder, monkeypatch, dict.fromkeys(ALL, 0.5))
    assert list(failures) == ["0.1-s0"]
    assert started == ALL[1:]
    assert (folder.path / "attempts" / "0.1-s0-1").is_dir()
    failures, started, _ = execute(folder, monkeypatch, dict.fromkeys(ALL, 0.5))
    assert (failures, started) == ({}, ALL[:1])


def test_one_slot_runs_one_at_a_time(folder: SweepFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    together: list[int] = []
    free = LocalPool.free.fget
    assert free is not None
    monkeypatch.setattr(
        LocalPool, "free", property(lambda pool: together.append(len(pool._children)) or free(pool))
    )
    _, started, _ = execute(folder, monkeypatch, dict.fromkeys(ALL, 0.5), slots=1)
    assert started == ALL
    assert max(together) == 1
