"""`bandpo train` from the command line: the run, its record, and error messages of one line."""

import json
from pathlib import Path

import pytest

from tests.cli.eval_command import Done, bandpo, succeed, usage_error
from tests.cli.train_runs import SMALL, record
from tests.tasks.stored_completions import jsonl


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """Return a folder with the run `first`, and its output."""
    place = tmp_path_factory.mktemp("first")
    words = ["--steps", "2", "--delta", "0.2", "--name", "first"]
    return place, succeed("train", *SMALL, *words, cwd=place)


def test_a_run_in_an_empty_folder(first):
    place, done = first
    settings = ("Band of the kl trust region", "4 prompts × 4 = 16 completions")
    for part in (*settings, "step 2/2", "held-out", "runs/first"):
        assert part in done.out
    assert "\x1b" not in done.out, "colour codes outside a terminal"
    folder = place / "runs" / "first"
    files = ("config.yaml", "env.json", "metrics.jsonl", "summary.json")
    for name in (*files, "checkpoints/step-000002/config.json"):
        assert (folder / name).is_file(), name
    plots = {path.name for path in (folder / "plots").iterdir()}
    assert {"accuracy.png", "entropy.png", "clip.png", "clip_map.png"} <= plots
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("FINISHED", 2)
    assert "first" in {path.name for path in (place / "runs").iterdir()} <= {"first", "again"}


@pytest.mark.slow
def test_the_resolved_config_gives_the_same_run(first):
    place, _ = first
    succeed("train", "--config", "runs/first/config.yaml", "--name", "again", cwd=place)
    assert record(place / "runs" / "again") == record(place / "runs" / "first")


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    line = usage_error("train", "--model", "./model", "--no-mlflow", cwd=tmp_path)
    assert "model.path = './model'" in line
    assert not (tmp_path / "runs").exists()


def test_grader_of_all_answers(tmp_path):
    jsonl(tmp_path / "a.jsonl", *({"question": f"{n}?", "answer": n} for n in range(99)))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    arguments = ["train", "--task", "a.jsonl", "--model", "model", "--dry-run"]
    done = bandpo(*arguments, "--grader", "math-dapo", cwd=tmp_path)
    (row,) = [line.split() for line in done.out.splitlines() if line.startswith("task.grader")]
    assert row[1:] == ["math-dapo", "math"]
    assert (done.code, "its config cannot be read" in done.err) == (2, True)
    assert "did you mean 'gsm8k'?" in usage_error(*arguments, "--grader", "gsm8k-strict", cwd=tmp_path)


def test_dry_run_prints_the_changed_settings_first_and_writes_nothing(tmp_path):
    flags = ("--method", "clip", "--lr", "1e-5", "--set", "bounds.eps_high=0.3", "--dry-run")
    printed = succeed("train", *flags, cwd=tmp_path).out
    first = [" ".join(line.split()) for line in printed.partition("\nmodel ")[0].splitlines()[1:]]
    assert first == ["bounds.method clip band", "bounds.eps_high 0.3 0.2", "optim.lr 1e-05 5e-05"]
    assert "never has an effect" not in printed, "the warning is for one update per batch"
    assert "1.1M parameters" in printed
    assert "GiB at the peak" in printed
    for part in ("countdown grades the dummy completion", "wrong-value, reward 0", "(sampling.max_prompt"):
        assert part in " ".join(printed.split())
    assert not list(tmp_path.iterdir())
