"""Limits of the machine (disk, memory, file size): one line, exit code 1, and a run that can be resumed."""

import errno
import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bandpo_cli.errors import system_error_message
from tests.cli import train_runs
from tests.commands import run_bandpo

SMALL = [*train_runs.SMALL, "--name", "a"]


def train(*arguments: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    return run_bandpo("train", *arguments, cwd=cwd, **options, OMP_NUM_THREADS="1")


@contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[Path]:
    """Return a disk of this size; skip the test where none can be mounted."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_is_one_line(tmp_path):
    with small_disk(tmp_path / "disk", 8) as disk:
        state = os.statvfs(disk)
        (disk / "filler").write_bytes(bytes(state.f_bavail * state.f_frsize))
        done = train("--steps", "2", *SMALL, "--runs-dir", str(disk / "runs"), cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert done.stderr.startswith("error: ")
        assert "no space is left on the disk" in done.stderr


@pytest.mark.slow
def test_a_read_only_runs_folder_is_reported_before_loading(tmp_path):
    with small_disk(tmp_path / "disk", 8) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        done = train("--steps", "2", *SMALL, "--runs-dir", str(disk / "runs"), cwd=tmp_path)
        assert done.returncode == 2
        assert "is not writable; name another folder" in done.stderr


def limit_file_size() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))


@pytest.mark.slow
def test_a_limit_that_a_thread_meets_ends_the_run_at_its_next_step(tmp_path):
    """The line of the checkpoint's step is written, the checkpoint is not."""
    done = train("--steps", "5", *SMALL, cwd=tmp_path, before=limit_file_size)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: runs/a/checkpoints/step-000002: the checkpoint cannot be written: ")
    content = json.loads((tmp_path / "runs/a/summary.json").read_text())
    assert content["status"] == "FAILED"
    assert 2 <= content["steps"] <= 4, "the checkpoint of step 4 waits for that of step 2"
    assert not list((tmp_path / "runs/a/checkpoints").iterdir())
    again = train("--resume", "a", "--set", "checkpoint.every=0", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (3_500_000_000, 3_500_000_000))


@pytest.mark.slow
def test_out_of_memory_names_settings_to_change(tmp_path):
    many = "sampling.prompts=2048 sampling.samples=64 sampling.max_sequences=200000 evaluation.every=0"
    flags = [word for setting in many.split() for word in ("--set", setting)]
    done = train("--steps", "1", *SMALL, *flags, cwd=tmp_path, before=limit_memory)
    assert done.returncode == 1
    assert "out of memory" in done.stderr
    assert "--set sampling.max_sequences=50000" in done.stderr


def test_only_known_system_errors_have_a_message():
    assert system_error_message(OSError("no number")) is None
    assert system_error_message(FileNotFoundError(errno.ENOENT, "gone", "x")) is None
    assert system_error_message(PermissionError(errno.EACCES, "no", "x")) == "x: permission denied"
    assert (
        system_error_message(OSError(errno.ENOSPC, "full"))
        == "no space is left on the disk; free some, then continue"
    )
