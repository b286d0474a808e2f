"""Evaluations at a real MLflow store: added to the run that made the model without changing its status."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout

import bandpo_cli.tracking.mlflow_tracker
from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.storage.run_folder import EvalFolder, RunFolder
from bandpo_cli.tracking.mlflow_store import Store, tracking_store
from bandpo_cli.tracking.mlflow_tracker import send_evaluation
from bandpo_cli.tracking.trackers import read_places, write_place
from tests.tracking.tracked import client_of, runs_at, track

METRICS = {"eval/a/mean_at_4": 0.5, "eval/a/mean_at_4_low": 0.25, "eval/a/mean_at_4_high": math.nan}


@pytest.fixture
def evaluation(run):
    folder = EvalFolder.create(run.path.parent, "an-evaluation")
    folder.write_record({"sets": {}})
    return folder


def store_of(run: RunFolder) -> Store:
    return tracking_store(TrackingConfig(), run.path.parent, {})


def mirror(run: RunFolder) -> str:
    """Track the three steps of `run` and return the address of the store."""
    store = store_of(run)
    track(store, run)
    return store.uri


def send(run: RunFolder, evaluation: EvalFolder) -> Path:
    about = ({"seed": 7}, {"versions": {"torch": "2"}}, [evaluation.path / "eval.json"])
    return send_evaluation(store_of(run), evaluation.path, run.path, 3, METRICS, *about)


@pytest.mark.parametrize("of_run", [True, False])
def test_links_are_written_under_the_lock_of_the_sender(run, evaluation, monkeypatch, of_run):
    """A tracker or `bandpo sync` that writes the link at the same time would lose one of the two."""
    if of_run:  # the run was sent, and its entry has lost the id: it is found by its key and written again
        mirror(run)
        (place,) = read_places(run.path, "mlflow")
        write_place(run.path, "mlflow", replace(place, remote_id=""))
    locked = []

    def record(folder: Path, tracker: str, place: Any) -> None:
        try:
            FileLock(folder / ".mlflow.lock", timeout=0).acquire().lock.release()
        except Timeout:
            locked.append(folder == (run.path if of_run else evaluation.path))
        write_place(folder, tracker, place)

    monkeypatch.setattr(bandpo_cli.tracking.mlflow_tracker, "write_place", record)
    send(run, evaluation)
    assert locked == [True]


def test_an_evaluation_gets_its_own_run_if_mlflow_lacks_the_run_of_the_model(run, evaluation):
    """The run was trained without MLflow, or deleted there."""
    assert send(run, evaluation) == evaluation.path
    uri = mirror(run)
    client_of(uri).delete_run(runs_at(uri)["first"].info.run_id)
    assert send(run, evaluation) == evaluation.path
    assert set(runs_at(uri)) == {"an-evaluation"}
