"""Pool and scheduler of a sweep: slots, stop signals, order, new attempts, resumes and early stops."""

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bandpo_cli.storage.checkpoints import Progress, write_trainer_state
from bandpo_cli.storage.sweep_folder import SweepFolder, SweepRun
from bandpo_cli.sweeps import scheduler
from bandpo_cli.sweeps.estimate import total_seconds
from bandpo_cli.sweeps.scheduler import (
    LocalPool,
    Pool,
    RunState,
    Status,
    run_sweep,
    runs_to_stop,
    slot_environments,
    train_command,
    visible_gpus,
)
from bandpo_cli.sweeps.sweep_plan import SweepConfig, plan_runs
from tests.processes.checks import check_ended, wait_for

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
    status = "FINISHED" if accuracy >= 0 else "FAILED"
finally:
    (folder / "summary.json").write_text(json.dumps({"status": status, "steps": step}))
sys.exit(0 if accuracy >= 0 else 1)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "POLL_S", 0.02)
    sweep = SweepConfig(axes={"bounds.delta": [0.1, 0.2]}, fixed={"steps": 4}, seeds=(0, 1))
    return SweepFolder.create(tmp_path, "s", plan_runs(sweep), "0.1", {})


def execute(
    folder: SweepFolder, monkeypatch: pytest.MonkeyPatch, accuracy: Mapping[str, float], wait: float = 0.0,
    margin: float | None = None, slots: int = 2,
) -> tuple[dict[str, str], list[str], dict[str, RunState]]:  # fmt: skip
    """Run the sweep with `WRITER` as the command of every new attempt; return failures, started runs and states."""
    started = []

    def command(sweep: SweepFolder, name: str) -> list[str]:
        if "--resume" in train_command(sweep, name):
            return [sys.executable, "-c", "import sys; sys.exit(2)"]
        started.append(name)
        return [sys.executable, "-S", "-c", WRITER, str(sweep.path / name), str(accuracy[name]), str(wait)]

    latest = {}
    monkeypatch.setattr(scheduler, "train_command", command)
    steps = {run.name: 4 for run in folder.runs}
    failures = run_sweep(folder, LocalPool([{}] * slots), steps, latest.update, margin=margin)
    return failures, started, latest


ALL = ["0.1-s0", "0.2-s0", "0.1-s1", "0.2-s1"]


def test_all_runs_are_executed_once_and_failed_ones_again(folder, monkeypatch):
    failures, started, states = execute(folder, monkeypatch, {**dict.fromkeys(ALL, 0.5), "0.2-s0": -1.0})
    assert started == ALL
    assert set(failures) == {"0.2-s0"}
    assert failures["0.2-s0"].startswith("exit code 1")
    assert [states[name].status for name in ALL] == ["finished", "failed", "finished", "finished"]
    reopened = SweepFolder.open(folder.path.parent, "s")
    failures, started, _ = execute(reopened, monkeypatch, dict.fromkeys(ALL, 0.5))
    assert (failures, started) == ({}, ["0.2-s0"])
    assert (folder.path / "attempts" / "0.2-s0-1" / "metrics.jsonl").is_file()
    assert execute(reopened, monkeypatch, {}) == ({}, [], {})


def test_an_error_after_the_end_of_a_run_is_a_warning(folder, monkeypatch, caplog):
    """The run is in the report, and no resume of the sweep starts it again."""
    code = "import pathlib, sys; path = pathlib.Path(sys.argv[1]); path.mkdir(); print('error: no font'); "
    code += "(path / 'summary.json').write_text('{\"status\": \"FINISHED\"}'); sys.exit(1)"
    command = [sys.executable, "-S", "-c", code]
    monkeypatch.setattr(scheduler, "train_command", lambda sweep, name: [*command, str(sweep.path / name)])
    assert run_sweep(folder, LocalPool([{}] * 2), dict.fromkeys(ALL, 4), lambda _: None) == {}
    assert folder.pending() == []
    warning = "run 0.1-s0 is finished, but its process ended otherwise: exit code 1: error: no font"
    assert warning in caplog.text


