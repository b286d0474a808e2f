"""Trackers beside MLflow, with a custom tracker that writes a file: nothing is lost or sent twice."""

import json
import re
from pathlib import Path

import pytest

from bandpo_cli.cli.options import split_commas
from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.errors import ConfigError, RunError, UserError
from bandpo_cli.experiments import sync
from bandpo_cli.storage.files import run_lock
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tracking import outages
from bandpo_cli.tracking.outages import TrackerCallback
from bandpo_cli.tracking.sender import RunSender
from bandpo_cli.tracking.trackers import finite_metrics, tracker_class
from tests.processes.checks import wait_for
from tests.tracking.tracked import RunInfo, RunResult, report

JOURNAL = """
import json
from pathlib import Path
from bandpo_cli.tracking.trackers import Tracker, TrackerUnavailableError

class Journal(Tracker):
    @classmethod
    def destination(cls, project):
        if Path("locked").exists():
            raise TrackerUnavailableError("the journal is locked; remove the file")
        return project

    def log(self, points):
        if Path("outage").exists():
            raise ConnectionError("no answer")
        self._write(*([point.step, point.time_ms > 0, point.metrics] for point in points))

    def finish(self, status, summary, files):
        self._write([status, summary, sorted(file.name for file in files)])

    def _write(self, *lines):
        with Path(f"{self.run.id}.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + chr(10) for line in lines)
"""
NAME = "journal:Journal"


@pytest.fixture
def folder(run, monkeypatch):
    """Return a run folder with three steps, and journal.py in the current folder; retries are frequent."""
    Path("journal.py").write_text(JOURNAL)
    run.write_config(f"tracking:\n  trackers: ['{NAME}']\n")
    monkeypatch.setattr(outages, "MAX_RETRY_DELAY_S", 0.05)
    monkeypatch.setattr(outages, "MIN_RETRY_DELAY_S", 0.05)
    return run


def journal() -> list[list]:
    """Return the lines of the one run that was sent."""
    (file,) = Path().glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def expected(folder: RunFolder) -> list[list]:
    return [[record["step"], True, finite_metrics(record)] for record in folder.read_metrics()]


def start(folder: RunFolder) -> TrackerCallback:
    tracker = TrackerCallback(NAME, TrackingConfig())
    tracker.start(RunInfo(folder.path, {}, {}, 6, 0, (), None))
    return tracker


def add_step(tracker: TrackerCallback, folder: RunFolder, step: int) -> None:
    folder.append_metrics({"step": step, "train/reward": step / 4})
    tracker.step(report(step))


def test_an_outage_in_the_middle_of_a_run_loses_nothing_and_names_the_line_that_failed(folder, caplog):
    tracker = start(folder)
    wait_for(lambda: len([*Path().glob("*.jsonl")]) and len(journal()) == 3)
    Path("outage").touch()
    add_step(tracker, folder, 4)
    wait_for(lambda: caplog.messages)
    add_step(tracker, folder, 5)
    Path("outage").unlink()
    add_step(tracker, folder, 6)
    tracker.end(RunResult(folder.path, "FINISHED", []))
    (message,) = caplog.messages
    cause = "(ConnectionError: no answer) (journal.py:15, in log)"
    assert f"{NAME} cannot be reached {cause}. The run continues" in message
    *steps, (status, _, files) = journal()
    assert (steps, status) == (expected(folder), "FINISHED")
    assert files == ["config.yaml", "env.json", "metrics.jsonl", "step-000010.parquet", "summary.json"]


def test_a_tracker_that_exits_is_a_tracker_with_an_error(folder, caplog):
    Path("journal.py").write_text(JOURNAL.replace('ConnectionError("no answer")', "SystemExit(0)"))
    Path("outage").touch()
    tracker = start(folder)
    wait_for(lambda: caplog.messages)
    assert "SystemExit: 0 (journal.py:15, in log)" in caplog.messages[0]
    with pytest.raises(RunError, match=r"did not accept run first .*SystemExit: 0"):
        sync(["first"], runs_dir=folder.path.parent)
    Path("outage").unlink()
    tracker.end(RunResult(folder.path, "FINISHED", []))
    assert journal()[:-1] == expected(folder)


def test_a_killed_and_resumed_run_is_continued_under_the_same_id(folder):
    RunSender(NAME, folder.path).send("RUNNING")  # the process is killed here
    tracker = start(folder)
    add_step(tracker, folder, 4)
    tracker.end(RunResult(folder.path, "FINISHED", []))
    assert journal()[:-1] == expected(folder)


