"""Pool of child processes: slots and their environments, stop signals, and exit with the parent."""

import signal
import sys
from pathlib import Path

import pytest

from bandpo_cli.sweeps.estimate import total_seconds
from bandpo_cli.sweeps.scheduler import LocalPool, Pool, slot_environments, visible_gpus
from tests.processes.checks import check_ended, wait_for


def start(pool: LocalPool, tmp_path: Path, name: str, code: str) -> None:
    pool.start(name, [sys.executable, "-c", code], tmp_path / "logs" / f"{name}.log")


def wait(pool: Pool, count: int) -> dict[str, int]:
    codes: dict[str, int] = {}
    wait_for(lambda: codes.update(pool.poll_finished()) or len(codes) >= count)
    return codes


def log_of(tmp_path: Path, name: str) -> str:
    path = tmp_path / "logs" / f"{name}.log"
    return path.read_text() if path.exists() else ""


def test_jobs_have_the_environment_of_their_slot_and_exit_codes_are_returned(tmp_path, monkeypatch):
    """The variables of a slot replace those of the environment."""
    monkeypatch.setenv("PLACE", "everywhere")
    monkeypatch.setenv("KEPT", "yes")
    pool = LocalPool([{"PLACE": "a"}, {"PLACE": "b"}])
    code = "import os, time; print(os.environ['PLACE'], os.environ['KEPT'], flush=True); time.sleep(0.2)"
    start(pool, tmp_path, "one", code)
    start(pool, tmp_path, "two", code + "; raise SystemExit(3)")
    assert pool.free_slots == 0
    assert wait(pool, 2) == {"one": 0, "two": 3}
    assert pool.free_slots == 2
    assert [log_of(tmp_path, name) for name in ("one", "two")] == ["a yes\n", "b yes\n"]


def test_a_job_gets_the_slot_that_is_free(tmp_path):
    """Never the slot of a job that still runs: both would use one GPU."""
    pool = LocalPool([{"PLACE": "a"}, {"PLACE": "b"}])
    code = "import os; print(os.environ['PLACE'], flush=True)"
    start(pool, tmp_path, "short", code)
    start(pool, tmp_path, "long", code + "; import time; time.sleep(60)")
    assert wait(pool, 1) == {"short": 0}
    start(pool, tmp_path, "next", code)
    assert wait(pool, 1) == {"next": 0}
    pool.stop()
    assert [log_of(tmp_path, name) for name in ("short", "next")] == ["a\n", "a\n"]


@pytest.mark.slow
def test_stop_interrupts_and_then_kills_the_process_group(tmp_path):
    pool = LocalPool([{}, {}], grace_s=1.0)
    handling = "import time\nprint('open', flush=True)\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('closed')"
    ignoring = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "child = subprocess.Popen([sys.executable, '-c', "
        "'import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)']); "
        "print(child.pid, flush=True); time.sleep(60)"
    )
    start(pool, tmp_path, "handling", handling)
    start(pool, tmp_path, "ignoring", ignoring)
    wait_for(lambda: log_of(tmp_path, "handling") and log_of(tmp_path, "ignoring"))
    pool.stop()
    assert wait(pool, 2) == {"handling": 0, "ignoring": -signal.SIGKILL}
    assert log_of(tmp_path, "handling") == "open\nclosed\n"
    check_ended([int(log_of(tmp_path, "ignoring"))])


def test_slots_share_cores_and_gpus():
    assert slot_environments(2, 8, [], {}) == [{"OMP_NUM_THREADS": "4"}] * 2
    assert slot_environments(3, 2, [], {}) == [{"OMP_NUM_THREADS": "1"}] * 3
    assert slot_environments(1, 8, [], {"OMP_NUM_THREADS": "2"}) == [{"OMP_NUM_THREADS": "2"}]
    gpus = [slot["CUDA_VISIBLE_DEVICES"] for slot in slot_environments(3, 8, ["4", "6"], {})]
    assert gpus == ["4", "6", "4"]
    for text, visible in {"1, 3": ["1", "3"], "": [], "-1": []}.items():
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": text}) == visible


def test_slots_of_several_ranks_have_disjoint_sets_of_gpus():
    gpus = ["0", "1", "2", "3", "4"]
    slots = slot_environments(3, 16, gpus, {}, ranks=2)
    # A fifth GPU is left over; the third slot shares the GPUs of the first.
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["0,1", "2,3", "0,1"]
    assert {slot["OMP_NUM_THREADS"] for slot in slots} == {"2"}, "16 cores for 6 ranks"
    assert slot_environments(1, 4, [], {}, ranks=2) == [{"OMP_NUM_THREADS": "2"}]
    assert slot_environments(2, 2, [], {}, ranks=2) == [{"OMP_NUM_THREADS": "1"}] * 2
    assert slot_environments(1, 8, ["7"], {}, ranks=1)[0]["CUDA_VISIBLE_DEVICES"] == "7"


def test_total_time_of_runs_in_slots():
    assert total_seconds([10, 10, 10], 1) == 30
    assert total_seconds([10, 10, 10], 2) == 20
    assert total_seconds([30, 10, 10, 10], 2) == 30
