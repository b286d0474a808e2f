"""Waits: a line names what does not answer; SIGUSR1 prints the stacks of all processes of a command, and ends none."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bandpo_cli.processes import watch
from bandpo_cli.processes.watch import Wait, progress, read_stacks

ROOT = Path(__file__).parents[2]

LEADER = """
import os, subprocess, sys, time
from bandpo_cli.processes.watch import register
register("bandpo", leads=True)
child = "import time; from bandpo_cli.processes.watch import register; register('engine')\\ndef sample():\\n"
child += "    print('ready', flush=True)\\n    time.sleep(60)\\nsample()"
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
process.stdout.readline()
def train():  # both print from the function in which the signal must find them
    try:
        print(process.pid, os.environ["BANDPO_STACKS"], flush=True)
        time.sleep(60)
    finally:
        process.kill()
train()
"""


class Clock:
    """The time that waits measure."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(watch, "_reported_at", 0.0)
    monkeypatch.setattr(watch, "_progress_at", 0.0)
    monkeypatch.setattr(watch, "stall_after", 10.0)
    monkeypatch.delenv(watch.FOLDER_VARIABLE, raising=False)
    return clock


def test_a_wait_is_reported_once_with_its_name_its_start_and_what_to_do(clock, caplog):
    wait = Wait(lambda: "rank 1", "do this", since=clock.now)
    clock.now += 9.9
    wait.check()
    assert not caplog.messages
    clock.now += 5.1
    wait.check()
    wait.check()
    since = time.strftime("%H:%M", time.localtime(clock.time() - 15))
    assert [message[:26] for message in caplog.messages] == [f"waiting for rank 1 since {since}"[:26]]
    assert "(0:00:15): do this" in caplog.messages[0]
    clock.now += 100
    wait.check()
    assert len(caplog.messages) == 1
    wait.restart("a reply")
    clock.now += 9
    wait.restart("a reply")
    wait.check()
    assert len(caplog.messages) == 1, "a wait that has been restarted begins anew"
    clock.now += 2
    wait.check()
    assert len(caplog.messages) == 2, "the same mark is no answer"


def test_work_is_reported_without_progress_only(clock, caplog):
    """An evaluation of an hour that advances is no stall."""
    work = Wait("the evaluation", "", is_work=True, since=clock.now)
    for _ in range(60):
        clock.now += 14
        progress()
        work.check()
    assert not caplog.messages
    clock.now += 16
    work.check()
    assert len(caplog.messages) == 1


def test_work_that_waits_for_an_answer_gives_one_line(clock, caplog):
    work, answer = Wait("the phase", "", is_work=True, since=clock.now), Wait("rank 1", "", since=clock.now)
    for _ in range(20):
        clock.now += 2
        work.check()
        answer.check()
    assert [message.split(" since")[0] for message in caplog.messages] == ["waiting for rank 1"]


def test_zero_reports_nothing(clock, caplog, monkeypatch):
    monkeypatch.setattr(watch, "stall_after", 0.0)
    wait = Wait("rank 1", "", since=clock.now)
    clock.now += 1e6
    wait.check()
    assert not caplog.messages
    assert watch.stuck_after().total_seconds() == watch.MIN_STUCK_S


@pytest.fixture
def leader() -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """Start a leader with an engine; yield its process, the id of the engine, and their folder."""
    environment = {name: value for name, value in os.environ.items() if name != watch.FOLDER_VARIABLE}
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    child, folder = process.stdout.readline().split()
    yield process, int(child), Path(folder)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert not Path(folder).exists(), "the folder is removed at the end"


def lines_until(process: subprocess.Popen[str], holds: Callable[[str], bool]) -> str:
    """Return what a process has written to standard error when the text fulfils the condition."""
    text = ""
    while not holds(text):
        line = process.stderr.readline()
        assert line, text
        text += line
    return text


@pytest.mark.slow
def test_the_leader_prints_where_it_and_its_processes_are(leader):
    process, child, _ = leader
    for _ in range(2):
        process.send_signal(signal.SIGUSR1)
        text = lines_until(process, lambda text: " in train" in text and " in sample" in text)
        assert text.count(" in train") == text.count(" in sample") == 1
        assert f"bandpo (process {process.pid}):" in text
        assert f"engine (process {child}):" in text
    assert process.poll() is None


@pytest.mark.slow
def test_a_stopped_process_is_named_and_an_unrelated_process_gets_no_signal(leader, monkeypatch):
    """The id of a process that has ended may be that of any other process, which SIGUSR1 would end."""
    _process, child, folder = leader
    monkeypatch.setattr(watch, "ANSWER_S", 0.5)
    with subprocess.Popen(["sleep", "60"]) as unrelated:
        (folder / f"rank 1.{unrelated.pid}").touch()
        os.kill(child, signal.SIGSTOP)
        texts = read_stacks(folder)
        os.kill(child, signal.SIGCONT)
        assert unrelated.poll() is None
        unrelated.kill()
    assert len(texts) == 2
    assert any(f"engine (process {child}):\nno answer" in text for text in texts)
    assert any(" in train" in text for text in texts)
    assert read_stacks(folder / "missing") == []
