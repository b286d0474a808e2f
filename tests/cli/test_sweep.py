"""`bandpo sweep`: all runs finish in one folder, also after a kill, Ctrl-C or a failed run."""

import csv
import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from bandpo_cli.config.layers import read_layer, resolve
from bandpo_cli.experiments import train
from bandpo_cli.metric_names import without_clock
from tests.cli.eval_command import usage_error
from tests.cli.processes import check_ended, count_lines, descendants, wait_until
from tests.cli.train_runs import record, summary
from tests.commands import Forked, run_bandpo

pytestmark = pytest.mark.slow

SMALL = [
    "--steps", "3", "--set", "sampling.prompts=4", "--set", "sampling.samples=4", "--set", "optim.updates=2",
    "--set", "evaluation.problems=4", "--set", "evaluation.samples=4", "--set", "evaluation.k=[4]",
]  # fmt: skip


def begin(place: Path, *arguments: str) -> Forked:
    """Start a sweep without MLflow whose runs are forked from its process."""
    words = ["sweep", *arguments, "--no-mlflow"]
    return Forked(*words, cwd=place, fork_children=True, COLUMNS="120", OMP_NUM_THREADS="1")


def resume(place: Path, name: str) -> str:
    """Resume a sweep to its end and return its output."""
    words = ["sweep", "--resume", name]
    done = run_bandpo(*words, cwd=place, fork_children=True, COLUMNS="120", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_alone(plan: Path, place: Path) -> list[dict]:
    """Run the plan of a run in this process and return its metrics."""
    return [without_clock(line) for line in train(resolve([read_layer(plan)]), place, "alone").records]


def test_a_killed_sweep_resumes_without_repeating_finished_runs(tmp_path: Path) -> None:
    sweep = tmp_path / "runs" / "a"
    first = begin(tmp_path, "--delta", "0.01,0.1", "--seeds", "0", *SMALL, "--jobs", "1", "--name", "a")
    wait_until(first, (sweep / "0.1-s0" / "metrics.jsonl").exists)  # the second run has started
    left = descendants(first.pid)
    first.kill()
    first.communicate()
    check_ended(left)
    finished = (sweep / "0.01-s0" / "summary.json").stat().st_mtime_ns
    interrupted_config = (sweep / "0.1-s0" / "config.yaml").read_text()
    assert not (sweep / "0.1-s0" / "summary.json").exists()

    assert "2 of 2 runs finished" in resume(tmp_path, "a")
    assert [run["name"] for run in yaml.safe_load((sweep / "sweep.yaml").read_text())["runs"]] == [
        "0.01-s0", "0.1-s0",
    ]  # fmt: skip
    for name in ("0.01-s0", "0.1-s0"):
        assert summary(sweep / name)["status"] == "FINISHED"
        assert [line["step"] for line in record(sweep / name)] == [0, 1, 2, 3]
    board = (sweep / "report" / "leaderboard.csv").read_text().splitlines()
    assert sorted(line.partition(",")[0] for line in board[1:]) == ["0.01", "0.1"]
    assert (sweep / "0.01-s0" / "summary.json").stat().st_mtime_ns == finished
    assert (sweep / "attempts" / "0.1-s0-1" / "config.yaml").read_text() == interrupted_config
    assert run_alone(sweep / "plans" / "0.1-s0.yaml", tmp_path) == record(sweep / "0.1-s0")

    (sweep / "plans" / "0.01-s0.yaml").unlink()
    line = usage_error("sweep", "--resume", "a", cwd=tmp_path)
    assert "settings of run '0.01-s0' are missing" in line


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_runs_of_two_ranks_end_with_a_killed_sweep_and_resume_as_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU the ranks of a run are processes on the CPU; the run is that of one rank."""
    arguments = [
        "--seeds",
        "0",
        *SMALL,
        "--gpus-per-run",
        "2",
        "--name",
        "two",
        "--set",
        "checkpoint.every=1",
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = tmp_path / "runs" / "two" / "band-s0"
    first = begin(tmp_path, *arguments)
    wait_until(first, lambda: any(run.glob("checkpoints/step-*/trainer/state.json")))
    left = descendants(first.pid)
    assert len(left) >= 3, "the launcher and two ranks"
    first.kill()
    first.communicate()
    check_ended(left)
    assert not (run / "summary.json").exists()

    printed = resume(tmp_path, "two")
    assert "1 at a time, 2 processes of 1 thread each" in printed
    assert "1 of 1 runs finished" in printed
    assert json.loads((run / "env.json").read_text())["ranks"] == 2
    alone = run_alone(tmp_path / "runs/two/plans/band-s0.yaml", tmp_path)
    assert len(alone) == 4
    for line, expected in zip(record(run), alone, strict=True):
        assert line == pytest.approx(expected, abs=1e-4, rel=1e-4)


def test_a_failed_run_does_not_stop_others(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    # With this learning rate the weights are not finite after the first update.
    file.write_text(
        "arms: {good: {}, bad: {optim.lr: 1.0e+30, optim.warmup_steps: 0, optim.max_grad_norm: null}}\n"
    )
    words = ["sweep", str(file), *SMALL, "--jobs", "2", "--name", "b"]
    done = run_bandpo(*words, cwd=tmp_path, COLUMNS="120", OMP_NUM_THREADS="1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 of 2 runs finished" in done.stdout
    assert "failed  bad-s0: exit code 1: error: " in done.stdout
    assert "bandpo sweep --resume b" in done.stderr
    assert summary(tmp_path / "runs/b/good-s0")["status"] == "FINISHED"

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_all_runs_save_their_state(tmp_path: Path, number: int) -> None:
    """The time limit of a cluster sends SIGTERM to all processes of the job: the sweep and its runs."""
    sweep = begin(tmp_path, "--seeds", "0,1", *SMALL, "--steps", "500", "--name", "c", "--jobs", "2")
    runs = [tmp_path / "runs/c" / name for name in ("band-s0", "band-s1")]
    wait_until(sweep, lambda: all(count_lines(run) > 2 for run in runs))
    if number == signal.SIGTERM:
        for run in runs:
            os.kill(json.loads((run / ".lock").read_text())["pid"], number)
    sweep.send_signal(number)
    out, err = sweep.communicate(timeout=60)
    assert sweep.returncode == 128 + number, err
    sender = "SIGTERM" if number == signal.SIGTERM else "Ctrl-C"
    assert f"stopped by {sender}, 0 of 2 runs are finished; resume with: bandpo sweep --resume c" in out
    for run in runs:
        ended = summary(run)
        assert (ended["status"], ended["error"]) == ("KILLED", "stopped by request")
        assert (run / "checkpoints" / f"step-{ended['steps']:06d}" / "trainer" / "state.json").is_file()


def test_a_run_on_a_local_ray_cluster_equals_that_of_train(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = ["--seeds", "0", *SMALL, "--steps", "1", "--no-mlflow", "--name", "there", "--executor", "ray"]
    done = run_bandpo("sweep", *words, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "1 of 1 runs finished" in done.stdout
    there = tmp_path / "runs/there"
    assert record(there / "band-s0") == run_alone(there / "plans/band-s0.yaml", tmp_path)