STUBBORN = """
import json, signal, sys, time
from pathlib import Path
folder, name = Path(sys.argv[1]), sys.argv[2]
(folder / name).mkdir()
if name == "0.2-s0":
    signal.signal(signal.SIGINT, lambda *_: (folder / "interrupted").touch())
score = 0.1 if name == "0.2-s0" else 0.9
with (folder / name / "metrics.jsonl").open("a") as file:
    for step in range(1 + 2 * (not name.endswith("s1"))):
        print(json.dumps({"step": step, "eval/x/mean_at_4": score, "time/step": 0.1}), file=file, flush=True)
if name == "0.1-s0":
    while not (folder / "interrupted").exists():
        time.sleep(0.01)
if name == "0.2-s0":  # it ends when the scheduler has started the last run, or is killed
    while not (folder / "0.2-s1").exists():
        time.sleep(0.01)
summary = {"status": "KILLED" if name == "0.2-s0" else "FINISHED"}
(folder / name / "summary.json").write_text(json.dumps(summary))
"""


@pytest.mark.slow
def test_runs_start_while_another_one_ignores_the_request_to_stop(folder, monkeypatch):
    def command(sweep: SweepFolder, name: str) -> list[str]:
        return [sys.executable, "-S", "-c", STUBBORN, str(sweep.path), name]

    monkeypatch.setattr(scheduler, "train_command", command)
    latest = {}
    run_sweep(folder, LocalPool([{}] * 2), dict.fromkeys(ALL, 4), latest.update, margin=0.3)
    assert [latest[name].status for name in ALL] == ["finished", "stopped", "finished", "finished"]
    # With a SIGKILL, after a scheduler that waits for the grace period, there is no summary.
    assert (folder.path / "0.2-s0" / "summary.json").exists()


@pytest.mark.slow
def test_a_run_far_behind_is_stopped_and_not_started_again(folder, monkeypatch):
    accuracy = {"0.1-s0": 0.9, "0.1-s1": 0.9, "0.2-s0": 0.2, "0.2-s1": 0.85}
    failures, started, states = execute(folder, monkeypatch, accuracy, wait=0.3, margin=0.3)
    assert failures == {}
    assert started == ALL
    assert [states[name].status for name in ALL] == ["finished", "stopped", "finished", "finished"]
    assert json.loads((folder.path / "0.2-s0" / "summary.json").read_text())["status"] == "KILLED"
    assert "0.200 at step" in folder.stopped()["0.2-s0"]
    assert execute(folder, monkeypatch, accuracy)[:2] == ({}, [])


def checkpoint(run: Path, step: int, status: str | None) -> None:
    """Write the files of a run that ended after a checkpoint; status None: killed without a summary."""
    place = run / "checkpoints" / f"step-{step:06d}"
    place.mkdir(parents=True)
    write_trainer_state(place, Progress(step=step, updates=0, skipped_in_a_row=0, position=0, problems=""))
    if status is not None:
        (run / "summary.json").write_text(json.dumps({"status": status}))


@pytest.mark.parametrize(("status", "resumed"), [("KILLED", True), (None, True), ("FAILED", False)])
def test_a_killed_run_is_resumed_and_a_failed_one_starts_again(folder, status, resumed):
    run = folder.path / "0.1-s0"
    checkpoint(run, 2, status)
    command = train_command(folder, "0.1-s0")
    assert ("--resume" in command, "--config" in command) == (resumed, not resumed)
    assert run.exists() == resumed
    assert (folder.path / "attempts").exists() != resumed


def test_a_run_that_cannot_be_resumed_is_archived_and_one_slot_runs_one_at_a_time(folder, monkeypatch):
    """After a refused resume the next attempt starts again."""
    together = []
    free_slots = LocalPool.free_slots.fget
    counted = property(lambda pool: together.append(len(pool._jobs)) or free_slots(pool))
    monkeypatch.setattr(LocalPool, "free_slots", counted)
    checkpoint(folder.path / "0.1-s0", 2, "KILLED")
    failures, started, _ = execute(folder, monkeypatch, dict.fromkeys(ALL, 0.5), slots=1)
    assert list(failures) == ["0.1-s0"]
    assert started == ALL[1:]
    assert max(together) == 1
    assert (folder.path / "attempts" / "0.1-s0-1").is_dir()
    failures, started, _ = execute(folder, monkeypatch, dict.fromkeys(ALL, 0.5))
    assert (failures, started) == ({}, ALL[:1])


