"""`bandpo train --nproc` and torchrun: two ranks as processes that are killed, stopped and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import pytest

from bandpo_cli.tracking.store import sqlite_uri
from tests.cli.processes import check_ended, count_lines, ranks_of, wait_until
from tests.cli.train_runs import SMALL, file_contents, record, summary
from tests.commands import Forked

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


def start_torchrun(place: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *arguments],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def start_ranks(place: Path, *arguments: str) -> Forked:
    """Start a command whose two ranks are forked from its process."""
    words = ["train", *arguments, "--nproc", "2"]
    return Forked(*words, cwd=place, fork_children=True, OMP_NUM_THREADS="1")


def kill_rank(process: Forked, rank: int, folder: Path, lines: int) -> tuple[str, str]:
    """Kill a rank once metrics.jsonl has more than `lines` lines; return the output after the end of all."""
    wait_until(process, lambda: count_lines(folder) > lines)
    ranks = ranks_of(process.pid, folder)
    os.kill(ranks[rank], signal.SIGKILL)
    output = process.communicate(timeout=60)
    assert process.returncode == 1, output
    check_ended(ranks, 0.0)
    return output


@pytest.mark.slow
def test_two_ranks_are_killed_stopped_and_resumed_and_the_run_is_the_same(
    tmp_path: Path, empty_database: Path
) -> None:
    """Compared with a run that nothing interrupts. torchrun resumes it at last, through the Python function."""
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "mlflow.db").write_bytes(empty_database.read_bytes())
    complete = Forked(
        "train", *SETTINGS, "--mlflow", "--name", "complete", "--nproc", "2", cwd=tmp_path, fork_children=True,
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    out, err = complete.communicate(timeout=240)
    assert complete.returncode == 0, out + err
    assert "Traceback" not in err
    assert out.count("run folder") == 2  # at the start and in the summary, of rank 0 alone
    assert "2 processes, 2 of a step's 4 prompts each" in out
    assert json.loads((runs / "complete" / "env.json").read_text())["ranks"] == 2
    client = mlflow.MlflowClient(sqlite_uri(runs / "mlflow.db"))
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    assert [run.info.run_name for run in client.search_runs(experiments)] == ["complete"]

    folder = runs / "a"
    process = start_ranks(tmp_path, *SETTINGS, "--name", "a")
    out, err = kill_rank(process, 1, folder, 4)
    assert err == (
        "error: rank 1 was killed by SIGKILL (as the system does when memory runs out); "
        "continue with: bandpo train --resume a --nproc 2\n"
    )
    assert (summary(folder)["status"], summary(folder)["error"]) == (
        "FAILED",
        "LostRankError: lost the connection to another rank, whose process has ended",
    )
    assert "resume with: bandpo train --resume a --nproc 2" in out

    before = count_lines(folder)
    process = start_ranks(tmp_path, "--resume", "a")
    wait_until(process, lambda: count_lines(folder) > before)
    ranks = ranks_of(process.pid, folder)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, out + err
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

    script = tmp_path / "resume.py"
    script.write_text(RESUME_SCRIPT)
    torchrun = start_torchrun(tmp_path, str(script), "a")
    out, err = torchrun.communicate(timeout=120)
    assert torchrun.returncode == 0, out + err
    results = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in range(2)]
    assert results[0][:3] == results[1][:3] == ["runs/a", "FINISHED", STEPS + 1]
    assert results[0][3] > 0  # callbacks of rank 0 receive the steps, those of others do not
    assert results[1][3] == 0

    assert record(folder) == record(runs / "complete")
    ours, theirs = file_contents(folder), file_contents(runs / "complete")
    kept = [
        name for name in theirs if name.startswith(("samples/", "evals/", f"checkpoints/step-{STEPS:06d}/"))
    ]
    assert any(name.endswith("model.safetensors") for name in kept)
    # The optimizer's files have no fixed order of tensors; the steps after each resume compare their content.
    assert not [name for name in kept if "/trainer/" not in name and ours[name] != theirs[name]]


@pytest.mark.slow
def test_sigterm_to_torchrun_writes_a_checkpoint(tmp_path: Path) -> None:
    settings = ["--steps", "400", *SMALL, "--set", "checkpoint.every=400", "--set", "evaluation.every=0"]
    process = start_torchrun(tmp_path, "-m", "bandpo_cli", "train", *settings, "--name", "a")
    folder = tmp_path / "runs" / "a"
    wait_until(process, lambda: count_lines(folder) > 1)
    ranks = ranks_of(process.pid, folder)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    check_ended(ranks, 0.0)
    done = summary(folder)
    assert done["status"] == "KILLED", out + err
    assert (folder / "checkpoints" / f"step-{done['steps']:06d}").is_dir()
    assert f"stopped by SIGTERM after step {done['steps']}" in out


@pytest.mark.slow
def test_two_ctrl_c_end_a_run_whose_rank_0_waits_for_another_rank(tmp_path: Path) -> None:
    """Both arrive while rank 0 runs native code, where Python calls no handler."""
    folder = tmp_path / "runs" / "a"
    process = start_ranks(tmp_path, *SETTINGS, "--name", "a")
    wait_until(process, lambda: count_lines(folder) > 2)
    ranks = ranks_of(process.pid, folder)
    os.kill(ranks[1], signal.SIGSTOP)
    lines = -1
    while lines != (lines := count_lines(folder)):  # until rank 0 waits
        time.sleep(1)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert err == "stopped\n"
    check_ended(ranks, 0.0)
    assert (summary(folder)["status"], summary(folder)["error"]) == ("KILLED", "stopped by Ctrl-C")
    assert "resume with: bandpo train --resume a --nproc 2" in out
