"""`bandpo eval` of a run's checkpoints: the metrics equal those of training, for every form of model reference."""

import json
import math
import shutil
from pathlib import Path

import pandas as pd
import pytest

from bandpo_cli.config.layers import read_layer, resolve
from tests.cli.eval_command import SMALL, bandpo, record_of, samples_of, succeed, usage_error
from tests.cli.train_runs import sets

RUN = "first@1"  # a run name may contain an @


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `runs/first@1`: four steps, checkpoints and evaluations at 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    settings = [*sets("evaluation.every=2 optim.lr=1e-3 checkpoint.every=2"), "--seed", "5", "--no-mlflow"]
    succeed("train", *SMALL, *settings, "--steps", "4", "--name", RUN, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def latest(place: Path) -> Path:
    """Return the evaluation of the latest checkpoint with the run's settings."""
    succeed("eval", "--model", RUN, "--name", "latest", cwd=place)
    return place / "runs" / "latest"


def training_record(place, step):
    return json.loads((place / "runs" / RUN / "evals" / f"step-{step:06d}.json").read_text())


def test_metrics_of_a_checkpoint_equal_those_of_training(place, latest):
    record = record_of(latest)
    assert record["status"] == "finished"
    assert record["sets"] == training_record(place, 4)["sets"]
    assert record["sets"] != training_record(place, 2)["sets"], "the policy changes between the steps"
    assert record["model"]["step"] == 4
    assert {path.name for path in latest.iterdir()} == {"env.json", "eval.json", "plots", "samples.parquet"}
    assert (latest / "plots" / "success.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_agree_with_the_table_of_completions(latest):
    """The means are recomputed by pandas from the table, with the definitions of docs/evaluation.md."""
    table, figures = samples_of(latest), record_of(latest)["sets"]["countdown"]["metrics"]
    assert len(table) == 6 * 8
    by_problem = table.groupby("problem_id")
    corrects = by_problem["accuracy"].sum()
    expected = {
        "mean_at_8": by_problem["accuracy"].mean().mean(),
        "pass_at_1": by_problem["accuracy"].mean().mean(),
        "pass_at_4": corrects.map(lambda c: 1 - math.comb(8 - int(c), 4) / math.comb(8, 4)).mean(),
        "answer_format_rate": by_problem["verdict"].apply(lambda v: (v != "malformed").mean()).mean(),
        "truncation_rate": by_problem["finish_reason"].apply(lambda r: (r == "length").mean()).mean(),
        "response_length": by_problem["length"].mean().mean(),
    }
    for name, value in expected.items():
        assert figures[name]["value"] == pytest.approx(value, abs=1e-12), name


@pytest.mark.slow
def test_an_earlier_checkpoint_by_its_folder(place):
    succeed("eval", "--model", f"./runs/{RUN}/checkpoints/step-000002/", "--name", "earlier", cwd=place)
    record = record_of(place / "runs" / "earlier")
    assert record["sets"] == training_record(place, 2)["sets"]
    run = place / "runs" / RUN
    checkpoint = run / "checkpoints" / "step-000002"
    assert record["model"] == {"path": str(checkpoint), "run": str(run), "step": 2}


def test_flags_override_the_settings_of_the_run(place):
    flags = "--n 2 --limit 3 --temperature 0.5 --name flags --set evaluation.batch=2 --no-mlflow"
    succeed("eval", "--model", RUN, *flags.split(), cwd=place)
    record = record_of(place / "runs" / "flags")
    own = resolve([read_layer(place / "runs" / RUN / "config.yaml")]).model_dump(mode="json")
    assert record["config"]["seed"] == own["seed"] == 5
    assert record["config"]["task"] == own["task"]
    changed = {"samples": 2, "problems": 3, "temperature": 0.5, "k": [2], "batch": 2}
    assert record["config"]["evaluation"] == own["evaluation"] | changed
    scores = record["sets"]["countdown"]
    assert (scores["problems"], scores["completions"]) == (3, 6)
    assert {"mean_at_2", "pass_at_2", "maj_at_2"} <= set(scores["metrics"])


def test_standard_output_is_the_json_record_only(place):
    flags = ["--name", "json", "--format", "json", "--limit", "2"]
    done = succeed("eval", "--model", RUN, *flags, cwd=place)
    assert json.loads(done.out) == record_of(place / "runs" / "json")
    assert "runs/json" in done.err


def test_plain_lines_and_the_default_name_with_model_tasks_n_and_seed(place):
    done = succeed("eval", "--model", RUN, "--limit", "1", "--n", "1", cwd=place)
    assert ("\x1b" in done.out, done.err) == (False, "")
    for part in ("countdown: 1/1 completions", "1 problem × 1 = 1 completions", "mean@1", "wrong"):
        assert part in done.out
    (folder,) = (place / "runs").glob("eval-*")
    assert folder.name.startswith("eval-first@1@4-countdown-n1-s5-")
    assert folder.name in done.out


@pytest.mark.slow
def test_resume_works_from_another_current_folder(place, tmp_path):
    """The record contains absolute paths of the model and its files, so the current folder does not matter."""
    succeed("eval", "--model", f"runs/{RUN}", "--name", "moved", "--no-mlflow", cwd=place)
    folder = place / "runs" / "moved"
    before = samples_of(folder)
    (folder / "samples.parquet").unlink()
    succeed("eval", "--resume", folder, "--no-mlflow", cwd=tmp_path)
    pd.testing.assert_frame_equal(samples_of(folder), before, check_exact=True)
    assert not list(tmp_path.iterdir())


def test_two_steps_of_a_run_are_compared(place, latest):
    done = succeed("eval", "compare", f"{RUN}@0", f"{RUN}@4", "--format", "json", cwd=place)
    found = json.loads(done.out)["sets"]["countdown"]
    a, b = (training_record(place, step)["sets"]["countdown"] for step in (0, 4))
    before, after = (record["metrics"]["mean_at_8"]["value"] for record in (a, b))
    change = found["metrics"]["mean"]
    assert [change[key] for key in ("a", "b", "value")] == pytest.approx([before, after, after - before])
    shares = [[x["by_problem"][id_]["mean_at_8"] for x in (a, b)] for id_ in a["by_problem"]]
    assert found["wins"] == sum(y > x for x, y in shares)
    assert found["problems"] == {"shared": 6, "only_a": 0, "only_b": 0}
    assert done.err == ""


def test_an_evaluation_equals_the_step_that_it_repeats(place, latest):
    for other in ("latest", "runs/latest/eval.json"):
        done = succeed("eval", "compare", RUN, other, "--format", "json", cwd=place)
        found = json.loads(done.out)["sets"]["countdown"]
        assert all(item["value"] == 0 for item in found["metrics"].values())
        assert (found["wins"], found["losses"], found["ties"]) == (0, 0, 6)
    text = succeed("eval", "compare", RUN, "latest", cwd=place).out
    assert "6 problems in both" in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["compare", "latets", RUN], ["no evaluation 'latets'", "did you mean 'latest'"]),
        (["compare", "latest", f"{RUN}@3"], ["no evaluation of that step", "0, 2, 4"]),
        (["compare", "latest", "nowhere.json"], ["nowhere.json", "No such file"]),
        (["compare", "latest", f"runs/{RUN}/summary.json"], ["not the record of an evaluation"]),
        (["--model", f"{RUN}@{'9' * 5000}"], ["expected a step after @"]),
        (["--model", f"runs/{RUN}/checkpoints/step-000003"], ["no such checkpoint", "2, 4"]),
        (["--model", f"runs/{RUN}/plots"], ["plots", "config.json"]),
        (["--model", RUN, "--k", "16"], ["k = 16", "samples is 8"]),
        (["--model", RUN, "--name", "latest"], ["exists already", "--name latest-2"]),
    ],
)
def test_a_user_error_is_one_line_and_writes_nothing(place, latest, arguments, parts):
    before = sorted((place / "runs").rglob("*"))
    assert len(usage_error("eval", *arguments, cwd=place, parts=parts)) < 1000
    assert sorted((place / "runs").rglob("*")) == before


