"""Names, params, tags and files in the form that MLflow accepts, checked with MLflow's own validators."""

from __future__ import annotations

import pytest

from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.storage.run_folder import run_artifacts
from bandpo_cli.storage.tables import TOKEN_COLUMNS
from bandpo_cli.tracking.names import finite_metrics, flat_params, mlflow_name, run_tags
from bandpo_cli.tracking.store import tracking_store, ui_command
from bandpo_cli.types import status_of


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("eval/gsm8k/mean_at_16", "eval/gsm8k/mean_at_16"),
        ("clip/active_fraction/p_0.001_0.01", "clip/active_fraction/p_0.001_0.01"),
        ("mean@16", "mean_at_16"),
        ("share[p<0.1]", "share_p_lt_0.1_"),
        ("eval/org/task:v1", "eval/org/task_v1"),
        ("/a//b/../c/", "a/b/c"),
        ("π", "_"),
        ("", "unnamed"),
        ("x" * 400, "x" * 250),
    ],
)
def test_names_become_legal_and_legal_names_are_unchanged(name, legal):
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name

    assert mlflow_name(name) == legal
    _validate_metric_name(legal)
    _validate_param_name(legal)


def test_only_finite_numbers_are_metrics():
    record = {
        "step": 3,
        "a": 1,
        "b": float("nan"),
        "c": None,
        "d": True,
        "e": "x",
        "f": float("-inf"),
        "g@1": 2.5,
    }
    assert finite_metrics(record) == {"a": 1.0, "g_at_1": 2.5}


def test_params_are_flat_and_short_and_contain_no_password():
    config = {
        "seed": 3,
        "bounds": {"method": "band", "relax": None, "delta": 0.05},
        "task": {"extra": {}, "levels": [3, 4]},
        "tracking": {"uri": "http://me:secret@h"},
        "long": "x" * 7000,
    }
    params = flat_params(config)
    assert params.pop("long") == "x" * 6000
    assert params == {
        "seed": "3",
        "bounds.method": "band",
        "bounds.relax": "null",
        "bounds.delta": "0.05",
        "task.extra": "{}",
        "task.levels": "[3, 4]",
        "tracking.uri": "http://***@h",
    }


def test_tags_have_source_commit_and_versions():
    env = {
        "command": "bandpo train",
        "git": {"commit": "abc", "dirty": True},
        "versions": {"torch": "2.13.0"},
    }
    tags = run_tags(env)
    assert tags.pop("mlflow.user")
    assert tags == {
        "mlflow.source.name": "bandpo train",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": "abc",
        "git.dirty": "true",
        "version.torch": "2.13.0",
    }
    assert "mlflow.source.git.commit" not in run_tags({"git": None})


def test_the_store_is_the_setting_then_the_environment_then_a_file_in_the_runs_folder(tmp_path):
    store = tracking_store(TrackingConfig(), tmp_path, {})
    assert store.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert store.artifact_location == (tmp_path / "mlartifacts").as_uri()
    environ = {"MLFLOW_TRACKING_URI": "http://h:5000"}
    assert tracking_store(TrackingConfig(), tmp_path, environ).uri == "http://h:5000"
    assert tracking_store(TrackingConfig(), tmp_path, environ).artifact_location is None
    mine = tracking_store(TrackingConfig(uri="sqlite:////data/x.db", experiment="e"), tmp_path, environ)
    assert (mine.uri, mine.experiment) == ("sqlite:////data/x.db", "e")
    assert mine.artifact_location == "file:///data/mlartifacts"
    database = tracking_store(TrackingConfig(uri="postgresql://h/db"), tmp_path, {})
    assert database.artifact_location == (tmp_path / "mlartifacts").as_uri()


def test_ui_command_is_a_shell_command_or_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert ui_command(here) == "mlflow ui --backend-store-uri sqlite:///runs/mlflow.db"
    assert ui_command("sqlite:////data/my runs/x.db") == (
        "mlflow ui --backend-store-uri 'sqlite:////data/my runs/x.db'"
    )
    assert ui_command("http://h:5000") == "http://h:5000"


def test_of_many_sample_files_mlflow_gets_the_first_last_and_evaluated_ones(run):
    for step in range(1, 41):
        run.write_samples(step, [])
    run.write_eval(20, {})
    run.write_tokens(20, {key: [0.0] for key in TOKEN_COLUMNS})
    names = [str(path.relative_to(run.path)) for path in run_artifacts(run.path)]
    assert names == [
        "config.yaml",
        "env.json",
        "metrics.jsonl",
        "summary.json",
        "evals/step-000020.json",
        "samples/step-000001.parquet",
        "samples/step-000020.parquet",
        "samples/step-000040.parquet",
    ]


def test_the_status_follows_from_the_exception():
    assert status_of(None) == "FINISHED"
    assert status_of(RuntimeError()) == "FAILED"
    assert status_of(KeyboardInterrupt()) == "KILLED"
    assert status_of(SystemExit(143)) == "KILLED"
