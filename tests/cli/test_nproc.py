"""`bandpo train --nproc` and torchrun: two ranks as processes that are killed, stopped and resumed."""

import json
import os
import signal
from pathlib import Path

import mlflow
import pytest

from bandpo_cli.metric_names import FLOPS
from tests.cli.processes import count_lines, end_of, ranks_of, wait_until
from tests.cli.train_runs import SMALL, file_contents, record, summary
from tests.commands import Forked
from tests.processes.checks import check_ended
from tests.training.several_ranks import free_port

pytestmark = pytest.mark.slow

STEPS = 12
SETTINGS = ["--steps", str(STEPS), *SMALL, "--set", "evaluation.every=6", "--set", "checkpoint.every=3"]

RESUME_SCRIPT = """
import json, os, sys
from pathlib import Path
from bandpo_cli.experiments import resume
from bandpo_cli.callbacks import CallbackBase

class Counter(CallbackBase):
    steps = 0

    def step(self, report):
        self.steps += 1

counter = Counter()
result = resume(sys.argv[1], callbacks=[counter])
content = [str(result.folder), result.status, len(result.records), counter.steps]
Path(f"result-{os.environ['RANK']}.json").write_text(json.dumps(content))
"""


def start_as_torchrun(place: Path, module: str, *arguments: str) -> list[Forked]:
    """Start two ranks with the environment that torchrun gives them."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    return [Forked(*arguments, cwd=place, module=module, **common, **rank) for rank in ranks]


def start_ranks(place: Path, *arguments: str) -> Forked:
    """Start a command whose two ranks are forked from its process."""
    words = ["train", *arguments, "--nproc", "2"]
    return Forked(*words, cwd=place, fork_children=True, OMP_NUM_THREADS="1")


def kill_rank(process: Forked, rank: int, folder: Path, lines: int) -> tuple[str, str]:
    """Kill a rank once metrics.jsonl has more than `lines` lines; return the output after the end of all."""
    wait_until(process, lambda: count_lines(folder) > lines)
    ranks = ranks_of(process.pid, folder)
    os.kill(ranks[rank], signal.SIGKILL)
    output = end_of(process, 1)
    check_ended(ranks, 0.0)
    return output


def test_two_ranks_are_killed_stopped_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    runs, store = tmp_path / "runs", (tmp_path / "mlruns").as_uri()
    complete = start_ranks(tmp_path, *SETTINGS, "--mlflow", "--tracking-uri", store, "--name", "complete")
    out, _ = end_of(complete)
    assert out.count("run folder") == 2  # at the start and in the summary, of rank 0 alone
    assert "2 processes, 2 of a step's 4 prompts each" in out
    assert json.loads((runs / "complete" / "env.json").read_text())["ranks"] == 2
    client = mlflow.MlflowClient(store)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    assert [run.info.run_name for run in client.search_runs(experiments)] == ["complete"]

    folder = runs / "a"
    process = start_ranks(tmp_path, *SETTINGS, "--name", "a")
    out, err = kill_rank(process, 1, folder, 4)
    assert err == (
        "error: rank 1 was killed by SIGKILL (as the system does when memory runs out); "
        "continue with: bandpo train --resume a --nproc 2\n"
    )
    assert summary(folder)["status"] == "FAILED"
    assert summary(folder)["error"].startswith("LostRankError: lost the connection to another rank, whose")
    assert "resume with: bandpo train --resume a --nproc 2" in out

    before = count_lines(folder)
    process = start_ranks(tmp_path, "--resume", "a")
    wait_until(process, lambda: count_lines(folder) > before)
    ranks = ranks_of(process.pid, folder)
    process.send_signal(signal.SIGINT)
    out, err = end_of(process, 130)
    check_ended(ranks, 0.0)
    assert err == "stopping after this step and its checkpoint; press Ctrl-C again to abort the step\n"
    stopped = summary(folder)["steps"]
    assert f"stopped by Ctrl-C after step {stopped}" in out
    assert summary(folder)["status"] == "KILLED"
    assert (folder / "checkpoints" / f"step-{stopped:06d}").is_dir()

    process = start_ranks(tmp_path, "--resume", "a")
    out, err = kill_rank(process, 0, folder, stopped + 1)
    assert err.startswith("error: rank 0 was killed by SIGKILL")
    assert err.count("\n") == 1
    assert not (folder / "summary.json").exists()

    (tmp_path / "resume_script.py").write_text(RESUME_SCRIPT)
    ranks = start_as_torchrun(tmp_path, "resume_script", "a")
    for rank in ranks:
        end_of(rank)
    results = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(2)]
    assert results[0][:3] == results[1][:3] == ["runs/a", "FINISHED", STEPS + 1]
    assert results[0][3] > 0  # callbacks of rank 0 receive the steps, those of others do not
    assert results[1][3] == 0

    assert record(folder) == record(runs / "complete")
    ours, theirs = file_contents(folder), file_contents(runs / "complete")
    begin = ("samples/", "evals/", f"checkpoints/step-{STEPS:06d}/")
    kept = [name for name in theirs if name.startswith(begin)]
    assert any(name.endswith("model.safetensors") for name in kept)
    # The optimizer's files have no fixed order of tensors; the steps after each resume compare their content.
    assert not [name for name in kept if "/trainer/" not in name and ours[name] != theirs[name]]


def test_sigterm_of_torchrun_to_its_ranks_writes_a_checkpoint(tmp_path):
    settings = ["--steps", "400", *SMALL, "--set", "checkpoint.every=400", "--set", "evaluation.every=0"]
    ranks = start_as_torchrun(tmp_path, "bandpo_cli", "train", *settings, "--name", "a")
    folder = tmp_path / "runs" / "a"
    wait_until(ranks[0], lambda: count_lines(folder) > 1)
    for rank in ranks:
        rank.terminate()
    (out, err), _ = (rank.communicate(timeout=60) for rank in ranks)
    done = summary(folder)
    assert done["status"] == "KILLED", out + err
    assert (folder / "checkpoints" / f"step-{done['steps']:06d}").is_dir()
    assert f"stopped by SIGTERM after step {done['steps']}" in out


def test_a_fork_on_two_ranks_is_nearly_the_run_of_one(six_steps, tmp_path):
    process = start_ranks(tmp_path, "--fork", f"{six_steps}@4", "--name", "two", "--no-mlflow")
    end_of(process)
    folder = tmp_path / "runs" / "two"
    assert json.loads((folder / "env.json").read_text())["parent"]["step"] == 4
    lines = record(folder)
    assert lines[:5] == record(six_steps)[:5]
    for line, expected in zip(lines, record(six_steps), strict=True):
        # A prompt whose completions two ranks have goes through the model twice.
        assert line == pytest.approx(expected | {FLOPS: line[FLOPS]}, abs=1e-4, rel=1e-4)
