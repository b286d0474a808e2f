"""`--task reasoning-gym:NAME`: the list of names, messages for mistakes, and a run and its resume."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.cli import train_runs
from tests.cli.eval_command import bandpo, succeed, usage_error, without_torch
from tests.cli.train_runs import check_equal, drop_checkpoints, record, truncate_metrics
from tests.text_model import save_text_model

pytest.importorskip("reasoning_gym")


@pytest.mark.slow
def test_the_list_is_printed_without_torch(tmp_path):
    ((code, out, err),) = without_torch([(tmp_path, ["train", "--task", "reasoning-gym:list"])])
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) > 100
    assert [line.split()[0] for line in lines] == sorted(line.split()[0] for line in lines)
    (maze,) = [line.split(maxsplit=1)[1] for line in lines if line.split()[0] == "maze"]
    assert maze.split() == ["min_dist=5", "max_dist=10", "min_grid_size=5", "max_grid_size=10"]
    for command in ("eval", "sweep"):
        assert bandpo(command, "--task", "reasoning-gym:list", cwd=tmp_path).out == out
    assert not [*tmp_path.iterdir()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gym")
    save_text_model(folder / "model", ["How many legs", "<answer>12</answer>"], vocabulary=300, hidden=64)
    return folder


def test_the_missing_extra_is_named(place, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "reasoning_gym" else find_spec(name, *a)
    )
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    line = usage_error("train", "--model", "model", "--task", "reasoning-gym:gcd", cwd=place)
    message = 'the package reasoning_gym is not installed; pip install "bandpo[gym]"'
    assert line == f"error: task reasoning-gym: {message}\n"


def test_a_mistake_is_one_line_and_writes_nothing(place):
    arguments = ["--task", "reasoning-gym:gcd", "--task", "gsm8k"]
    usage_error("train", "--model", "model", *arguments, cwd=place, parts=["several members of one task"])
    assert not (place / "runs").exists()


SMALL = [
    "--model", "model", "--task", "reasoning-gym:leg_counting", "--task", "reasoning-gym:spell_backward",
    *train_runs.SMALL[2:], "--steps", "2", "--lr", "1e-3", "--max-tokens", "8", "--set", "task.size=20",
    "--set", "task.heldout_size=4", "--set", "task.system=null", "--set", "task.template='{question} <answer>'",
    "--set", "task.options.spell_backward={max_word_len: 3, size: 10}", "--set", "evaluation.every=1",
    "--set", "checkpoint.every=1",
]  # fmt: skip


@pytest.mark.slow
def test_a_run_and_its_resume(place):
    done = succeed("train", *SMALL, "--name", "a", cwd=place)
    assert "reasoning-gym, 30 training problems" in done.out
    a, b = place / "runs" / "a", place / "runs" / "b"
    steps = record(a)
    assert [step["step"] for step in steps] == [0, 1, 2]
    for label in ("leg_counting", "spell_backward"):
        means, bests = ([step[f"eval/{label}/{name}_at_4"] for step in steps] for name in ("mean", "pass"))
        assert all(0 <= mean <= best <= 1 for mean, best in zip(means, bests, strict=True))
    assert all(step["grade/error_fraction"] == step["grade/timeout_fraction"] == 0 for step in steps[1:])
    sources = [pd.read_parquet(path)["source"] for path in (a / "samples").glob("*.parquet")]
    assert {*pd.concat(sources)} == {"leg_counting", "spell_backward"}

    shutil.copytree(a, b)
    drop_checkpoints(b, 2)
    truncate_metrics(b, 1)
    succeed("train", "--resume", "b", "--no-mlflow", cwd=place)
    check_equal(b, a)
