"""A stopped worker of a grader or of tools is named, while its pool waits and also where the pool is only polled."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from bandpo_cli.config.sampling import GradingConfig
from bandpo_cli.grading.tools import ToolPool
from bandpo_cli.grading.workers import GraderWorkers, WorkerPool
from bandpo_cli.processes import watch

CODE = '''
def judge(text, answer, extra):
    return True

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
'''
ARGUMENTS = {"grader": ["", "", {}, ""], "tools": ["add", {"a": 1, "b": 2}]}
LIMIT_S = 60


def open_pool(kind: str) -> WorkerPool:
    config = GradingConfig(workers=1, deadline=600)
    return (
        GraderWorkers("stalled:judge", config, 1)
        if kind == "grader"
        else ToolPool(["stalled:add"], config, 1, 1)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), [("grader", "wait"), ("tools", "poll")])
def test_a_stopped_worker_is_named(
    kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "stalled.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watch, "stall_after", 0.3)
    with closing(open_pool(kind)) as pool:
        pool.start()
        [process] = [worker.pid for worker in pool._workers]
        os.kill(process, signal.SIGSTOP)
        caplog.clear()
        keys, until = pool.submit([ARGUMENTS[kind]], ["p"], [[0]]), time.monotonic() + LIMIT_S

        def on_wait(graded: int, label: str | None) -> None:
            if caplog.messages or time.monotonic() > until:
                os.kill(process, signal.SIGCONT)

        results = pool.wait(keys, on_wait) if how == "wait" else take(pool, lambda: on_wait(0, None))
    assert len(results) == 1
    [line] = caplog.messages
    title = "grader 'stalled:judge'" if kind == "grader" else "task.tools"
    assert line.startswith(f"waiting for {title} (process {process}) since ")
    assert "grading.deadline" in line


def take(pool: WorkerPool, meanwhile: Callable[[], None]) -> list[object]:
    """Return the results of a pool that is polled beside other work."""
    results: dict[int, object] = {}
    while not results:
        results |= pool.poll(0.05)
        meanwhile()
    return [*results.values()]
