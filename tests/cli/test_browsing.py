"""`bandpo runs`, `show`, `samples` and `plot`, on the folder of a real run and on damaged ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bandpo_cli.config.layers import resolve, to_yaml
from bandpo_cli.experiments import train
from bandpo_cli.storage.run_folder import RunFolder
from tests.cli.eval_command import succeed, usage_error

SETTINGS: dict[str, Any] = {
    "steps": 3,
    "sampling": {"prompts": 4, "samples": 4},
    "optim": {"updates": 2, "lr": 2e-4},
    "evaluation": {"problems": 3, "samples": 2, "k": [2], "every": 3},
    "tracking": {"mlflow": False},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the run `first`, which tests only read."""
    place = tmp_path_factory.mktemp("trained")
    train(resolve([SETTINGS]), runs_dir=place / "runs", name="first")
    return place


@pytest.fixture
def changed(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of that folder."""
    return Path(shutil.copytree(trained, tmp_path, dirs_exist_ok=True))


def bandpo(place: Path, *arguments: str, columns: int = 120) -> str:
    return succeed(*arguments, cwd=place, COLUMNS=str(columns)).out


def records(place):
    return RunFolder(place / "runs" / "first").read_metrics()


def completions(place, step):
    return pq.read_table(place / f"runs/first/samples/step-{step:06d}.parquet").to_pylist()


def write_records(run, lines):
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_runs_lists_values_of_metrics_jsonl(trained):
    (found,) = json.loads(bandpo(trained, "runs", "--format", "json"))
    last = records(trained)[-1]
    assert (found["name"], found["method"], found["task"]) == ("first", "band-kl-0.05", "countdown")
    assert (found["status"], found["step"], found["steps"]) == ("FINISHED", 3, 3)
    assert found["heldout"] == last["eval/countdown/mean_at_2"]
    assert (found["accuracy"], found["entropy"]) == (last["train/accuracy"], last["train/entropy"])
    (line,) = [line for line in bandpo(trained, "runs").splitlines() if line.startswith("first")]
    assert line.split()[:5] == ["first", "band-kl-0.05", "countdown", "finished", "3/3"]
    assert f"{last['train/entropy']:.3f}" in line
    narrow = bandpo(trained, "runs", columns=80).splitlines()
    assert all(len(line) <= 80 for line in narrow)
    assert any("finished" in line for line in narrow)


@pytest.mark.slow
def test_runs_are_filtered_and_sorted(changed):
    runs = changed / "runs"
    better, killed = runs / "deltas" / "kl-s1", runs / "other"
    for folder in (better, killed):
        shutil.copytree(runs / "first", folder)
    (runs / "deltas" / "sweep.yaml").write_text("name: deltas\n")
    lines = records(changed)
    lines[-1]["eval/countdown/mean_at_2"] = 1.0
    write_records(better, lines)
    (killed / "summary.json").unlink()

    def names(*arguments: str) -> list[str]:
        return [load["name"] for load in json.loads(bandpo(changed, "runs", "--format", "json", *arguments))]

    def set_bounds(bounds: dict[str, Any]) -> None:
        (killed / "config.yaml").write_text(to_yaml(resolve([SETTINGS, {"bounds": bounds}])))

    set_bounds({"method": "band", "divergence": "tv", "delta": 0.1})
    assert sorted(names()) == ["deltas/kl-s1", "first", "other"]
    assert names("--sort", "heldout")[0] == "deltas/kl-s1"
    assert names("--sort", "name") == ["deltas/kl-s1", "first", "other"]
    assert names("deltas") == names("deltas/*") == ["deltas/kl-s1"]
    assert names("f*") == ["first"]
    assert names("--method", "band-tv") == names("--status", "killed") == ["other"]
    assert len(names("--method", "band")) == 3
    assert names("--method", "clip") == names("--task", "gsm8k") == []
    set_bounds({"method": "clip"})
    assert names("--method", "grpo") == names("--method", "clip") == ["other"]


def test_damaged_and_killed_runs_are_named(changed):
    folder = changed / "runs" / "broken"
    shutil.copytree(changed / "runs" / "first", folder)
    (folder / "metrics.jsonl").write_text("{}\n")
    out = bandpo(changed, "runs")
    for part in ("first", "damaged", "line 1 is not a JSON object with a step"):
        assert part in out
    usage_error("show", "broken", cwd=changed)
    (folder / "metrics.jsonl").unlink()
    shutil.rmtree(folder / "tokens")
    usage_error("plot", "broken", cwd=changed, parts=["nothing to plot"])
    summary = changed / "runs" / "first" / "summary.json"
    stopped = {"status": "KILLED", "error": "stopped by Ctrl-C"}
    summary.write_text(json.dumps(json.loads(summary.read_text()) | stopped))
    assert "stopped, step 3 of 3, 0:00" in bandpo(changed, "show", "first")
    assert "first" in bandpo(changed, "runs", "--status", "stopped")
    summary.unlink()
    out = bandpo(changed, "show", "first")
    assert "killed, step 3 of 3" in out
    assert "bandpo train --resume first" in out


def test_show_names_exactly_the_changed_settings(trained):
    found = json.loads(bandpo(trained, "show", "first", "--format", "json"))
    assert sorted(found["changed"]) == [
        "evaluation.every", "evaluation.k", "evaluation.problems", "evaluation.samples", "optim.lr",
        "optim.updates", "sampling.prompts", "sampling.samples", "steps", "tracking.mlflow",
    ]  # fmt: skip
    assert found["changed"]["optim.lr"] == {"value": 2e-4, "default": 5e-5}
    lines = records(trained)
    assert found["metrics"]["train/entropy"]["first"] == [1, lines[1]["train/entropy"]]
    assert found["metrics"]["train/entropy"]["last"] == [3, lines[3]["train/entropy"]]
    assert found["sampled_steps"] == [1, 2, 3]
    out = bandpo(trained, "show", "first")
    assert "optim.lr = 0.0002  (default 5e-05)" in out
    assert "finished, step 3 of 3" in out
    assert "grade/" not in out
    assert "time/step" in bandpo(trained, "show", "first", "--all")


def test_samples_prints_the_stored_texts_and_the_prompt_of_a_group_once(trained):
    rows = completions(trained, 2)
    out = bandpo(trained, "samples", "first", "--step", "2", "--limit", "0")
    for row in rows:
        assert row["text"].rstrip() in out
        assert row["problem_id"] in out
        assert out.splitlines().count(row["prompt"]) == 1
    right = sum(row["accuracy"] == 1 for row in rows)
    assert f"16 of 16 completions of runs/first/samples/step-000002.parquet, {right} correct" in out


def test_samples_are_filtered(trained):
    rows = completions(trained, 3)
    problem = rows[0]["problem_id"]

    def texts(*arguments: str) -> list[str]:
        out = bandpo(trained, "samples", "first", "--format", "jsonl", "--limit", "0", *arguments)
        return [json.loads(line)["text"] for line in out.splitlines()]

    assert texts() == [row["text"] for row in rows]
    assert texts("--wrong") == [row["text"] for row in rows if row["accuracy"] == 0]
    assert texts("--correct") == [row["text"] for row in rows if row["accuracy"] == 1]
    assert texts("--problem", problem) == [row["text"] for row in rows if row["problem_id"] == problem]


@pytest.mark.slow
def test_samples_of_an_evaluation(changed):
    bandpo(changed, "eval", "--model", "first", "--name", "scored", "--limit", "2", "--n", "2", "--no-mlflow")
    printed = bandpo(changed, "samples", "scored", "-n", "1")
    assert "1 of 4 completions of runs/scored/samples.parquet" in printed


@pytest.mark.slow
def test_step_0_of_a_run_is_its_model_before_training(changed):
    bandpo(changed, "eval", "--model", "first@0", "--name", "before", "--no-mlflow")
    compared = json.loads(bandpo(changed, "eval", "compare", "before", "first@0", "--format", "json"))
    assert compared["differences"] == {}
    assert compared["sets"]["countdown"]["problems"] == {"shared": 3, "only_a": 0, "only_b": 0}
    assert {metric["value"] for metric in compared["sets"]["countdown"]["metrics"].values()} == {0.0}
    bandpo(changed, "eval", "--model", "first", "--seed", "7", "--name", "after", "--no-mlflow")
    assert "differs  seed is 0 in A and 7 in B" in bandpo(changed, "eval", "compare", "first@0", "after")
    record = json.loads((changed / "runs" / "after" / "eval.json").read_text())
    record["config"]["evaluation"]["problems"] = None
    (changed / "all.json").write_text(json.dumps(record))
    assert "problems is 3 in A and all in B" in bandpo(changed, "eval", "compare", "first@0", "all.json")


def test_a_new_folder_has_no_runs_yet(tmp_path):
    assert bandpo(tmp_path, "runs") == "no runs yet; bandpo train starts one\n"
    assert json.loads(bandpo(tmp_path, "runs", "--format", "json")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("runs --runs-dir nowhere", "--runs-dir nowhere: there is no such folder"),
        ("runs --sort accurcy", "--sort accurcy: unknown (did you mean 'accuracy'?)"),
        ("show frist", "no run 'frist' in runs (did you mean 'first'?)"),
        ("samples first --step 9", "the nearest is --step 3"),
        ("samples first --problem 7", "--problem 7: no such problem"),
        ("plot first --out runs/first/config.yaml", "cannot be written"),
    ],
)
def test_mistakes_are_one_line(trained, arguments, message):
    usage_error(*arguments.split(), cwd=trained, parts=[message])


@pytest.mark.slow
def test_plot_writes_the_format_that_is_asked_for(changed):
    out = bandpo(changed, "plot", "first", "--format", "svg", "--out", "figures")
    written = sorted((changed / "figures").iterdir())
    assert [path.stem for path in written] == ["accuracy", "clip", "clip_map", "entropy"]
    assert all(path.read_bytes().startswith(b"<?xml") for path in written)
    assert out.split() == [f"figures/{name}.svg" for name in ("accuracy", "entropy", "clip", "clip_map")]


def test_view_writes_the_page_of_a_recorded_step(changed):
    assert bandpo(changed, "view", "first").strip() == "runs/first/view/step-000003.html"
    assert bandpo(changed, "view", "first", "--step", "1", "--out", "one.html").strip() == "one.html"
    assert "<title>first, step 1</title>" in (changed / "one.html").read_text()
    parts = ["--step 2: its tokens are not recorded in runs/first; recorded: 1, 3"]
    usage_error("view", "first", "--step", "2", cwd=changed, parts=parts)


@pytest.mark.slow
def test_rewards_other_than_0_and_1_follow_in_runs_and_come_first_in_show(changed):
    lines = records(changed)
    place = bandpo(changed, "runs").splitlines()[0].index("held-out")
    for line in lines:
        line |= {"eval/countdown/reward": -0.125} if "eval/countdown/mean_at_2" in line else {}
        line |= {"train/reward": line["step"] / 4} if line["step"] else {}
    write_records(changed / "runs/first", lines)
    other = shutil.copytree(changed / "runs/first", changed / "runs/other")
    lines[-1]["train/reward"] = 0.875
    write_records(other, lines)
    found = json.loads(bandpo(changed, "runs", "--format", "json", "--sort", "reward"))
    values = [(run["name"], run["reward"], run["heldout_reward"]) for run in found]
    assert values == [("other", 0.875, -0.125), ("first", 0.75, -0.125)]
    for columns in (80, 120):
        lines = bandpo(changed, "runs", columns=columns).splitlines()
        (line,) = [line for line in lines if line.startswith("other")]
        assert {"-0.125", "0.875"} <= {*line.split()}
    assert lines[1].index("held-out") == place
    shown = [line.split()[0] for line in bandpo(changed, "show", "first").splitlines() if "/" in line]
    metrics = [name for name in shown if name.startswith(("train/", "eval/"))]
    assert metrics[:2] == ["train/reward", "train/accuracy"]
    assert metrics.index("eval/countdown/reward") < metrics.index("eval/countdown/mean_at_2")
