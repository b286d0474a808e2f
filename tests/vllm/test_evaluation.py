"""`bandpo eval` with vLLM: the likeliest tokens are those of the trainer's sampler, and drawn figures agree with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("vllm")

pytestmark = pytest.mark.vllm


def evaluate(folder: Path, sampler: str, *arguments: str) -> tuple[dict[str, Any], pd.DataFrame]:
    name = f"{sampler}-{len(list(folder.glob('runs/*')))}"
    command = [
        sys.executable, "-m", "bandpo_cli", "eval", "--sampler", sampler, "--name", name, "--no-mlflow",
        "--set", "sampling.vllm.eager=true", *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=600, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((folder / "runs" / name / "eval.json").read_text())
    return record["sets"]["countdown"], pd.read_parquet(folder / "runs" / name / "samples.parquet")


def test_greedy_completions_are_the_trainers(tmp_path: Path) -> None:
    greedy = ("--temperature", "0", "--n", "1", "--limit", "64")
    _, ours = evaluate(tmp_path, "transformers", *greedy)
    _, theirs = evaluate(tmp_path, "vllm", *greedy)
    assert ours["problem_id"].tolist() == theirs["problem_id"].tolist()
    same = (ours["text"] == theirs["text"]).mean()
    assert same > 0.95  # two logits that rounding alone orders may change places


def test_drawn_figures_agree_within_their_interval(tmp_path: Path) -> None:
    drawn = ("--n", "16", "--limit", "64")
    ours, _ = evaluate(tmp_path, "transformers", *drawn)
    theirs, rows = evaluate(tmp_path, "vllm", *drawn)
    again, rows_again = evaluate(tmp_path, "vllm", *drawn)
    figure = ours["figures"]["mean_at_16"]
    assert figure["low"] < theirs["figures"]["mean_at_16"]["value"] < figure["high"]
    pd.testing.assert_frame_equal(rows, rows_again)
    assert theirs["figures"] == again["figures"]
