"""Records of a run: one reader of summary.json decides how it ended; env.json has versions and hardware, no secrets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bandpo_cli.errors import has_secret, redact_credentials
from bandpo_cli.storage import run_record
from bandpo_cli.storage.checkpoints import complete_checkpoints, model_checkpoints
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.run_record import (
    available_memory,
    describe_environment,
    git_state,
    is_finished,
    read_stored_run,
    read_summary,
)


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path, "a")


@pytest.mark.parametrize(
    ("summary", "status", "finished"),
    [
        ({"status": "FINISHED", "steps": 3}, "FINISHED", True),
        ({"status": "KILLED", "steps": 3}, "KILLED", False),
        ({"status": "FAILED", "steps": 3, "error": "x"}, "FAILED", False),
        ({"status": "lost"}, None, False),
        ({"status": ["FINISHED"]}, None, False),
        ({}, None, False),
    ],
)
def test_the_status_is_one_of_three_words(folder, summary, status, finished):
    folder.write_config("seed: 1\n")
    folder.append_metrics({"step": 3})
    assert (read_summary(folder.path), is_finished(folder.path)) == (None, False)
    assert read_stored_run(folder.path).status == "KILLED"
    folder.write_summary(summary)
    found = read_summary(folder.path)
    assert (found.status, found.content) == (status, summary)
    assert is_finished(folder.path) is finished
    assert read_stored_run(folder.path).status == (status or "KILLED")
    # `is_finished` does not compare the steps: resume and sweeps compare them with the settings themselves.
    folder.append_metrics({"step": 4})
    assert "steps" not in summary or read_stored_run(folder.path).status == "KILLED"


def test_a_run_that_ends_while_it_is_read_has_its_final_status(folder, monkeypatch):
    """Its summary is written before it releases the lock, so it has to be read after the lock."""
    folder.write_config("seed: 1\n")
    folder.append_metrics({"step": 1})

    def is_locked(path: Path) -> bool:
        folder.write_summary({"status": "FINISHED", "steps": 1})
        return False

    monkeypatch.setattr(run_record, "is_locked", is_locked)
    assert read_stored_run(folder.path).status == "FINISHED"


def test_a_checkpoint_without_training_state_holds_a_model_and_is_not_complete(folder):
    for step in (20, 3):
        folder.checkpoint_dir(step).mkdir(parents=True)
        (folder.checkpoint_dir(step) / "config.json").write_text("{}")
    folder.checkpoint_dir(5).mkdir()
    assert model_checkpoints(folder) == {step: folder.checkpoint_dir(step) for step in (3, 20)}
    assert complete_checkpoints(folder).complete == {}
    assert list(complete_checkpoints(folder).damaged) == [3, 5, 20]


def test_environment_has_versions_hardware_and_the_ranks_of_torchrun_and_no_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    command = ["bandpo", "train", "--set", "tracking.uri=https://me:secret@example.org/mlflow"]
    monkeypatch.setattr(sys, "argv", command)
    env = describe_environment()
    text = json.dumps(env)
    assert "secret" not in text
    assert env["command"].endswith("tracking.uri=https://***@example.org/mlflow")
    assert env["versions"]["python"].startswith("3.")
    assert "mlflow" in env["versions"]
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    assert not names or env["hardware"]["cpu"] == names[0].partition(":")[2].strip()
    assert env["hardware"]["cores"] >= env["hardware"]["usable_cores"] >= 1
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert describe_environment()["ranks"] == 1, "a variable of another program"
    monkeypatch.setenv("RANK", "0")
    assert describe_environment()["ranks"] == 4


def test_git_state_detects_a_changed_tracked_file(tmp_path):
    assert git_state(tmp_path) is None
    run = ["git", "-c", "user.name=a", "-c", "user.email=a@b.org"]
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "a.txt").write_text("1")
    subprocess.run([*run, "add", "a.txt"], cwd=tmp_path, check=True)
    subprocess.run([*run, "commit", "-qm", "first"], cwd=tmp_path, check=True)
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tmp_path, text=True)
    assert git_state(tmp_path) == {"commit": head.strip(), "dirty": False}
    (tmp_path / "untracked.txt").write_text("runs and notes do not make a commit dirty")
    assert git_state(tmp_path)["dirty"] is False
    (tmp_path / "a.txt").write_text("2")
    assert git_state(tmp_path)["dirty"] is True


def test_only_the_credentials_of_an_address_are_redacted():
    assert redact_credentials("postgresql://u:p@db/x and mean@16") == "postgresql://***@db/x and mean@16"
    for text in (
        "http://localhost:5000/#/runs", "http://h/#/e/1?workflowType=a", "postgresql://h/db?sslmode=require", "a?b: c=d"
    ):  # fmt: skip
        assert redact_credentials(text) == text
        assert not has_secret(text)


@pytest.mark.parametrize(
    "address",
    [
        "https://{}@h/mlflow", "https://me:{}@h", "https://me:p@{}@h", "postgresql://me:p/{}@h/db", "http://h/?password={}",
        "http://h?a=b&token={}", "http://h/?{}", "http://h#{}", "http://h/a?timeout=1#token={}", "http://h/#/a?token={}",
        "mssql://h/db?odbc_connect=PWD%3D{}", "http://me:a://{}@h", "http://me:{}://b/c@h", "http://me:a/b://c://{}@h",
    ],
)  # fmt: skip
def test_a_secret_in_any_part_of_an_address_is_redacted(address):
    uri = address.format("s3cret")
    assert has_secret(uri)
    redacted = redact_credentials(f"MLflow at {uri} and '{uri}'")
    assert "s3cret" not in redacted
    assert redacted.startswith(f"MLflow at {uri.partition('://')[0]}://")
    assert redact_credentials(redacted) == redacted


def test_available_memory_is_the_least_of_the_machine_and_its_control_groups(tmp_path):
    """The group of a job within that of a container: the file cache does not count as used."""
    here = available_memory()
    assert here is None or 2**20 < here < 2**50
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    assert available_memory(proc, groups) is None
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  900 kB\nMemFree:  5 kB\nMemAvailable:   500 kB\n")
    assert available_memory(proc, groups) == 500 * 1024
    (proc / "self" / "cgroup").write_text("0::/outer/job\n")
    job = groups / "outer" / "job"
    job.mkdir(parents=True)
    (job / "memory.max").write_text("max\n")
    (job.parent / "memory.max").write_text("300000\n")
    (job.parent / "memory.current").write_text("200000\n")
    (job.parent / "memory.stat").write_text("anon 90000\ninactive_file 50000\n")
    assert available_memory(proc, groups) == 150_000
    (job / "memory.max").write_text("90000\n")
    (job / "memory.current").write_text("95000\n")
    assert available_memory(proc, groups) == 0
