"""Training raises the reward of the bundled model."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.layers import resolve
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training.build import build_components
from bandpo_cli.training.loop import train


@pytest.mark.slow
def test_a_few_steps_teach_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the answers to new problems 25% have no multiplication in the first step, and 83% in the fifth step."""
    monkeypatch.chdir(tmp_path)
    Path("sums.py").write_text("def sums(text, answer, extra):\n    return '*' not in text\n")
    settings: dict[str, Any] = {
        "steps": 5,
        "optim": {"lr": 2e-4, "warmup_steps": 0},
        "sampling": {"prompts": 16},
    }
    task = {"max_number": 5, "rewards": [{"weight": 0}, "sums:sums"]}
    config = resolve([settings, {"task": task, "evaluation": {"every": 0}, "checkpoint": {"every": 0}}])
    folder = RunFolder.create(tmp_path, "a")
    with closing(build_components(config, build_task(config.task))) as components:
        rewards = [report.record["train/reward"] for report in train(config, components, folder)]
    assert rewards[0] <= 0.35
    assert rewards[-1] >= 0.6
