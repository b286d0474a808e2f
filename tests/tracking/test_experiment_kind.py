"""The kind of the MLflow experiment: model training, unless a user has chosen another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tracking.mirror import MlflowMirror
from bandpo_cli.tracking.store import Store, tracking_store

KIND = "mlflow.experimentKind"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return tracking_store(TrackingConfig(), tmp_path, {})


@pytest.fixture
def client(store: Store) -> Any:
    from mlflow.tracking import MlflowClient

    from bandpo_cli.tracking.store import create_sqlite_store

    create_sqlite_store(store.uri)
    return MlflowClient(tracking_uri=store.uri, registry_uri=store.uri)


def connect(store: Store, run: RunFolder) -> None:
    MlflowMirror.connect(store, run.path, run.name, {}, {})


def tags(client: Any) -> dict[str, str]:
    return dict(client.get_experiment_by_name("bandpo").tags)


def test_a_new_experiment_is_one_of_model_training(store: Store, client: Any, run: RunFolder) -> None:
    """The value is one of those that MLflow's pages know; its demo has the one for GenAI applications."""
    connect(store, run)
    assert tags(client)[KIND] == "custom_model_development"


def test_an_experiment_without_a_kind_gets_one(store: Store, client: Any, run: RunFolder) -> None:
    client.create_experiment("bandpo", tags={"mine": "1"})
    connect(store, run)
    assert {KIND: "custom_model_development", "mine": "1"}.items() <= tags(client).items()


@pytest.mark.parametrize("chosen", ["genai_development", "finetuning", ""])
def test_a_kind_that_a_user_has_chosen_is_kept(
    store: Store, client: Any, run: RunFolder, chosen: str
) -> None:
    client.create_experiment("bandpo", tags={KIND: chosen})
    connect(store, run)
    assert tags(client)[KIND] == chosen


def test_a_server_that_refuses_the_kind_gets_the_run(
    store: Store, client: Any, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    def refuse(self: Any, *_: Any) -> None:
        raise MlflowException("no permission")

    client.create_experiment("bandpo")
    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    connect(store, run)
    assert KIND not in tags(client)
    (found,) = client.search_runs([client.get_experiment_by_name("bandpo").experiment_id])
    assert found.info.run_name == "first"
