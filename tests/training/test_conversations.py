"""A run with an environment, with LoRA and batches sampled ahead: a resume changes nothing."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bandpo_cli.config.layers import resolve
from bandpo_cli.experiments import resume, train
from bandpo_cli.storage.run_folder import RunFolder
from tests.conftest import random_model
from tests.text_model import character_tokenizer
from tests.training.trained import record

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CODE = '''
class Echo:
    """Answer with some letters of the message; the reward grows with their number and falls with the turns."""
    def reset(self, problem):
        self.letters, self.turns = problem["question"], 0
        return [f"ab {self.letters}"]
    def step(self, message):
        self.turns += 1
        self.letters = "".join(letter for letter in message["content"] if letter in "abcdefgh")[:4]
        return None if self.letters < "c" else [self.letters]
    @property
    def reward(self):
        return len(self.letters) / (1 + self.turns)
'''


@pytest.fixture(autouse=True)
def in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a model, data and an environment into the current folder."""
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    tokenizer = character_tokenizer(TEMPLATE, "abcdefghijklmnopq1 ", special, "<|end|>")
    model = random_model()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"question": f"{first} {second}", "answer": "a"} for first in "cdefg" for second in "cdefg"]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "echo_environment.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)


SETTINGS: dict[str, Any] = {
    "steps": 4,
    "model": {"path": "./model", "lora": {"rank": 4}},
    "task": {
        "name": "data", "train": "data.jsonl", "environment": "echo_environment:Echo", "max_turns": 3,
        "heldout_fraction": 0.2,
    },
    "sampling": {"prompts": 4, "samples": 4, "max_prompt_tokens": 32, "max_tokens": 60, "max_lag": 1},
    "optim": {"updates": 2, "lr": 1e-3, "warmup_steps": 0, "micro_batch_tokens": 40},
    "evaluation": {"every": 2, "problems": 4, "samples": 2, "k": [2]},
    "checkpoint": {"every": 2},
    "tracking": {"mlflow": False, "tokens_every": 2},
    "grading": {"workers": 1},
}  # fmt: skip


def completions_of(folder: Path) -> list[dict[str, Any]]:
    tables = [pq.read_table(path) for path in sorted((folder / "samples").glob("*.parquet"))]
    return [row for table in tables for row in table.to_pylist()]


@pytest.mark.slow
def test_a_resumed_run_is_the_same(tmp_path):
    whole = train(resolve([SETTINGS]), tmp_path, "whole")
    lines = record(RunFolder(whole.folder))
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    for line in lines[1:]:
        assert 1 < line["conversation/turns"] < 3
        assert line["conversation/inserted_tokens"] > 2
        assert line["conversation/failed_call_fraction"] == 0
        assert 0 < line["train/truncated_fraction"] < 1
        assert line["optim/grad_norm"] > 0.01
    steps = count()
    stopped = train(resolve([SETTINGS]), tmp_path, "parts", stop_requested=lambda: next(steps) == 3)
    assert stopped.status == "KILLED"
    again = resume("parts", runs_dir=tmp_path)
    assert again.status == "FINISHED"
    assert record(RunFolder(again.folder)) == lines
    assert completions_of(again.folder) == completions_of(whole.folder)
