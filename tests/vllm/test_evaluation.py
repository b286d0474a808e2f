"""`bandpo eval` with vLLM: greedy completions and metrics agree with those of the transformers sampler."""

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


def test_greedy_completions_equal_those_of_the_trainer(tmp_path: Path) -> None:
    greedy = ("--temperature", "0", "--n", "1", "--limit", "64")
    _, transformers_rows = evaluate(tmp_path, "transformers", *greedy)
    _, vllm_rows = evaluate(tmp_path, "vllm", *greedy)
    assert transformers_rows["problem_id"].tolist() == vllm_rows["problem_id"].tolist()
    same = (transformers_rows["text"] == vllm_rows["text"]).mean()
    assert same > 0.95  # the order of nearly equal logits depends on rounding


def test_metrics_agree_within_their_confidence_interval(tmp_path: Path) -> None:
    settings = ("--n", "16", "--limit", "64", "--seed", "1")
    transformers_result, _ = evaluate(tmp_path, "transformers", *settings)
    vllm_result, rows = evaluate(tmp_path, "vllm", *settings)
    repeated, repeated_rows = evaluate(tmp_path, "vllm", *settings)
    metric = transformers_result["figures"]["mean_at_16"]
    assert metric["low"] < vllm_result["figures"]["mean_at_16"]["value"] < metric["high"]
    pd.testing.assert_frame_equal(rows, repeated_rows)
    assert vllm_result["figures"] == repeated["figures"]
