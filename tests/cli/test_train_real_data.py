"""`bandpo train` on GSM8K problems with a small language model of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.commands import run_bandpo
from tests.text_model import save_text_model

DATA = Path(__file__).parents[2].parent / "shared" / "data"
TRAIN, TEST = DATA / "gsm8k_train.jsonl", DATA / "gsm8k_test.jsonl"

GRADER = '''
def long_words(text, answer, extra):
    """A grader of the user's own: partial credit for letters, a word for the record."""
    letters = sum(character.isalpha() for character in text)
    return {"score": letters / max(1, len(text)), "correct": letters > 30, "verdict": f"gold-{answer}"}
'''


@pytest.mark.slow
@pytest.mark.skipif(not TRAIN.is_file(), reason="needs the GSM8K files")
def test_gsm8k_with_a_custom_grader(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in TRAIN.read_text(encoding="utf-8").splitlines()]
    model = save_text_model(tmp_path / "model", (row["question"] + row["answer"] for row in rows[:500]))
    (tmp_path / "mine.py").write_text(GRADER)
    arguments = [
        "--model", str(model), "--task", "gsm8k", "--steps", "3", "--name", "a", "--no-mlflow",
        "--set", f"task.train={{name: gsm8k, path: {TRAIN}}}",
        "--set", f"task.heldout={{name: gsm8k, path: {TEST}}}",
        "--set", "task.grader=mine:long_words", "--set", "optim.lr=1e-3",
        "--set", "sampling.prompts=8", "--set", "sampling.samples=4", "--set", "sampling.max_tokens=48",
        "--set", "sampling.max_prompt_tokens=300", "--set", "evaluation.problems=8", "--set", "model.dtype=bfloat16",
        "--set", "model.gradient_checkpointing=true", "--set", "reward.overlong_buffer=16",
    ]  # fmt: skip
    done = run_bandpo("train", *arguments, cwd=tmp_path, timeout=300, COLUMNS="160")
    assert done.returncode == 0, done.stderr
    assert "gsm8k: 7,473 training problems" in done.stdout
    assert "of 7,473 problems left out, their prompts have more than 300 tokens" in done.stdout
    folder = tmp_path / "runs" / "a"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    for record in records[1:]:
        assert record["optim/grad_norm"] > 0
        assert record["grade/error_fraction"] == record["grade/timeout_fraction"] == 0
        # The forward pass of the sampler and the packed one of the trainer round bfloat16 differently.
        assert record["sampler/logprob_gap_mean"] < 0.05
    samples = pd.read_parquet(folder / "samples" / "step-000002.parquet")
    golds = {"gold-" + row["answer"].rpartition("#### ")[2].replace(",", "") for row in rows}
    assert set(samples["verdict"].str.replace(",", "")) <= golds
    assert samples["prompt"].str.startswith("<|im_start|>user\nSolve the following math problem").all()
    assert samples["reward"].nunique() > 8
