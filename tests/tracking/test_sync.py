"""`bandpo sync`: the run folder alone gives MLflow the complete record, once, with times and final status."""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.layers import to_yaml
from bandpo_cli.config.run import RunConfig, TrackingConfig
from bandpo_cli.errors import UserError
from bandpo_cli.storage.files import LOCK, is_locked, run_lock
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.run_record import read_stored_run
from bandpo_cli.tracking import sender as senders
from bandpo_cli.tracking.mlflow_store import Store, store_for_run, tracking_store
from bandpo_cli.tracking.mlflow_tracker import flat_params, run_tags
from bandpo_cli.tracking.sender import RunSender, SyncResult
from bandpo_cli.tracking.trackers import STATE_FILE, Place, Sent, read_places, write_place
from tests.tracking.tracked import client_of, track


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Return one SQLite store for all tests of this module: creating its tables takes seconds."""
    return tracking_store(TrackingConfig(), tmp_path_factory.mktemp("store"), {})


@pytest.fixture
def folder(tmp_path):
    """Return a run of 3 steps that ended without a summary."""
    folder = RunFolder.create(tmp_path / "runs", "first")
    folder.write_config(to_yaml(RunConfig(seed=3)))
    folder.write_env({"versions": {"python": "3.11"}, "git": {"commit": "abc", "dirty": False}})
    for step in range(3):
        folder.append_metrics({"step": step, "train/reward": step / 4, "time/step": 2.0, "ratio/max": None})
    folder.write_eval(0, {"step": 0})
    return folder


def run_at(store: Store, folder: RunFolder) -> Any:
    return client_of(store.uri).get_run(run_id_of(store.place(folder.path)))


def run_id_of(place: Place) -> str:
    return place.remote_id.rpartition("/")[2]


def history(store: Store, folder: RunFolder) -> Counter[tuple[str, int, float]]:
    there, client = run_at(store, folder), client_of(store.uri)
    histories = [client.get_metric_history(there.info.run_id, key) for key in there.data.metrics]
    return Counter((metric.key, metric.step, metric.value) for values in histories for metric in values)


def metrics_of(folder: RunFolder) -> Counter[tuple[str, int, float]]:
    """Return the metrics that a run of this module has at MLflow."""
    rows, names = folder.read_metrics(), ("train/reward", "time/step")
    values = Counter((name, row["step"], row[name]) for row in rows for name in names)
    return values + Counter(("Main/reward", row["step"], row["train/reward"]) for row in rows)


def sync_run(store: Store, path: Path) -> SyncResult:
    return RunSender("mlflow", path, store).send()


def sent_nothing(result: SyncResult) -> bool:
    return not (result.metrics.new or result.params or result.tags or result.files or result.ended)


def test_a_run_that_was_never_tracked_is_sent_completely_and_once(store, folder, monkeypatch):
    """Also with more steps than a call has."""
    monkeypatch.setattr(senders, "RECORDS_PER_CALL", 2)
    config = RunConfig.model_validate({"seed": 3, "tracking": {"parent": "a-sweep"}})
    folder.write_config(to_yaml(config))
    folder.write_summary({"status": "FAILED", "steps": 2})
    sent = sync_run(store, folder.path)
    assert (sent.metrics.new, sent.metrics.there, sent.files, sent.status) == (9, 0, 5, "FAILED")
    assert history(store, folder) == metrics_of(folder)
    there = run_at(store, folder)
    assert (there.info.run_name, there.data.params) == ("first", flat_params(config.model_dump(mode="json")))
    tags = run_tags(json.loads((folder.path / "env.json").read_text()), "a-sweep")
    assert tags.items() <= there.data.tags.items()
    assert there.data.tags["mlflow.parentRunId"] == "a-sweep"
    assert there.info.user_id == tags["mlflow.user"]
    top = [file.path for file in client_of(store.uri).list_artifacts(there.info.run_id)]
    assert sorted(top) == ["config.yaml", "env.json", "evals", "metrics.jsonl", "summary.json"]
    again = sync_run(store, folder.path)
    assert sent_nothing(again)
    assert (again.metrics.there, again.files_there) == (9, 5)
    assert history(store, folder) == metrics_of(folder)


def test_a_repeated_step_is_not_sent_again(store, folder):
    """Its time differs; MLflow keeps the first value, and the sync counts it."""
    sync_run(store, folder.path)
    before = history(store, folder)
    folder.roll_back(1)
    folder.append_metrics({"step": 2, "train/reward": 0.5, "time/step": 9.0})
    sent = sync_run(store, folder.path)
    assert (sent.metrics.new, sent.metrics.there, sent.metrics.differing) == (0, 9, 1)
    assert history(store, folder) == before


def test_a_changed_file_and_a_file_that_mlflow_lost_are_sent_again(store, folder):
    sync_run(store, folder.path)
    folder.write_env({"versions": {"python": "3.12"}, "git": {"commit": "abc", "dirty": False}})  # same size
    assert sync_run(store, folder.path).files == 1
    artifacts = Path(run_at(store, folder).info.artifact_uri.removeprefix("file://"))
    (artifacts / "metrics.jsonl").unlink()
    assert sync_run(store, folder.path).files == 1
    assert sent_nothing(sync_run(store, folder.path))


def test_a_run_that_is_being_written_stays_running(store, folder):
    with run_lock(folder.path):
        sent = sync_run(store, folder.path)
        assert (sent.writing, sent.files, sent.metrics.new) == (True, 0, 9)
        assert run_at(store, folder).info.status == "RUNNING"
    assert (folder.path / LOCK).exists()
    assert not is_locked(folder.path)
    sent = sync_run(store, folder.path)
    assert (sent.writing, sent.files, sent.metrics.new) == (False, 4, 0)
    assert run_at(store, folder).info.status == "KILLED"  # its process could not write a summary
    resumed = RunSender("mlflow", folder.path, store).send("RUNNING")
    assert resumed.status == "RUNNING"
    assert run_at(store, folder).info.status == "RUNNING"


def test_times_come_from_the_step_durations_and_the_modification_times(folder):
    """By hand: the last line at 1000 s, so the one before at 998; then its completions were written at 900 s."""
    os.utime(folder.path / "metrics.jsonl", (1000, 1000))
    os.utime(folder.path / "evals" / "step-000000.json", (5000, 5000))  # a later time has no effect
    assert [*read_stored_run(folder.path).clocks.values()] == [1_000_000, 998_000, 996_000]
    os.utime(folder.write_samples(1, []), (900, 900))
    assert [*read_stored_run(folder.path).clocks.values()] == [1_000_000, 900_000, 898_000]
    os.utime(folder.path / "config.yaml", (897, 897))
    run = read_stored_run(folder.path)
    assert (run.start_ms, run.end_ms) == (896_000, 1_000_000)


@pytest.mark.parametrize(
    ("name", "text"),
    [("config.yaml", "seed: ["), ("config.yaml", ""), ("env.json", "{"), ("summary.json", "[]"),
     ("metrics.jsonl", "half a line\n"), ("metrics.jsonl", '{"step": "x"}\n')],
)  # fmt: skip
def test_a_damaged_folder_raises_with_the_name_of_the_file(folder, name, text):
    (folder.path / name).write_text(text)
    with pytest.raises(UserError, match=name):
        read_stored_run(folder.path)


def test_a_run_whose_creation_was_not_answered_is_found_and_not_created_twice(store, folder, monkeypatch):
    from mlflow.tracking import MlflowClient

    create = MlflowClient.create_run

    def unanswered(self: Any, *arguments: Any) -> None:
        create(self, *arguments)
        raise TimeoutError("created, but the answer was lost")

    monkeypatch.setattr(MlflowClient, "create_run", unanswered)
    with pytest.raises(TimeoutError):
        sync_run(store, folder.path)
    monkeypatch.setattr(MlflowClient, "create_run", create)
    sync_run(store, folder.path)
    (place,) = read_places(folder.path, "mlflow")
    client = client_of(store.uri)
    experiment = client.get_experiment_by_name(store.experiment)
    found = client.search_runs([experiment.experiment_id], f"tags.`bandpo.run` = '{place.id}'")
    assert [item.info.run_id for item in found] == [run_id_of(place)]


def test_a_run_is_tracked_and_synced_at_the_same_time_without_duplicates(store, folder):
    """Each sends lines that the other has sent; the run goes on, so that no file or status is sent."""
    tracker = RunSender("mlflow", folder.path, store)
    with run_lock(folder.path):
        assert tracker.send("RUNNING").metrics == Sent(9, 0, 0)
        folder.append_metrics({"step": 3, "train/reward": 1.0, "time/step": 2.0})
        assert sync_run(store, folder.path).metrics == Sent(3, 9, 0)
        folder.append_metrics({"step": 4, "train/reward": 1.0, "time/step": 2.0})
        assert tracker.send("RUNNING").metrics == Sent(3, 12, 0)
        folder.append_metrics({"step": 5, "train/reward": 1.0, "time/step": 2.0})
        assert tracker.send("RUNNING").metrics == Sent(3, 0, 0)
    assert history(store, folder) == metrics_of(folder)


def test_a_tracked_step_has_the_time_at_which_it_was_done(store, folder):
    sender = RunSender("mlflow", folder.path, store)
    sender.clocks[1] = 1_700_000_000_123
    sender.send("RUNNING")
    found = client_of(store.uri).get_metric_history(run_at(store, folder).info.run_id, "train/reward")
    assert {metric.step: metric.timestamp for metric in found}[1] == 1_700_000_000_123


def test_a_sync_to_another_store_keeps_the_runs_own_link_first(store, folder):
    track(store, folder)
    elsewhere = Store(store.uri, "another experiment", store.artifact_location)
    sync_run(elsewhere, folder.path)
    assert [place.project for place in read_places(folder.path, "mlflow")] == ["bandpo", "another experiment"]
    assert history(elsewhere, folder) == history(store, folder) == metrics_of(folder)


def test_a_run_whose_store_has_moved_keeps_its_mlflow_run(folder, store):
    """The file of the address in the link does not exist; the run is found in the store by its key."""
    sync_run(store, folder.path)
    (place,) = read_places(folder.path, "mlflow")
    moved = replace(place, destination=f"sqlite:///{folder.path}/gone.db")
    (folder.path / STATE_FILE).unlink()
    write_place(folder.path, "mlflow", moved)
    found = store_for_run(read_stored_run(folder.path), None, {"MLFLOW_TRACKING_URI": store.uri})
    assert found.uri == store.uri
    assert sent_nothing(sync_run(store, folder.path))
    assert run_at(store, folder).info.run_id == run_id_of(place)


def test_the_store_of_a_run(folder, store):
    """In this order: the option, the settings, the first store, the environment, the runs folder."""
    runs = folder.path.parent

    def uri(option: str | None = None, env: str = "http://env") -> str:
        return store_for_run(read_stored_run(folder.path), option, {"MLFLOW_TRACKING_URI": env}).uri

    assert uri(env="") == f"sqlite:///{runs}/mlflow.db"
    (runs / "sweep.yaml").write_text("runs: []\n")
    assert uri(env="") == f"sqlite:///{runs.parent}/mlflow.db"
    assert uri() == "http://env"
    sync_run(store, folder.path)
    assert uri() == store.uri
    folder.write_config(to_yaml(RunConfig(tracking=TrackingConfig(uri="http://own"))))
    assert uri() == "http://own"
    assert uri("http://option") == "http://option"
    (folder.path / "config.yaml").write_text("seed: 3\n")
    (folder.path / STATE_FILE).unlink()
    write_place(folder.path, "mlflow", Place("http://***@host", "bandpo", "k", "r"))
    assert uri() == "http://env"  # the password of the first store was redacted
