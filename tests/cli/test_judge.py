"""Runs with a judge on a server: an unreachable server before the first step, an outage, and a resume."""

from pathlib import Path

import pytest

from bandpo_cli.grading import pool as rewards
from tests.cli.eval_command import bandpo, succeed
from tests.cli.train_runs import SMALL, record, sets, summary
from tests.judge_server import JudgeServer, Reply

ROOT = Path(__file__).resolve().parents[2]
REWARDS = 'task.rewards=[{weight: 1}, {grader: "examples.judge:judge", weight: 0.5}]'
JUDGE = [*SMALL, "--set", REWARDS, *sets("evaluation.every=0 grading.retries=0 grading.deadline=60")]
"""16 completions per step, each of which the judge grades."""


def scored(text: str) -> Reply:
    """Return a verdict that depends on the answer."""
    return f"Verdict: {len(text) % 6}"


@pytest.mark.slow
def test_an_outage_of_two_steps_costs_their_rewards_and_no_step(tmp_path):
    """Calls are numbered from 1, the trial call; 16 follow per step. In step 4 some calls fail."""

    def reply(text: str) -> Reply:
        number = server.calls.total() - 1
        return 500 if 17 <= number <= 48 or number > 62 else scored(text)

    with JudgeServer(reply) as server:
        flags = ("--steps", "4", "--set", "grading.concurrency=1", "--name", "outage")
        done = succeed("train", *JUDGE, *flags, cwd=tmp_path, JUDGE_URL=server.url)
    steps = [
        (line["train/ungraded_fraction"], line["optim/grad_norm"] > 0, "train/reward" in line)
        for line in record(tmp_path / "runs" / "outage")
    ]
    assert steps == [(0, True, True), (1, False, False), (1, False, False), (2 / 16, True, True)]
    assert summary(tmp_path / "runs" / "outage")["status"] == "FINISHED"
    begin = "warning: grader 'examples.judge:judge' failed on {} of {} answers ("
    printed = " ".join(done.out.split())
    assert [printed.count(begin.format(*counts)) for counts in ((16, 32), (34, 64))] == [1, 1]
    assert "500" in (tmp_path / "runs/outage/grader_errors/examples.judge-judge.txt").read_text()


@pytest.mark.slow
def test_a_long_outage_ends_the_run_and_a_resume_continues_it(tmp_path, monkeypatch):
    monkeypatch.setattr(rewards, "MAX_FAILED_BATCHES", 2)
    with JudgeServer(scored) as server:
        flags = (*JUDGE, "--set", "checkpoint.every=1", "--steps", "4")
        succeed("train", *flags, "--name", "complete", cwd=tmp_path, JUDGE_URL=server.url)
        expected = record(tmp_path / "runs" / "complete")
        server.calls.clear()
        server.reply = lambda text: 500 if server.calls.total() > 33 else scored(text)
        done = bandpo("train", *flags, "--name", "ended", cwd=tmp_path, JUDGE_URL=server.url)
        assert done.code == 1
        assert "all 16 answers are grader errors" in done.err.splitlines()[-1]
        lines = record(tmp_path / "runs" / "ended")
        assert [line["train/ungraded_fraction"] for line in lines] == [0, 0, 1]
        assert lines[:2] == expected[:2]
        refused = bandpo("train", "--resume", "ended", cwd=tmp_path, JUDGE_URL="http://127.0.0.1:9/v1")
        assert (refused.code, "failed in a trial call" in refused.err) == (2, True)
        server.reply = scored
        succeed("train", "--resume", "ended", cwd=tmp_path, JUDGE_URL=server.url)
    assert record(tmp_path / "runs" / "ended")[-1]["train/ungraded_fraction"] == 0
