"""Names, params, tags and files in the form that MLflow accepts, by its own validators, and without secrets."""

import math
from itertools import groupby, product
from pathlib import Path

import pytest

from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.storage.tables import TOKEN_COLUMNS
from bandpo_cli.tracking.mlflow_store import Store, tracking_store, ui_command, ui_text
from bandpo_cli.tracking.mlflow_tracker import flat_params, run_tags
from bandpo_cli.tracking.sender import run_artifacts
from bandpo_cli.tracking.trackers import Place, finite_metrics, mlflow_name, write_place
from tests.cli.eval_command import Done, bandpo
from tests.cli.train_runs import SMALL

NAMES = {
    "eval/gsm8k/mean_at_16": "eval/gsm8k/mean_at_16", "clip/x/p_0.001_0.01": "clip/x/p_0.001_0.01", "π": "_",
    "mean@16": "mean_at_16", "share[p<0.1]": "share_p_lt_0.1_", "eval/org/task:v1": "eval/org/task_v1",
    "/a//b/../c/": "a/b/c", "": "unnamed", "x" * 400: "x" * 250,
}  # fmt: skip


def test_names_become_legal_and_legal_names_are_unchanged():
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name

    assert {name: mlflow_name(name) for name in NAMES} == NAMES
    for legal in NAMES.values():
        _validate_metric_name(legal)
        _validate_param_name(legal)


def test_the_charts_of_accuracy_entropy_and_reward_are_first_and_those_of_bins_last_and_in_order():
    """MLflow sorts sections (names up to the last slash) and the charts in them as JavaScript sorts strings."""
    from mlflow.utils.validation import _validate_metric_name

    ranges = ["0_0.001", "0.001_0.01", "0.01_0.1", "0.1_0.5", "0.5_0.9", "0.9_1"]
    metrics = ("clip/active_fraction", "clip/token_share", "gradient/weight_mean/positive")
    bins = {f"{metric}/p_{edges}" for metric in metrics for edges in ranges}
    keys = [*bins, "clip/active_fraction", "eval/a/mean_at_4", "time/step", "train/accuracy", "train/entropy"]
    keys += ["train/response_length", "train/reward"]
    values = {key: index / 7 for index, key in enumerate(keys)}
    names = finite_metrics(values)
    for name in names:
        _validate_metric_name(name)
    charts = sorted(tuple(name.rpartition("/")[::2]) for name in names)
    sections = {section: [name for _, name in of] for section, of in groupby(charts, lambda chart: chart[0])}
    assert list(sections) == ["Main", "clip", "eval/a", "time", "train", "vs_probability"]
    assert sections["Main"] == ["accuracy", "clip_fraction", "entropy", "heldout_accuracy", "reward"]
    assert sections["train"] == ["accuracy", "entropy", "response_length", "reward"]
    edges = ["0.000_0.001", "0.001_0.010", "0.010_0.100", "0.100_0.500", "0.500_0.900", "0.900_1.000"]
    charts_of_bins = product(("active_fraction", "token_share", "weight_mean_positive"), edges)
    assert sections["vs_probability"] == [f"{metric}_p_{edge}" for metric, edge in charts_of_bins]
    assert names["Main/entropy"] == names["train/entropy"] == values["train/entropy"]
    assert names["vs_probability/token_share_p_0.000_0.001"] == values["clip/token_share/p_0_0.001"]
    assert names["vs_probability/active_fraction_p_0.900_1.000"] == values["clip/active_fraction/p_0.9_1"]


def test_only_finite_numbers_are_metrics_and_bins_with_close_edges_have_different_names():
    record = {"step": 3, "a": 1, "b": math.nan, "c": None, "d": True, "e": "x", "f": -math.inf, "g@1": 2.5}
    bins = {"clip/token_share/p_0_0.0001": 0.25, "clip/token_share/p_0.0001_0.0002": 0.5}
    bins["train/entropy"] = None  # a missing metric has no copy
    expected = {"token_share_p_0.000_0.0001": 0.25, "token_share_p_0.0001_0.0002": 0.5}
    assert finite_metrics(record) == {"a": 1.0, "g_at_1": 2.5}
    assert finite_metrics(bins) == {f"vs_probability/{name}": share for name, share in expected.items()}


def test_held_out_metrics_are_first_with_their_means_but_not_those_of_another_evaluation():
    scores = {"eval/a/mean_at_4": 0.25, "eval/b/mean_at_8": 0.75, "eval/a/reward": 0.5, "eval/b/reward": 1.0}
    means = {"Main/heldout_accuracy": 0.5, "Main/heldout_reward": 0.75}
    assert finite_metrics({"time/step": 1.0, **scores}) == {"time/step": 1.0, **scores, **means}
    assert finite_metrics(scores) == scores


def test_params_are_flat_and_short_and_contain_no_password():
    config = {"seed": 3, "bounds": {"method": "band", "relax": None, "delta": 0.05}, "long": "x" * 7000}
    config |= {"task": {"extra": {}, "levels": [3, 4]}, "tracking": {"uri": "http://me:secret@h"}}
    assert flat_params(config) == {
        "seed": "3", "bounds.method": "band", "bounds.relax": "null", "bounds.delta": "0.05", "task.extra": "{}",
        "task.levels": "[3, 4]", "tracking.uri": "http://***@h", "long": "x" * 6000,
    }  # fmt: skip