RUNS = [SweepRun("a-s0", "a", 0), SweepRun("a-s1", "a", 1), SweepRun("b-s0", "b", 0)]


def state(status: Status, evaluations: dict[int, float]) -> RunState:
    return RunState(status, max(evaluations, default=0), 100, evaluations=evaluations)


NOTHING = state("waiting", {})


def test_a_run_far_behind_another_arm_is_stopped_with_its_reason():
    behind, ahead = state("running", {0: 0.2, 60: 0.3}), state("finished", {0: 0.2, 60: 0.45, 100: 0.5})
    reasons = runs_to_stop(RUNS, {"a-s0": behind, "a-s1": NOTHING, "b-s0": ahead}, 0.1)
    assert reasons == {"a-s0": "held-out accuracy 0.300 at step 60, b had 0.450"}
    rewarded = replace(behind, metric="reward")
    reasons = runs_to_stop(RUNS, {"a-s0": rewarded, "a-s1": NOTHING, "b-s0": ahead}, 0.1)
    assert reasons == {"a-s0": "held-out reward 0.300 at step 60, b had 0.450"}


A0, A1 = state("finished", {60: 0.5}), state("finished", {60: 0.3})  # 0.4 on average
AHEAD = state("finished", {40: 0.9, 60: 0.32, 99: 0.9, 100: 0.9})


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ((state("running", {40: 0.1}), NOTHING, AHEAD), set()),  # before half of the steps
        ((state("running", {40: 0.1, 60: 0.3}), NOTHING, AHEAD), set()),  # the latest evaluation counts
        ((state("running", {50: 0.1}), NOTHING, AHEAD), set()),  # no other variant was evaluated at step 50
        ((state("running", {60: 0.1, 99: 0.1}), NOTHING, AHEAD), {"a-s0"}),
        ((state("running", {60: 0.1, 100: 0.1}), NOTHING, AHEAD), set()),  # trained, it only closes
        ((state("running", {60: 0.1}), state("finished", {60: 0.9}), NOTHING), set()),  # seeds of one variant
        ((A0, A1, state("running", {60: 0.31})), set()),
        ((A0, A1, state("running", {60: 0.29})), {"b-s0"}),
        ((A0, A1, state("failed", {60: 0.1})), set()),
    ],
)
def test_runs_are_compared_late_and_with_the_mean_of_another_variant(runs, expected):
    assert set(runs_to_stop(RUNS, dict(zip([run.name for run in RUNS], runs, strict=True)), 0.1)) == expected


def start(pool: LocalPool, tmp_path: Path, name: str, code: str) -> None:
    pool.start(name, [sys.executable, "-c", code], tmp_path / "logs" / f"{name}.log")


def wait(pool: Pool, count: int) -> dict[str, int]:
    codes = {}
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


@pytest.mark.parametrize(
    ("slots", "cores", "ranks", "threads"), [(2, 8, 1, 4), (3, 2, 1, 1), (1, 4, 2, 2), (2, 2, 2, 1)]
)
def test_slots_and_their_ranks_share_cores(slots, cores, ranks, threads):
    expected = [{"OMP_NUM_THREADS": f"{threads}"}] * slots
    assert slot_environments(slots, cores, [], {}, ranks=ranks) == expected
    chosen = {"OMP_NUM_THREADS": "7"}
    assert slot_environments(slots, cores, [], chosen, ranks=ranks) == [chosen] * slots


def test_slots_of_several_ranks_have_disjoint_sets_of_gpus():
    """A fifth GPU is left over; the third slot shares the GPUs of the first."""
    for gpus, ranks, sets in ((["4", "6"], 1, ["4", "6", "4"]), ([*"01234"], 2, ["0,1", "2,3", "0,1"])):
        slots = slot_environments(3, 16, gpus, {}, ranks=ranks)
        assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots] == sets
        assert {slot["OMP_NUM_THREADS"] for slot in slots} == {f"{16 // (3 * ranks)}"}
    for text, visible in {"1, 3": ["1", "3"], "": [], "-1": []}.items():
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": text}) == visible


def test_total_time_of_runs_in_slots():
    assert (total_seconds([10, 10, 10], 2), total_seconds([30, 10, 10, 10], 2)) == (20, 30)
