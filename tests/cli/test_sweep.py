"""`bandpo sweep`: all runs finish in one folder, also after a kill, Ctrl-C or a failed run."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from bandpo_cli.config.layers import read_layer, resolve
from bandpo_cli.experiments import train
from bandpo_cli.metric_names import without_clock
from tests.cli.eval_command import start
from tests.cli.test_train_stopped import count_lines, wait_until
from tests.cli.train_runs import record as records
from tests.commands import run_bandpo

SMALL = [
    "--steps", "3", "--set", "sampling.prompts=4", "--set", "sampling.samples=4", "--set", "optim.updates=2",
    "--set", "evaluation.problems=4", "--set", "evaluation.samples=4", "--set", "evaluation.k=[4]",
]  # fmt: skip


def bandpo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_bandpo("sweep", *arguments, cwd=cwd, timeout=300, COLUMNS="120", OMP_NUM_THREADS="1")


@pytest.mark.slow
def test_a_killed_sweep_resumes_without_repeating_finished_runs(tmp_path: Path) -> None:
    arguments = ["--delta", "0.01,0.1", "--seeds", "0,1", *SMALL, "--jobs", "2", "--name", "a", "--no-mlflow"]
    first = start(tmp_path, "sweep", *arguments)
    sweep = tmp_path / "runs" / "a"
    # Kill it when the runs of the first seed are finished and one of the second has started.
    wait_until(first, (sweep / "0.1-s1" / "metrics.jsonl").exists)
    first.kill()
    first.communicate()
    finished = {path.parent.name: path.stat().st_mtime_ns for path in sweep.glob("*/summary.json")}
    assert "0.1-s1" not in finished
    assert len(finished) >= 1
    interrupted_config = (sweep / "0.1-s1" / "config.yaml").read_text()

    done = bandpo("--resume", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 runs finished" in done.stdout
    names = [run["name"] for run in yaml.safe_load((sweep / "sweep.yaml").read_text())["runs"]]
    assert names == ["0.01-s0", "0.1-s0", "0.01-s1", "0.1-s1"]
    for name in names:
        assert json.loads((sweep / name / "summary.json").read_text())["status"] == "FINISHED"
        assert [line["step"] for line in records(sweep / name)] == [0, 1, 2, 3]
    board = (sweep / "report" / "leaderboard.csv").read_text().splitlines()
    assert sorted(line.partition(",")[0] for line in board[1:]) == ["0.01", "0.1"]
    for name, stamp in finished.items():
        assert (sweep / name / "summary.json").stat().st_mtime_ns == stamp
    assert (sweep / "attempts" / "0.1-s1-1" / "config.yaml").read_text() == interrupted_config

    # The run equals one of `bandpo train` with the same settings.
    alone = start(tmp_path, "train", "-c", str(sweep / "plans" / "0.1-s1.yaml"), "--name", "one")
    alone.communicate(timeout=120)
    assert records(tmp_path / "runs" / "one") == records(sweep / "0.1-s1")

    # A run whose folder was deleted is repeated; the others are not.
    shutil.rmtree(sweep / "0.01-s0")
    again = bandpo("--resume", "a", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "4 of 4 runs finished" in again.stdout
    (sweep / "plans" / "0.01-s0.yaml").unlink()
    gone = bandpo("--resume", "a", cwd=tmp_path)
    assert gone.returncode == 2
    assert "settings of run '0.01-s0' are missing" in gone.stderr


def processes_with(text: str) -> list[int]:
    """Return the processes whose command line has this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_runs_of_two_ranks_end_with_a_killed_sweep_and_resume_as_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU the ranks of a run are processes on the CPU; the run is that of one rank."""
    arguments = ["--seeds", "0", *SMALL, "--steps", "8", "--gpus-per-run", "2", "--name", "two"]
    arguments += ["--set", "checkpoint.every=1", "--no-mlflow"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    first = start(tmp_path, "sweep", *arguments)
    sweep = tmp_path / "runs" / "two"
    wait_until(first, lambda: any(sweep.glob("*/checkpoints/step-*/trainer/state.json")))
    plan = str(sweep / "plans")
    assert len(processes_with(plan)) >= 3, "the launcher and two ranks"
    first.kill()
    first.communicate()
    end = time.monotonic() + 60
    while processes_with(plan) and time.monotonic() < end:
        time.sleep(0.1)
    assert not processes_with(plan)
    (run,) = (path.parent for path in sweep.glob("*/config.yaml"))
    assert not (run / "summary.json").exists()

    done = bandpo("--resume", "two", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 at a time, 2 processes of 1 thread each" in done.stdout
    assert "1 of 1 runs finished" in done.stdout
    assert json.loads((run / "env.json").read_text())["ranks"] == 2
    alone = train(resolve([read_layer(sweep / "plans" / f"{run.name}.yaml")]), tmp_path, "one")
    lines = [without_clock(line) for line in alone.records]
    assert len(lines) == 9
    for line, expected in zip(records(run), lines, strict=True):
        assert line == pytest.approx(expected, abs=1e-4, rel=1e-4)


@pytest.mark.slow
def test_a_failed_run_does_not_stop_others_and_ctrl_c_stops_all(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    # With this learning rate the weights are not finite after the first update.
    file.write_text(
        "arms: {good: {}, bad: {optim.lr: 1.0e+30, optim.warmup_steps: 0, optim.max_grad_norm: null}}\n"
    )
    done = bandpo(str(file), *SMALL, "--jobs", "2", "--name", "b", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 of 2 runs finished" in done.stdout
    assert "failed  bad-s0: exit code 1: error: " in done.stdout
    assert "bandpo sweep --resume b" in done.stderr
    assert json.loads((tmp_path / "runs/b/good-s0/summary.json").read_text())["status"] == "FINISHED"

    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("bandpo")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"b", "good-s0", "bad-s0"}
    assert {runs[name].info.status for name in ("b", "bad-s0")} == {"FAILED"}
    stored = {file.path for file in client.list_artifacts(runs["b"].info.run_id)}
    assert stored == {"sweep.yaml", "report"}
    with (tmp_path / "runs/b/report/leaderboard.csv").open(encoding="utf-8") as file:
        board = {row["arm"]: row for row in csv.DictReader(file)}
    sent = runs["b"].data.metrics
    assert {name: value for name, value in sent.items() if "seconds" not in name} == {
        f"sweep/good/{column}": float(board["good"][column])
        for column in ("accuracy", "area", "entropy", "pass_at_4", "clipped")
        if board["good"].get(column)
    }
    assert "| good | 1 |" in runs["b"].data.tags["mlflow.note.content"]
    for name in ("good-s0", "bad-s0"):
        assert runs[name].data.tags["mlflow.parentRunId"] == runs["b"].info.run_id

    long = ["--seeds", "0,1", *SMALL, "--steps", "500", "--name", "c", "--no-mlflow", "--jobs", "2"]
    sweep = start(tmp_path, "sweep", *long)
    wait_until(sweep, lambda: len(list((tmp_path / "runs/c").glob("*/metrics.jsonl"))) == 2)
    sweep.send_signal(signal.SIGINT)
    out, err = sweep.communicate(timeout=60)
    assert sweep.returncode == 130, err
    assert "stopped by Ctrl-C, 0 of 2 runs are finished; resume with: bandpo sweep --resume c" in out
    for name in ("band-s0", "band-s1"):
        assert json.loads((tmp_path / "runs/c" / name / "summary.json").read_text())["status"] == "KILLED"


@pytest.mark.slow
@pytest.mark.parametrize("to_all", [False, True], ids=["sweep", "group"])
def test_sigterm_lets_the_runs_save_their_state(tmp_path: Path, to_all: bool) -> None:
    """The time limit of a cluster sends SIGTERM to the sweep, or to all processes of the job."""
    arguments = ["--seeds", "0", *SMALL, "--steps", "500", "--name", "c", "--no-mlflow"]
    sweep = start(tmp_path, "sweep", *arguments)
    run = tmp_path / "runs/c/band-s0"
    wait_until(sweep, lambda: count_lines(run) > 2)
    if to_all:
        os.kill(json.loads((run / ".lock").read_text())["pid"], signal.SIGTERM)
    sweep.terminate()
    out, err = sweep.communicate(timeout=60)
    assert sweep.returncode == 143, err
    assert "stopped by SIGTERM, 0 of 1 runs are finished; resume with: bandpo sweep --resume c" in out
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("KILLED", "stopped by request")
    assert (run / "checkpoints" / f"step-{summary['steps']:06d}" / "trainer" / "state.json").is_file()


@pytest.mark.slow
def test_runs_on_a_local_ray_cluster_equal_those_of_train(tmp_path: Path, one_thread: None) -> None:
    pytest.importorskip("ray")
    arguments = ["--delta", "0.01,0.1", *SMALL, "--no-mlflow", "--jobs", "2", "--name", "there"]
    done = bandpo(*arguments, "--executor", "ray", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 runs finished" in done.stdout
    for name in ("0.01-s0", "0.1-s0"):
        here = train(resolve([read_layer(tmp_path / f"runs/there/plans/{name}.yaml")]), tmp_path, name)
        assert records(tmp_path / "runs/there" / name) == [without_clock(line) for line in here.records]
