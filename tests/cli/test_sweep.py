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
from bandpo_cli.metric_names import FLOPS, without_clock
from bandpo_cli.processes.watch import PARENT_INTERVAL_S
from bandpo_cli.sweeps import sweep_run
from bandpo_cli.sweeps.scheduler import LocalPool
from tests.cli.eval_command import usage_error
from tests.cli.processes import count_lines, descendants, end_of, kill_parent, wait_until
from tests.cli.train_runs import record, sets, summary
from tests.commands import Forked

pytestmark = pytest.mark.slow

SETTINGS = "sampling.prompts=2 sampling.samples=2 optim.updates=2 evaluation.problems=2 evaluation.samples=2 "
SMALL = ["--steps", "2", *sets(SETTINGS + "evaluation.k=[2]"), "--no-mlflow"]


def no_estimate() -> None:
    """Print no estimate of the time, which needs a trial run as long as the runs of these tests."""
    sweep_run.estimate_time = lambda *_: None


def begin(place: Path, *arguments: str, with_trial: bool = False) -> Forked:
    """Start a sweep whose runs are forked from its process."""
    before = None if with_trial else no_estimate
    variables = {"COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    return Forked("sweep", *arguments, cwd=place, before=before, fork_children=True, **variables)


def resume(place: Path, name: str) -> str:
    """Resume a sweep to its end and return its output."""
    out, _ = end_of(begin(place, "--resume", name))
    return out


def run_alone(plan: Path, place: Path) -> list[dict]:
    """Run the plan of a run in this process and return its metrics."""
    return [without_clock(line) for line in train(resolve([read_layer(plan)]), place, "alone").records]


def test_a_killed_sweep_resumes_without_repeating_finished_runs(tmp_path):
    sweep = tmp_path / "runs" / "a"
    words = ["--delta", "0.01,0.1", "--seeds", "0", *SMALL, "--jobs", "1", "--name", "a"]
    first = begin(tmp_path, *words, with_trial=True)
    wait_until(first, (sweep / "0.1-s0" / "metrics.jsonl").exists)  # the second run has started
    kill_parent(first, descendants(first.pid), PARENT_INTERVAL_S)
    finished = (sweep / "0.01-s0" / "summary.json").stat().st_mtime_ns
    interrupted_config = (sweep / "0.1-s0" / "config.yaml").read_text()
    assert not (sweep / "0.1-s0" / "summary.json").exists()

    assert "2 of 2 runs finished" in resume(tmp_path, "a")
    names = [run["name"] for run in yaml.safe_load((sweep / "sweep.yaml").read_text())["runs"]]
    assert names == ["0.01-s0", "0.1-s0"]
    for name in names:
        assert summary(sweep / name)["status"] == "FINISHED"
        assert [line["step"] for line in record(sweep / name)] == [0, 1, 2]
    board = (sweep / "report" / "leaderboard.csv").read_text().splitlines()
    assert sorted(line.partition(",")[0] for line in board[1:]) == ["0.01", "0.1"]
    assert (sweep / "0.01-s0" / "summary.json").stat().st_mtime_ns == finished
    assert (sweep / "attempts" / "0.1-s0-1" / "config.yaml").read_text() == interrupted_config
    assert run_alone(sweep / "plans" / "0.1-s0.yaml", tmp_path) == record(sweep / "0.1-s0")

    (sweep / "plans" / "0.01-s0.yaml").unlink()
    usage_error("sweep", "--resume", "a", cwd=tmp_path, parts=["settings of run '0.01-s0' are missing"])


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_runs_of_two_ranks_end_with_their_sweep(tmp_path, monkeypatch):
    """Without a GPU the ranks of a run are processes on the CPU; the run is that of one rank."""
    words = ["--seeds", "0", *SMALL, "--gpus-per-run", "2", "--set", "checkpoint.every=1", "--name", "two"]
    words += ["--steps", "4"]  # the ranks look at the launcher only after it has ended
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = tmp_path / "runs" / "two" / "band-s0"
    first = begin(tmp_path, *words)
    wait_until(first, lambda: any(run.glob("checkpoints/step-*/trainer/state.json")))
    left = descendants(first.pid)
    assert len(left) >= 3, "the launcher and two ranks"
    kill_parent(first, left, PARENT_INTERVAL_S)
    assert not (run / "summary.json").exists()

    printed = resume(tmp_path, "two")
    assert "1 at a time, 2 processes of 1 thread each" in printed
    assert "1 of 1 runs finished" in printed
    assert json.loads((run / "env.json").read_text())["ranks"] == 2
    alone = run_alone(tmp_path / "runs/two/plans/band-s0.yaml", tmp_path)
    assert len(alone) == 5
    for line, expected in zip(record(run), alone, strict=True):
        # A prompt whose completions two ranks have goes through the model twice.
        assert line == pytest.approx(expected | {FLOPS: line[FLOPS]}, abs=1e-4, rel=1e-4)


def test_a_failed_run_does_not_stop_others(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    file = tmp_path / "two.yaml"
    # With this learning rate the weights are not finite after the first update.
    file.write_text(
        "variants: {good: {}, bad: {optim.lr: 1.0e+30, optim.warmup_steps: 0, optim.max_grad_norm: null}}\n"
    )
    store = (tmp_path / "mlruns").as_uri()  # of files: a fork shares no connection to a database
    tracking = ["--mlflow", "--tracking-uri", store]
    sweep = begin(tmp_path, str(file), *SMALL, *tracking, "--jobs", "2", "--name", "b")
    out, err = end_of(sweep, 1)
    assert "1 of 2 runs finished" in out
    assert "failed  bad-s0: exit code 1: error: " in out
    assert "bandpo sweep --resume b" in err
    assert summary(tmp_path / "runs/b/good-s0")["status"] == "FINISHED"
    with (tmp_path / "runs/b/report/leaderboard.csv").open(encoding="utf-8") as board:
        assert [row["variant"] for row in csv.DictReader(board)] == ["good"]

    from mlflow.tracking import MlflowClient

    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("bandpo")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    status = {name: run.info.status for name, run in runs.items()}
    assert status == {"b": "FAILED", "good-s0": "FINISHED", "bad-s0": "FAILED"}
    for name in ("good-s0", "bad-s0"):
        assert runs[name].data.tags["mlflow.parentRunId"] == runs["b"].info.run_id


def test_a_signal_lets_all_runs_save_their_state(tmp_path):
    """The time limit of a cluster sends SIGTERM to all processes of the job. The sweep forwards it to its runs, too."""
    sweep = begin(tmp_path, "--seeds", "0,1", *SMALL, "--steps", "500", "--name", "c", "--jobs", "2")
    runs = [tmp_path / "runs/c" / name for name in ("band-s0", "band-s1")]
    wait_until(sweep, lambda: all(count_lines(run) > 2 for run in runs))
    part = f"c is being written by process {sweep.pid} on"
    usage_error("sweep", "--resume", "c", cwd=tmp_path, parts=[part])
    os.kill(json.loads((runs[0] / ".lock").read_text())["pid"], signal.SIGTERM)  # not the other run
    sweep.terminate()
    out, _ = end_of(sweep, 143)
    assert "stopped by SIGTERM with 0 of 2 runs finished; resume with: bandpo sweep --resume c" in out
    for run in runs:
        ended = summary(run)
        assert (ended["status"], ended["error"]) == ("KILLED", "stopped by request")
        assert (run / "checkpoints" / f"step-{ended['steps']:06d}" / "trainer" / "state.json").is_file()


def local_ray() -> None:
    """Execute the runs of Ray in this process's own pool; tests/sweeps starts a cluster."""
    no_estimate()
    sweep_run.RayPool = lambda address, jobs, variables, ranks: LocalPool([{**os.environ, **variables}])


def test_the_executor_ray_executes_all_runs(tmp_path):
    pytest.importorskip("ray")
    words = ["sweep", "--seeds", "0", *SMALL, "--steps", "1", "--name", "there", "--executor", "ray"]
    sweep = Forked(*words, cwd=tmp_path, before=local_ray, fork_children=True, OMP_NUM_THREADS="1")
    out, _ = end_of(sweep)
    assert "1 of 1 runs finished" in out
    assert [line["step"] for line in record(tmp_path / "runs/there/band-s0")] == [0, 1]
