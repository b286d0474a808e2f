"""Import of verl's runs: names and values, the run that is read, mistakes, and one report of both engines."""

import json
import os
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric

from bandpo_cli.config.layers import resolve, to_yaml
from bandpo_cli.errors import RunError, UserError
from bandpo_cli.experiments import import_verl
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tracking.mlflow_store import sqlite_uri
from tests.cli.eval_command import succeed, usage_error

STEP = {
    "critic/score/mean": 0.25, "actor/entropy": 0.5, "actor/pg_clipfrac": 0.01, "actor/band_upper_fraction": 0.008,
    "actor/grad_norm": 1.5, "actor/lr": 5e-5, "actor/ppo_kl": 0.001, "response_length/mean": 7.0,
    "timing_s/step": 12.0, "training/global_step": 1.0,
}  # fmt: skip
"""Metrics of a step under the names that verl's logger gives MLflow."""


@pytest.fixture
def job(tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an exported job's folder, with a store of one finished run of three steps."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "job"
    folder.mkdir()
    shutil.copy(empty_database, folder / "mlflow.db")
    write_settings(folder, steps=3)
    first, last = ({"val-core/countdown/acc/mean_at_16": value} for value in (0.1, 0.4))
    first |= {"val-core/countdown/acc/best_at_16/mean": 0.9}
    log_run(folder, "job", {0: first, 1: STEP, 2: STEP, 3: STEP | last})
    return folder


def write_settings(folder: Path, **settings: Any) -> None:
    (folder / "config.yaml").write_text(to_yaml(resolve([settings])), encoding="utf-8")


def log_run(folder: Path, name: str, steps: dict[int, dict[str, float]], status: str = "FINISHED") -> str:
    client = MlflowClient(sqlite_uri(folder / "mlflow.db"))
    existing = client.get_experiment_by_name("bandpo")
    experiment = existing.experiment_id if existing else client.create_experiment("bandpo")
    run = client.create_run(experiment, run_name=name)
    values = [Metric(key, value, 0, step) for step, item in steps.items() for key, value in item.items()]
    client.log_batch(run.info.run_id, metrics=values)
    client.set_terminated(run.info.run_id, status)
    return str(run.info.run_id)


def test_metrics_get_the_names_of_a_run_here(job, tmp_path):
    run, excluded = import_verl(job, runs_dir=tmp_path / "runs")
    assert (run.status, run.step, run.steps, run.name) == ("FINISHED", 3, 3, "job")
    first, *_, last = RunFolder(run.path).read_metrics()
    assert first == {"step": 0, "eval/countdown/mean_at_16": 0.1}
    assert last == {
        "step": 3, "train/reward": 0.25, "clip/active_fraction": 0.01, "clip/upper_fraction": 0.008,
        "optim/grad_norm": 1.5, "optim/lr": 5e-5, "train/response_length": 7.0, "time/step": 12.0,
        "eval/countdown/mean_at_16": 0.4,
    }  # fmt: skip
    assert excluded == ["actor/entropy", "actor/ppo_kl", "val-core/countdown/acc/best_at_16/mean"]
    assert json.loads((run.path / "verl.json").read_text("utf-8"))["excluded"] == excluded
    write_settings(job, steps=3, objective={"aggregation": "token-mean"})  # then the entropy means the same
    run, _ = import_verl(job, runs_dir=tmp_path / "runs", name="tokens")
    assert RunFolder(run.path).read_metrics()[-1]["train/entropy"] == 0.5


def test_the_last_run_of_the_name_or_the_one_that_is_named(job, tmp_path):
    log_run(job, "other", {1: STEP | {"critic/score/mean": 0.7}})
    later = log_run(job, "job", {1: STEP | {"critic/score/mean": 0.9}}, status="FAILED")
    run, _ = import_verl(job, runs_dir=tmp_path / "runs")
    assert (run.status, RunFolder(run.path).read_metrics()[-1]["train/reward"]) == ("FAILED", 0.9)
    again, _ = import_verl(job, runs_dir=tmp_path / "runs", name="again", run_id=later)
    assert RunFolder(again.path).read_metrics() == RunFolder(run.path).read_metrics()


def test_an_import_is_not_resumed(job, tmp_path):
    """A resume without checkpoints would start again and replace the imported metrics."""
    write_settings(job, steps=50)
    run, _ = import_verl(job, runs_dir=tmp_path / "runs")
    assert run.status == "FAILED"  # verl ends the MLflow run as FINISHED after an error, too
    folder = run.path
    before = (folder / "metrics.jsonl").read_bytes()
    usage_error("train", "--resume", "job", cwd=tmp_path, parts=["job was imported from verl"])
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_mistakes_write_nothing(job, tmp_path):
    runs = tmp_path / "runs"
    for arguments, error, message in (
        ({"job": tmp_path / "nothing"}, UserError, "no config.yaml"),
        ({"uri": sqlite_uri(tmp_path / "no.db")}, UserError, "no such MLflow store"),
        ({"run_id": "0" * 32}, UserError, "not found"),
        ({"uri": "http://127.0.0.1:9"}, RunError, "127.0.0.1:9"),
    ):
        with pytest.raises(error, match=message):
            import_verl(**{"job": job, "runs_dir": runs, **arguments})
    (runs / "job").mkdir(parents=True)
    with pytest.raises(UserError, match="exists already; try --name job-2"):
        import_verl(job, runs_dir=runs)
    (runs / "job").rmdir()
    renamed = job.rename(tmp_path / "renamed")
    with pytest.raises(UserError, match=r"no run 'renamed' \(runs: job\)"):
        import_verl(renamed, runs_dir=runs)
    write_settings(renamed, steps=3, tracking={"experiment": "elsewhere"})
    with pytest.raises(UserError, match="no experiment 'elsewhere'"):
        import_verl(renamed, runs_dir=runs)
    assert not [*runs.iterdir()]


@pytest.mark.slow
def test_a_server_that_fails_ends_the_import_in_one_line_without_retries(job, tmp_path, monkeypatch, capsys):
    """The server answers the check of its health, and MLflow with 503, which MLflow by itself retries for minutes."""
    requests: list[str] = []

    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        requests.append(handler.path)
        handler.send_response(200 if handler.path == "/health" else 503)
        handler.end_headers()

    methods = {"do_GET": answer, "log_message": mock.Mock()}
    handler = type("FailingHandler", (BaseHTTPRequestHandler,), methods)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    uri = f"http://user:hunter2@127.0.0.1:{server.server_port}"
    with pytest.raises(
        RunError, match=r"^MLflow at http://\*\*\*@127.*MlflowException: API request"
    ) as raised:
        import_verl(job, uri=uri, runs_dir=tmp_path / "r")
    server.shutdown()
    assert ("\n" in str(raised.value), capsys.readouterr().err) == (False, "")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert [path for path in requests if path != "/health"] == requests[1:2]
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_runs_of_both_engines_are_two_arms_of_one_report(job, tmp_path):
    own = RunFolder.create(tmp_path, "own")
    own.write_config(to_yaml(resolve([{"steps": 3}])))
    own.append_metrics({"step": 3, "train/entropy": 0.6, "eval/countdown/mean_at_16": 0.35})
    own.write_summary({"status": "FINISHED", "steps": 3})
    out = succeed("import", "verl", job, "--name", "theirs", "--runs-dir", tmp_path, cwd=tmp_path).out
    assert "FINISHED, step 3 of 3" in out
    assert "excluded  actor/entropy" in out
    printed = succeed("report", own.path, tmp_path / "theirs", "--format", "json", cwd=tmp_path).out
    variants = json.loads(printed)["variants"]
    assert {variant["name"] for variant in variants} == {"kl 0.05", "kl 0.05 engine=verl"}
