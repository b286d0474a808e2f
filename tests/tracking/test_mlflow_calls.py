"""The calls to MLflow: metrics in its units, batches within its limits, and the kind of the experiment."""

from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.tracking.mlflow_store import Store, create_sqlite_store, tracking_store
from bandpo_cli.tracking.mlflow_tracker import MlflowTracker
from bandpo_cli.tracking.sender import RunSender
from bandpo_cli.tracking.trackers import Point, Sent, finite_metrics
from tests.tracking.tracked import client_of, runs_at

KIND = "mlflow.experimentKind"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return tracking_store(TrackingConfig(), tmp_path, {})


@pytest.fixture
def client(store: Store) -> Any:
    create_sqlite_store(store.uri)
    return client_of(store.uri)


@pytest.mark.parametrize(
    ("existing", "kind"),
    [
        (None, "custom_model_development"),  # one of those that MLflow's pages know
        ({"mine": "1"}, "custom_model_development"),
        ({KIND: "genai_development"}, "genai_development"),
        ({KIND: ""}, ""),
    ],
)
def test_the_kind_of_an_experiment_is_model_training_unless_a_user_has_chosen_one(
    store, client, run, existing, kind
):
    if existing is not None:
        client.create_experiment("bandpo", store.artifact_location, tags=existing)
    RunSender("mlflow", run.path, store).send()
    assert {**(existing or {}), KIND: kind}.items() <= client.get_experiment_by_name("bandpo").tags.items()


def test_a_server_that_refuses_the_kind_gets_the_run(store, client, run, monkeypatch):
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    def refuse(self: Any, *_: Any) -> None:
        raise MlflowException("no permission")

    client.create_experiment("bandpo", store.artifact_location)
    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    RunSender("mlflow", run.path, store).send()
    assert KIND not in client.get_experiment_by_name("bandpo").tags
    assert list(runs_at(store.uri)) == ["first"]


class Client:
    """Stand-in for MLflow's client that records the calls of `log_batch`."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, float, int, int]]] = []

    def log_batch(self, run_id: str, metrics: list[Any], synchronous: bool) -> None:
        assert (run_id, synchronous) == ("run", True)
        self.batches.append([(metric.key, metric.value, metric.timestamp, metric.step) for metric in metrics])


def tracker_of(client: Client) -> MlflowTracker:
    """Return the tracker of a run that has no metrics."""
    tracker = MlflowTracker.__new__(MlflowTracker)
    tracker._client, tracker.run_id, tracker._names, tracker._histories = client, "run", set(), {}
    return tracker


def test_a_metric_is_sent_with_its_step_and_its_time_in_milliseconds():
    client = Client()
    records = [{"step": 3, "eval/a/mean@16": 0.5, "ratio/max": None}, {"step": 4, "eval/a/mean@16": 0.75}]
    points = [Point(record["step"], record["step"] * 1000, finite_metrics(record)) for record in records]
    assert tracker_of(client).send(points) == Sent(new=2, there=0, differing=0)
    assert client.batches == [[("eval/a/mean_at_16", 0.5, 3000, 3), ("eval/a/mean_at_16", 0.75, 4000, 4)]]


def test_no_call_has_more_metrics_than_mlflow_allows():
    """MLflow refuses a batch of more than 1000 metrics."""
    client = Client()
    names = [f"m{index}" for index in range(30)]
    points = [Point(step, 0, dict.fromkeys(names, 0.5)) for step in range(70)]
    assert tracker_of(client).send(points).new == 2100
    assert list(map(len, client.batches)) == [1000, 1000, 100]
    sent = [(key, step) for batch in client.batches for key, _, _, step in batch]
    assert sent == [(name, step) for step in range(70) for name in names]
