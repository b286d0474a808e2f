"""Complete training runs with vLLM from the command line: log-prob gaps, resume, and training from a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.text_model import save_text_model

pytestmark = pytest.mark.vllm

DATA = Path(__file__).parents[2].parent / "shared" / "data"


def train(runs: Path, name: str, *arguments: str) -> list[dict[str, float]]:
    settings = [
        "sampling.prompts=8",
        "evaluation.every=0",
        "sampling.vllm.kv_cache_gb=0.5",
        "sampling.vllm.eager=true",
    ]
    command = [
        sys.executable, "-m", "bandpo_cli", "train", "--sampler", "vllm", "--steps", "3", "--no-mlflow",
        "--runs-dir", str(runs), "--name", name, *arguments,
    ]  # fmt: skip
    for setting in settings:
        command += ["--set", setting]
    return record(command, runs / name)


def record(command: list[str], run: Path) -> list[dict[str, float]]:
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "", "messages of the engine would disturb the run's live view"
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_run_resume_and_run_from_a_checkpoint(tmp_path: Path) -> None:
    first = train(tmp_path, "first")
    steps = [line for line in first if line["step"] > 0]
    assert len(steps) == 3
    assert all(0 < line["sampler/logprob_gap_max"] <= 1e-4 for line in steps)
    assert all(line["time/sync"] > 0 for line in steps)

    resume = ["--resume", "first", "--runs-dir", str(tmp_path), "--steps", "5"]
    longer = record([sys.executable, "-m", "bandpo_cli", "train", *resume], tmp_path / "first")
    assert longer[: len(first)] == first
    assert [line["step"] for line in longer] == [1, 2, 3, 4, 5]
    assert all(0 < line["sampler/logprob_gap_max"] <= 1e-4 for line in longer)

    checkpoint = next((tmp_path / "first" / "checkpoints").iterdir())
    second = train(tmp_path, "second", "--model", str(checkpoint))
    assert all(line["sampler/logprob_gap_max"] <= 1e-4 for line in second if line["step"] > 0)


@pytest.mark.skipif(not (DATA / "gsm8k_train.jsonl").is_file(), reason="needs the GSM8K files")
def test_five_steps_on_gsm8k(tmp_path: Path) -> None:
    """A model with random weights cannot answer correctly; the test covers the path from prompt to update."""
    lines = (DATA / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()[:500]
    model = save_text_model(tmp_path / "model", (json.loads(line)["question"] for line in lines))
    settings = [
        f"task.train={{name: gsm8k, path: {DATA / 'gsm8k_train.jsonl'}}}",
        f"task.heldout={{name: gsm8k, path: {DATA / 'gsm8k_test.jsonl'}}}",
        "sampling.samples=4",
        "sampling.max_tokens=32",
        "sampling.max_prompt_tokens=300",
        "optim.lr=1e-3",
    ]
    flags = [flag for setting in settings for flag in ("--set", setting)]
    records = train(tmp_path, "gsm8k", "--model", str(model), "--task", "gsm8k", "--steps", "5", *flags)
    steps = [line for line in records if line["step"] > 0]
    assert len(steps) == 5
    assert all(0 < line["sampler/logprob_gap_max"] <= 1e-4 for line in steps)
    assert all(line["grade/error_fraction"] == line["grade/timeout_fraction"] == 0 for line in steps)
    assert all(line["train/response_length"] > 1 for line in steps)