def test_tags_have_source_commit_and_versions():
    git, versions = {"commit": "abc", "dirty": True}, {"torch": "2.13.0"}
    env = {"command": "bandpo train", "git": git, "versions": versions}
    tags = run_tags(env | {"parent": {"run": "runs/a", "step": 4}})
    assert tags.pop("mlflow.user")
    assert tags == {
        "bandpo.fork": "runs/a@4", "mlflow.source.name": "bandpo train", "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": "abc", "git.dirty": "true", "version.torch": "2.13.0",
    }  # fmt: skip
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


@pytest.mark.parametrize(
    ("uri", "command"),
    [
        ("sqlite:///{here}/runs/mlflow.db", "mlflow ui --backend-store-uri sqlite:///runs/mlflow.db"),
        ("sqlite:////data/my runs/x.db", "mlflow ui --backend-store-uri 'sqlite:////data/my runs/x.db'"),
        ("http://h:5000", "http://h:5000"),
        ("https://me:secret@h:5000/mlflow/", "https://h:5000/mlflow"),
        ("postgresql://me:secret@h/db", "mlflow ui --backend-store-uri 'postgresql://***@h/db'"),
    ],
)
def test_ui_command_is_a_shell_command_or_an_address_without_password(tmp_path, monkeypatch, uri, command):
    monkeypatch.chdir(tmp_path)
    assert ui_command(uri.format(here=tmp_path)) == command


def test_the_text_for_a_run_is_its_address_on_a_server_and_else_the_command_before_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = "/#/experiments/7/runs/abc/model-metrics?workflowType=machine_learning"
    server = Store("http://me:secret@h:8080/mlflow/", "e", None)
    file = Store(f"sqlite:///{tmp_path}/mlflow.db", "e", None)
    assert ui_text(tmp_path, server) == "http://h:8080/mlflow"  # MLflow has not answered
    command = "mlflow ui --backend-store-uri sqlite:///mlflow.db"
    assert ui_text(tmp_path, file) == command
    for store in (server, file):
        write_place(tmp_path, "mlflow", Place(store.destination, "e", "k", "experiments/7/runs/abc"))
    assert ui_text(tmp_path, server) == f"http://h:8080/mlflow{page}"
    assert ui_text(tmp_path, file).splitlines() == [command, f"http://127.0.0.1:5000{page}"]


def test_of_many_sample_files_mlflow_gets_the_first_last_and_evaluated_ones(run):
    for step in range(1, 41):
        run.write_samples(step, [])
    run.write_eval(20, {})
    run.write_tokens(20, {key: [0.0] for key in TOKEN_COLUMNS})
    names = [str(path.relative_to(run.path)) for path in run_artifacts(run.path)]
    samples = [f"samples/step-{step:06d}.parquet" for step in (1, 20, 40)]
    top = ["config.yaml", "env.json", "metrics.jsonl", "summary.json"]
    assert names == [*top, "evals/step-000020.json", *samples]


SECRET = "s3cr3t"
ADDRESS = f"http://me:{SECRET}@127.0.0.1:9/?token={SECRET}#{SECRET}"
TRAIN = ["train", *(item for item in SMALL if item != "--no-mlflow"), "--steps", "1"]
EVAL = ["eval", "--n", "1", "--k", "1", "--limit", "1"]


def run_command(cwd: Path, *arguments: str, uri: str | None = None) -> Done:
    """Run a command; require that it prints no secret and leaves none in any file."""
    variables = dict.fromkeys(("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"), SECRET)
    if uri is not None:
        variables["MLFLOW_TRACKING_URI"] = uri
    done = bandpo(*arguments, cwd=cwd, **variables)
    assert SECRET not in done.out + done.err
    for path in cwd.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    return done


@pytest.mark.slow
def test_a_secret_of_the_environment_or_a_flag_is_stored_and_printed_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr("bandpo_cli.cli.doctor._check_imports", lambda _: None)  # no output of its own
    done = run_command(tmp_path, *TRAIN, "--name", "a", uri=ADDRESS)
    assert " ".join(done.out.split()).count("bandpo sync a") == 1, done.out
    for arguments in (
        ["show", "a"], ["sync", "a"], [*EVAL, "--name", "e"], ["doctor"],
        ["export", "verl", "--out", "job", "--config", "runs/a/config.yaml", "--allow-differences"],
        ["import", "verl", "job", "--name", "i"], ["import", "verl", "job", "--tracking-uri", ADDRESS],
    ):  # fmt: skip
        done = run_command(tmp_path, *arguments, uri=ADDRESS)
        fails = arguments[0] in ("sync", "import")  # nobody answers at the address
        assert done.code == (1 if fails else 0), (arguments, done)
    assert run_command(tmp_path, "sync", "a", "--tracking-uri", ADDRESS).code == 1
    for arguments in (TRAIN, EVAL, ["train", "--resume", "a", "--steps", "2"]):
        done = run_command(tmp_path, *arguments, "--tracking-uri", ADDRESS)
        assert (done.code, done.err.count("\n")) == (2, 1), done
        assert "set MLFLOW_TRACKING_URI" in done.err
