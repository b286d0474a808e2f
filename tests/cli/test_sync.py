"""`bandpo sync`: output, exit codes, and selection of runs."""

import shutil
from pathlib import Path

import pytest

from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tracking.mlflow_store import sqlite_uri
from tests.cli.eval_command import Done, bandpo, usage_error

UNREACHABLE = "http://127.0.0.1:9"  # the discard port: nothing listens there, so it refuses at once


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> str:
    return sqlite_uri(Path(shutil.copy(empty_database, tmp_path_factory.mktemp("store"))))


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # restores the value that the command sets
    return tmp_path / "runs"


def make_run(runs: Path, name: str, config: str = "seed: 3\n") -> RunFolder:
    folder = RunFolder.create(runs, name)
    folder.write_config(config)
    folder.append_metrics({"step": 1, "train/reward": 0.5})
    folder.write_summary({"status": "FINISHED", "steps": 1})
    return folder


def sync(*arguments: str, **variables: str) -> Done:
    return bandpo("sync", *arguments, cwd=Path.cwd(), **variables)


def test_sync_prints_what_was_sent_and_the_second_time_nothing(runs, store):
    make_run(runs, "first")
    out = sync("first", "--tracking-uri", store).out
    assert "sent 2 metric values, 1 param" in out
    assert "3 files, status FINISHED" in out
    out = sync("runs/first", "--tracking-uri", store).out
    assert out == "first  sent nothing; there already: 2 metric values, 3 files, status FINISHED\n"


@pytest.mark.slow
def test_all_includes_runs_of_sweeps_and_excludes_runs_without_tracking(runs, store):
    make_run(runs, "alone")
    make_run(runs, "private", "tracking:\n  mlflow: false\n")
    make_run(runs / "sweep", "one")
    (runs / "sweep" / "sweep.yaml").write_text("runs: []\n")
    (runs / "an-evaluation").mkdir()
    code, out, _ = sync("--all", "--tracking-uri", store)
    assert code == 0
    words = [line.split()[:2] for line in out.splitlines()]
    assert words == [["alone", "sent"], ["private", "left"], ["one", "sent"]]
    code, out, _ = sync("private", "sweep", "--tracking-uri", store)
    assert code == 0
    assert [line.split()[1:3] for line in out.splitlines()] == [["sent", "2"], ["sent", "nothing;"]]


def test_an_unreachable_store_is_tried_once_and_gives_exit_code_1(runs, store):
    uri = UNREACHABLE.replace("//", "//me:secret@")
    for name in ("a", "b"):
        make_run(runs, name)
    make_run(runs, "c", f"tracking:\n  uri: {store}\n")
    code, _, err = sync("a", "b", "--tracking-uri", uri)
    assert code == 1
    assert err.count("cannot be reached") == err.count("\n") == 1
    assert "secret" not in err
    code, out, err = sync("--all", MLFLOW_TRACKING_URI=uri)
    assert code == 1
    assert out.startswith("c  sent 2 metric values")


def test_a_run_folder_that_cannot_be_written_to_is_named(runs, store):
    """A folder in the place of the lock file gives an error for root too, whom permissions do not stop."""
    make_run(runs, "a")
    (runs / "a" / ".mlflow.lock").mkdir()
    message = "runs/a/.mlflow.lock: Is a directory; sync locks the run folder"
    usage_error("sync", "a", "--tracking-uri", store, cwd=Path.cwd(), parts=[message])


def test_a_damaged_run_does_not_prevent_the_sync_of_others(runs, store):
    make_run(runs, "damaged").metrics_path.write_text("no JSON\n")
    make_run(runs, "intact")
    code, out, err = sync("--all", "--tracking-uri", store)
    assert code == 2
    assert out.startswith("intact  sent 2 metric values")
    assert "metrics.jsonl" in err
