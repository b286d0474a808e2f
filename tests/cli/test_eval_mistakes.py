"""User errors of `bandpo eval` are reported before torch is imported, in one line, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.eval_command import Done, without_torch

LONG = "a" * 300

CASES: list[tuple[list[str], list[str]]] = [
    (["--model", "./nowhere"], ["--model ./nowhere", "no such run or folder"]),
    (["--model", "embeded"], ["did you mean 'embedded'"]),
    (["--model", "my-rum@3"], ["no such run", "did you mean 'my-run'"]),
    (["--model", ""], ["--model :"]),
    (["--model", LONG], ["no such run or folder"]),
    (["--model", f"a/{LONG}"], ["no such run or folder"]),
    (["--model", "~nobody-of-this-name/x"], ["no such run or folder"]),
    (["--model", "a/b/c"], ["no such run or folder"]),
    (["--model", "empty-folder"], ["no config.json there"]),
    (["--model", "runs/my-run"], ["my-run", "no checkpoint yet"]),
    (["--model", "my-run@7"], ["no checkpoint yet"]),
    (["--model", "damaged"], ["not readable as YAML"]),
    (["--task", "countdwn"], ["--task countdwn", "did you mean 'countdown'"]),
    (["--task", "gsm8k"], ["embedded model can read nothing but countdown", "--model"]),
    (["--task", "countdown", "--task", "gsm8k"], ["--task countdown", "evaluate it without other tasks"]),
    (["--task", ""], ["--task :"]),
    (["--task", LONG], ["no such task or file"]),
    (["--model", "a/b", "--task", "nowhere.jsonl"], ["--task nowhere.jsonl: no such file"]),
    (["--model", "a/b", "--task", f"{LONG}.jsonl"], ["no such file"]),
    (["--model", "a/b", "--task", "empty.jsonl"], ["empty.jsonl", "holds no rows"]),
    (["--model", "a/b", "--task", "unanswered.jsonl"], ["unanswered.jsonl", "no field found for the answer"]),
    (["--model", "a/b", "--task", "torn.jsonl"], ["torn.jsonl, line 2", "not readable as JSON"]),
    (["--model", "a/b", "--task", "one.jsonl", "--task", "one.jsonl"], ["2 sources have the label"]),
    (["--model", "a/b", "--task", "one.jsonl", "--grader", "mth"], ["mth", "did you mean 'math'"]),
    (["--model", "a/b", "--task", "one.jsonl", "--grader", "nowhere:f"], ["nowhere"]),
    (["--grader", "math"], ["task.grader", "of 'countdown'"]),
    (["--n", "0"], ["--n"]),
    (["--n", "-1"], ["--n"]),
    (["--n", "many"], ["--n"]),
    (["--n", "4", "--k", "8"], ["--k 8", "--n 8"]),
    (["--k", "64"], ["k = 64", "samples is 16"]),
    *[
        (["--k", k], ["--k", "whole numbers from 1"])
        for k in ("0", "-1", "a", "", "1,,2", "1.5", "9" * 9000, "10000000")
    ],
    (["--set", "evaluation.k=[]"], ["evaluation.k", "at least one"]),
    (["--temperature", "0"], ["temperature = 0", "samples = 1"]),
    (["--temperature", "0", "--n", "2"], ["temperature = 0", "samples = 1"]),
    (["--temperature", "-1"], ["evaluation.temperature = -1"]),
    (["--temperature", "nan"], ["evaluation.temperature = nan"]),
    (["--temperature", "inf"], ["evaluation.temperature = inf"]),
    (["--temperature", "warm"], ["--temperature"]),
    (["--limit", "0"], ["--limit"]),
    (["--max-tokens", "0"], ["--max-tokens"]),
    (["--seed", "-1"], ["seed = -1"]),
    (["--seed", str(2**31)], ["seed ="]),
    (["--sampler", "transformer"], ["sampling.engine", "did you mean 'transformers'"]),
    (["--set", "evaluation.batch=0"], ["evaluation.batch = 0"]),
    (["--set", "evaluation.smaples=3"], ["smaples", "did you mean 'samples'"]),
    (["--set", "nonsense"], ["section.key=value"]),
    (["--config", "nowhere.yaml"], ["nowhere.yaml", "no such file"]),
    (["--name", "../x"], ["../x"]),
    (["--name", ""], ["--name ''"]),
    (["--name", LONG], ["at most 200"]),
    (["--name", "my-run"], ["exists already", "--name my-run-2"]),
    (["--name", "mlflow.db"], ["MLflow uses that name"]),
    (["--runs-dir", "one.jsonl"], ["--runs-dir", "is a file"]),
    (["--tracking-uri", "http://me:secret@host/"], ["password"]),
    (["--format", "yaml"], ["--format yaml", "table, json"]),
    (["--format", "table,json"], ["--format table,json"]),
    (["--resume", "nothing"], ["no evaluation 'nothing'"]),
    (["--resume", ""], ["no evaluation ''"]),
    (["--resume", "half"], ["half", "lacks what a resume needs"]),
    (["--resume", "torn"], ["torn", "not readable as JSON"]),
    (["--resume", "my-run", "--samples", "one.jsonl"], ["--resume", "leave out --samples"]),
    (["--resume", "gone"], ["nowhere.jsonl has changed since, or is gone"]),
    (["--samples", "nowhere.jsonl"], ["nowhere.jsonl", "No such file"]),
    (["--samples", "one.jsonl"], ["no field found for the completions"]),
    (["--samples", "one.jsonl", "--model", "embedded"], ["nothing is sampled", "--model"]),
    (["--smaples", "one.jsonl"], ["--smaples", "--samples"]),
    (["cmpare", "a", "b"], ["cmpare", "compare"]),
    (["compare"], ["A"]),
    (["compare", "half", "half"], ["not finished"]),
    (["compare", "torn", "torn"], ["not readable as JSON"]),
    (["compare", "my-run", "my-run"], ["not evaluated in training"]),
    (["compare", "one.jsonl", "half"], ["no evaluation 'one.jsonl'"]),
    (["compare", "half", "half", "--show", "-1"], ["--show"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run without checkpoints, damaged evaluations, and task files of every kind."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name in (
        "empty-folder",
        "folder.jsonl",
        "runs/my-run",
        "runs/damaged",
        "runs/half",
        "runs/torn",
        "runs/gone",
    ):
        (folder / name).mkdir(parents=True)
    (folder / "runs" / "my-run" / "config.yaml").write_text("seed: 1\n")
    (folder / "runs" / "damaged" / "config.yaml").write_text("seed: [\n")
    checkpoint = folder / "runs" / "damaged" / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    half = {"name": "half", "status": "running", "sets": {"countdown": {"problems": 3}}}
    (folder / "runs" / "half" / "eval.json").write_text(json.dumps(half))
    (folder / "runs" / "torn" / "eval.json").write_text('{"name": "torn", "se')
    gone = {
        **half, "model": None, "config": {}, "legacy_best_at_k": False,
        "samples": {"path": "nowhere.jsonl", "sha256": "x", "grader": None},
    }  # fmt: skip
    (folder / "runs" / "gone" / "eval.json").write_text(json.dumps(gone))
    (folder / "empty.jsonl").write_text("")
    (folder / "one.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    (folder / "unanswered.jsonl").write_text('{"question": "q"}\n')
    (folder / "torn.jsonl").write_text('{"question": "q", "answer": "1"}\n{"question": "r", "ans\n')
    return folder


@pytest.fixture(scope="module")
def results(place: Path) -> dict[str, Done]:
    """Return the result of each case by its arguments, and require that no case writes a file."""
    before = sorted(place.rglob("*"))
    done = without_torch([(place, ["eval", *arguments]) for arguments, _ in CASES])
    assert sorted(place.rglob("*")) == before, "nothing may be written"
    return {json.dumps(arguments): result for (arguments, _), result in zip(CASES, done, strict=True)}


@pytest.mark.parametrize(("arguments", "parts"), CASES, ids=[" ".join(a)[:40] for a, _ in CASES])
def test_a_user_error_is_one_line(results: dict[str, Done], arguments: list[str], parts: list[str]) -> None:
    code, _, err = results[json.dumps(arguments)]
    assert code == 2, err
    assert err.startswith("error: "), err
    assert len(err.splitlines()) == 1, err
    assert len(err) < 1000
    for part in parts:
        assert part in err
    assert "secret" not in err