def test_sync_sends_the_rest_after_an_outage_and_then_nothing(folder, caplog):
    Path("outage").touch()
    tracker = start(folder)
    tracker.end(RunResult(folder.path, "FINISHED", []))
    assert f"{NAME} lacks the metrics of 3 steps (from step 1) and 5 files" in caplog.messages[-1]
    assert "bandpo sync first" in caplog.messages[-1]
    Path("outage").unlink()
    with run_lock(folder.path):  # a process writes the run
        (writing,) = sync(["first"], runs_dir=folder.path.parent)
    (first,), (again,) = (sync(all_runs=True, runs_dir=folder.path.parent) for _ in range(2))
    assert (writing.result.metrics.new, writing.result.writing) == (0, True)
    assert (first.tracker, first.result.metrics.new, first.result.files) == (NAME, 6, 5)
    assert (again.result.metrics.new, again.result.files, again.result.files_there) == (0, 0, 5)
    assert journal()[:-1] == expected(folder)
    folder.write_config(f"tracking:\n  trackers: ['{NAME}']\n  experiment: other\n")
    (moved,) = sync(["first"], runs_dir=folder.path.parent)  # another destination has nothing of the run
    assert moved.result.metrics.new == 6


def test_a_tracker_that_needs_the_user_is_not_tried_again(folder, caplog):
    Path("locked").touch()
    tracker = start(folder)
    add_step(tracker, folder, 4)
    tracker.end(RunResult(folder.path, "FINISHED", []))
    command = f"bandpo sync first --runs-dir {folder.path.parent}"
    assert caplog.messages == [
        "the journal is locked; remove the file. The run continues without it; to send it later: " + command
    ]
    with pytest.raises(UserError, match="the journal is locked"):
        sync(["first"], runs_dir=folder.path.parent)


def test_the_group_of_a_run_is_its_sweep_and_passwords_are_redacted(folder, monkeypatch):
    seen = []
    monkeypatch.setattr(tracker_class(NAME), "log", lambda self, points: seen.append(self.run))
    (folder.path.parent / "sweep.yaml").touch()
    folder.write_config("tracking:\n  uri: http://user:secret@host\noptim:\n  lr: 0.1\n")
    RunSender(NAME, folder.path).send("RUNNING")
    (run,) = seen
    assert (run.group, run.name, run.kind, run.project) == ("runs", "first", "train", "bandpo")
    assert run.config["tracking"] == {"uri": "http://***@host"}
    assert (run.config["optim"], run.config["environment"]) == ({"lr": 0.1}, {"versions": {"python": "3.11"}})


@pytest.mark.parametrize(
    ("trackers", "mlflow", "names"),
    [
        (["mlflow"], None, ("mlflow",)),
        (["wandb"], None, ("wandb",)),
        (["wandb", "mlflow", "trackio", "wandb"], None, ("wandb", "mlflow", "trackio")),
        (["mlflow", "wandb"], False, ("wandb",)),
        (["wandb"], True, ("mlflow", "wandb")),
        ([], None, ()),
    ],
)
def test_mlflow_true_adds_mlflow_and_false_removes_it(trackers, mlflow, names):
    config = TrackingConfig(trackers=trackers, mlflow=mlflow)
    assert (config.with_mlflow, config.names) == ("mlflow" in names, names)


def test_the_flag_is_repeatable_and_takes_several_names():
    assert split_commas(["mlflow,wandb", "trackio"]) == ["mlflow", "wandb", "trackio"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandb", 'wandb is not installed; pip install "bandpo[wandb]"'),
        ("trackoi", "no tracker of that name (did you mean 'trackio'?)"),
        ("journal:Jurnal", "has no function 'Jurnal' (did you mean 'Journal'?)"),
        ("journal:json", "has no function 'json'"),
        ("journal:Path", "name a subclass of bandpo_cli.tracking.trackers.Tracker"),
    ],
)
def test_a_tracker_that_cannot_be_used_is_one_line(folder, monkeypatch, name, message):
    monkeypatch.setattr("bandpo_cli.tracking.trackers.is_installed", lambda package: package is None)
    Path("wandb").mkdir()  # the folder of wandb's files is no package
    with pytest.raises(ConfigError, match=re.escape(message)):
        tracker_class(name)


def test_a_folder_is_not_an_installed_package(folder, monkeypatch):
    from bandpo_cli.config.batch_and_sampling import is_installed

    Path("no_such_package").mkdir()
    monkeypatch.syspath_prepend(str(Path.cwd()))
    assert not is_installed("no_such_package")
