"""A run that stands still: a stopped rank is named, and the run ends and can be resumed; `bandpo show --stacks`."""

import os
import re
import signal

import pytest

from bandpo_cli.processes import watch
from tests.cli.processes import count_lines, end_of, ranks_of, wait_until
from tests.cli.train_runs import SMALL, summary
from tests.commands import Forked, run_bandpo
from tests.processes.checks import check_ended

pytestmark = pytest.mark.slow

SETTINGS = ["--steps", "400", *SMALL, "--no-mlflow", "--set", "checkpoint.every=2", "--name", "r"]


def end_after_seconds() -> None:
    """Let the run end when a rank has not answered for 4 seconds; the ranks are forks of this process."""
    watch.MIN_STUCK_S = 4.0


@pytest.mark.parametrize("rank", [1, 0])
def test_a_stopped_rank_is_named_and_the_run_can_be_resumed(tmp_path, rank):
    words = ["train", *SETTINGS, "--nproc", "2", "--stall-after", "0.5"]
    folder = tmp_path / "runs" / "r"
    process = Forked(*words, cwd=tmp_path, before=end_after_seconds, fork_children=True, OMP_NUM_THREADS="1")
    wait_until(process, lambda: count_lines(folder) > 4)
    ranks = ranks_of(process.pid, folder)
    os.kill(ranks[rank], signal.SIGSTOP)
    out, err = end_of(process, 1)
    check_ended(ranks, 0.0)
    # The other rank waits in an exchange, or in a collective of the model's shards.
    line = rf"waiting for rank {rank} (in the phase '\w+' of the step )?since"
    assert re.search(line, " ".join((out if rank else err).split()))
    assert f"kill -USR1 {process.pid} prints where every process is" in " ".join((out + err).split())
    error = err.splitlines()[-1]
    assert f"rank {rank} has not answered for 0:00:04" in error
    assert "continue with: bandpo train --resume r --nproc 2" in error
    if rank:
        assert summary(folder)["status"] == "FAILED"
    before = count_lines(folder)
    resumed = Forked("train", "--resume", "r", cwd=tmp_path)
    wait_until(resumed, lambda: count_lines(folder) > before)
    resumed.kill()


def test_show_prints_where_the_processes_of_a_run_are(tmp_path):
    folder = tmp_path / "runs" / "r"
    words = ["train", *SETTINGS, "--nproc", "2"]
    process = Forked(*words, cwd=tmp_path, fork_children=True, OMP_NUM_THREADS="1")
    wait_until(process, lambda: count_lines(folder) > 2)
    ranks = ranks_of(process.pid, folder)
    shown = run_bandpo("show", "r", "--stacks", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    for role, pid in [("bandpo", process.pid), *((f"rank {rank}", pid) for rank, pid in enumerate(ranks))]:
        assert f"{role} (process {pid}):" in shown.stdout
    assert shown.stdout.count("in _watch") == 1, "the launcher"
    assert shown.stdout.count("in train_steps") == 2
    lines = count_lines(folder)
    wait_until(process, lambda: count_lines(folder) > lines)
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "rank 1 (process" in err, "the terminal of the run has them, too"
    shown = run_bandpo("show", "r", "--stacks", cwd=tmp_path)
    assert shown.stdout == "r: no process of bandpo train on this machine is writing it\n"