@pytest.mark.slow
def test_mlflow_gets_the_metrics_in_the_right_run(tmp_path, empty_database):
    """They are at the checkpoint's step of the run, with intervals and files; the status of the run stays."""
    from mlflow import MlflowClient

    (tmp_path / "runs").mkdir()
    shutil.copy(empty_database, tmp_path / "runs")
    succeed("train", *SMALL, "--set", "evaluation.every=0", "--steps", "1", "--name", "a", cwd=tmp_path)
    few = ["--n", "4", "--limit", "3"]
    succeed("eval", "--model", "a", *few, "--name", "of-a", cwd=tmp_path)
    assert "run embedded" in succeed("eval", *few, "--name", "embedded", cwd=tmp_path).out
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("bandpo").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert {name: run.info.status for name, run in runs.items()} == {"a": "FINISHED", "embedded": "FINISHED"}
    for name, run, step, folder in (("of-a", "a", 1, "evals/of-a"), ("embedded", "embedded", 0, "")):
        sent, id_ = record_of(tmp_path / "runs" / name)["metrics"], runs[run].info.run_id
        assert "eval/countdown/mean_at_4_low" in sent
        for metric, value in sent.items():
            points = {point.step: point.value for point in client.get_metric_history(id_, metric)}
            assert points == ({} if value is None else {step: value}), metric
        files = {Path(item.path).name for item in client.list_artifacts(id_, folder)}
        assert files == {"eval.json", "plots", "samples.parquet"}
    assert runs["embedded"].data.params["evaluation.samples"] == "4"
    succeed("eval", "--resume", "embedded", cwd=tmp_path)
    assert len(client.search_runs([experiment])) == 2, "the same MLflow run"


@pytest.mark.slow
def test_an_unreachable_server_gives_one_warning(place):
    flags = ["--limit", "2", "--name", "away", "--mlflow", "--tracking-uri", "http://127.0.0.1:9"]
    done = bandpo("eval", "--model", RUN, *flags, cwd=place)
    assert done.code == 0
    (warning,) = [line for line in done.out.splitlines() if "warning" in line]
    assert "did not accept the metrics" in warning
    assert done.err == ""
    assert record_of(place / "runs" / "away")["status"] == "finished"
    assert (place / "runs" / "away" / "samples.parquet").is_file()
    assert "MLflow  " not in done.out
