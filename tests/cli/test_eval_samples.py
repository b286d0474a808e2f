"""`bandpo eval --samples`: stored completions are graded again, with equal verdicts, without a model."""

import datetime
import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.eval_command import SMALL, record_of, samples_of, succeed, usage_error
from tests.commands import run_bandpo
from tests.tasks.stored_completions import jsonl


def rescore(place: Path, samples: str | Path, *flags: str, name: str = "a") -> Path:
    """Score stored completions without MLflow and return the folder of the evaluation."""
    succeed("eval", "--samples", samples, "--name", name, "--no-mlflow", *flags, cwd=place)
    return place / "runs" / name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of two steps and an evaluation of its checkpoint."""
    folder = tmp_path_factory.mktemp("rescored")
    words = ["--set", "task.numbers=3", "--steps", "2", "--name", "run", "--no-mlflow"]
    succeed("train", *SMALL, *words, cwd=folder)
    succeed("eval", "--model", "run", "--name", "first", cwd=folder)
    return folder


@pytest.mark.slow
def test_completions_of_an_evaluation_give_equal_metrics(place):
    first = place / "runs" / "first"
    again = rescore(place, "runs/first/samples.parquet", "--k", "1,4", name="again")
    pd.testing.assert_frame_equal(samples_of(again), samples_of(first), check_exact=True)
    assert record_of(again)["sets"] == record_of(first)["sets"]
    assert record_of(again)["model"] is None
    assert record_of(again)["samples"]["path"] == str(first / "samples.parquet")


@pytest.mark.slow
def test_completions_of_a_training_step_get_equal_verdicts(place):
    path = place / "runs" / "run" / "samples" / "step-000002.parquet"
    succeed("eval", "--samples", path, "--no-mlflow", cwd=place)
    (folder,) = (place / "runs").glob("eval-run-step-000002-rescored-*")
    before, after = pd.read_parquet(path), samples_of(folder)
    names = ["problem_id", "text", "accuracy", "verdict", "length", "finish_reason", "logprob_sum", "extra"]
    for name in names:
        assert list(after[name]) == list(before[name]), name
    figures = record_of(folder)["sets"]["countdown"]["metrics"]
    by_problem = before.groupby("problem_id")["accuracy"]
    assert by_problem.size().nunique() == 1
    assert figures["mean_at_4"]["value"] == pytest.approx(by_problem.mean().mean())


def test_the_chosen_grader_grades_stored_completions(tmp_path):
    completions = ["Answer: 2", "Answer: 2.", "\\boxed{2}", "it is\n#### 2"]
    path = jsonl(tmp_path / "a.jsonl", {"question": "1+1?", "answer": "2", "completions": completions})
    samples = samples_of(rescore(tmp_path, path, "--grader", "math-dapo-boxed"))
    assert samples["accuracy"].sum() == 2
    assert set(samples["grader"]) == {"math-dapo-boxed"}
    assert [None if pd.isna(answer) else answer for answer in samples["answer"]] == ["2", "2.", "2", None]


def test_different_numbers_of_completions_per_problem(tmp_path):
    """By hand: 2 of 3 correct, 0 of 1, 1 of 1; k is at most the smallest count, and there are no token counts."""
    rows = [
        {"question": "1+1?", "answer": "2", "completions": ["Answer: 2", "Answer: 3", "\\boxed{2.0}"]},
        {"question": "2+2?", "answer": "4", "completions": ["no idea"]},
        {"question": "3+3?", "answer": "6", "completions": "so #\n#### 6"},
    ]
    path = jsonl(tmp_path / "mine.jsonl", *rows)
    done = succeed("eval", "--samples", path, "--name", "a", "--no-mlflow", cwd=tmp_path)
    assert "3 problems × 1 to 3 = 5 completions" in done.out
    scores = record_of(tmp_path / "runs" / "a")["sets"]["mine"]
    values = {name: figure["value"] for name, figure in scores["metrics"].items()}
    expected = dict.fromkeys(("mean_at_n", "reward", "pass_at_1", "maj_at_1"), (2 / 3 + 0 + 1) / 3)
    expected |= dict.fromkeys(("timeout_rate", "grader_error_rate", "not_applicable_rate"), 0)
    expected["answer_format_rate"] = 2 / 3
    assert values == pytest.approx(expected)
    assert scores["completions_per_problem"] == [1, 3]
    assert scores["verdicts"] == {"correct": 3, "wrong": 1, "malformed": 1}
    usage_error("eval", "--samples", path, "--k", "1,3", cwd=tmp_path, parts=["--k 3", "at most 1"])
    unused = ["--samples", path, "--set", "grading.workers=1", "--set", "evaluation.problems=2"]
    usage_error("eval", *unused, cwd=tmp_path, parts=["evaluation.problems: it has no effect", "--grader"])
    unused = ["--set", "evaluation.samples=2", "--set", "sampling.temperature=0.5"]
    usage_error(
        "eval", *unused, cwd=tmp_path, parts=["sampling.temperature: it has no effect", "--temperature"]
    )


MINE = """
def long(text, answer, extra):
    print("a grader may print")
    return len(text) == int(answer)
"""


@pytest.mark.slow
def test_a_custom_grader(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    completions = ["Answer: 8", "Answer: 8.0", "eight...", "Answer: $2^3$"]
    jsonl(tmp_path / "a.jsonl", {"question": "4+4?", "answer": "8", "completions": completions})
    arguments = ["--samples", "a.jsonl", "--grader", "mine:long", "--name", "a", "--no-mlflow"]
    done = run_bandpo("eval", *arguments, "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"]["grader"] == "mine:long"
    assert list(samples_of(tmp_path / "runs" / "a")["accuracy"]) == [0, 0, 1, 0]


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "a\udcff.jsonl").write_text("{}")
    assert "not a text in UTF-8" in usage_error("eval", "--samples", "a\udcff.jsonl", cwd=tmp_path)


def test_sampling_settings_of_a_config_file_are_ignored(tmp_path):
    """The config file sets n = 1 and greedy decoding; the samples file has 2 completions, and --k applies to them."""
    (tmp_path / "my.yaml").write_text("evaluation: {samples: 1, temperature: 0, k: [1]}\n")
    row = {"question": "q", "answer": "1", "completions": ["Answer: 1", "Answer: 2"]}
    jsonl(tmp_path / "a.jsonl", row)
    record = record_of(rescore(tmp_path, "a.jsonl", "--config", "my.yaml", "--k", "2"))
    assert record["config"]["evaluation"]["samples"] == 2
    assert record["sets"]["a"]["metrics"]["pass_at_2"]["value"] == 1.0
    succeed("eval", "--resume", "a", "--no-mlflow", cwd=tmp_path)


def test_extra_fields_of_any_type_round_trip(tmp_path):
    """A Parquet file of another program may contain times, bytes and nested rows beside the answer."""
    extra = {"index": 1, "when": datetime.datetime(2025, 1, 2), "raw": b"\xff", "deep": [{"a": [None, 1.5]}]}
    rows = [{"question": "q", "answer": "1", "completions": ["Answer: 1"], "extra_info": extra}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    a = samples_of(rescore(tmp_path, "a.parquet"))
    b = samples_of(rescore(tmp_path, "runs/a/samples.parquet", name="b"))
    assert list(a["extra"]) == list(b["extra"])
    assert json.loads(a["extra"][0])["extra_info"]["deep"] == [{"a": [None, 1.5]}]
