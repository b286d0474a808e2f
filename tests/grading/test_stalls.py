"""A stopped worker of a grader or of tools is named, while its pool waits and also where the pool is only polled."""

import os
import signal
from contextlib import closing

import pytest

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.grading.tools import ToolPool
from bandpo_cli.grading.workers import GraderWorkers
from bandpo_cli.processes import watch

CODE = '''
def judge(text, answer, extra):
    return True

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
'''


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grader", "tools"])
def test_a_stopped_worker_is_named(kind, tmp_path, monkeypatch, caplog):
    (tmp_path / "stalled.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watch, "stall_after", 0.3)
    config, is_grader = GradingConfig(workers=1, deadline=60), kind == "grader"
    opened = GraderWorkers("stalled:judge", config) if is_grader else ToolPool(["stalled:add"], config)
    with closing(opened) as pool:
        pool.start()
        [process] = [worker.pid for worker in pool._workers]
        os.kill(process, signal.SIGSTOP)
        caplog.clear()

        def on_wait(graded: int, label: str | None) -> None:
            if caplog.messages:
                os.kill(process, signal.SIGCONT)

        arguments = ["", "", {}, ""] if is_grader else ["add", {"a": 1, "b": 2}]
        keys = pool.submit([arguments], ["p"], [[0]])
        if is_grader:
            assert len(pool.wait(keys, on_wait)) == 1
        else:
            while not pool.poll(0.05):
                on_wait(0, None)
    [line] = caplog.messages
    title = "grader 'stalled:judge'" if is_grader else "task.tools"
    assert line.startswith(f"waiting for {title} (process {process}) since ")
    assert "grading.deadline" in line
