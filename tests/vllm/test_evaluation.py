"""An evaluation with vLLM has metrics that agree with those of the transformers sampler."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from bandpo_cli.experiments import evaluate

pytestmark = pytest.mark.vllm


def mean_at_8(folder: Path, sampler: Any) -> Any:
    settings = [{"sampling": {"vllm": {"eager": True}}, "tracking": {"mlflow": False}}]
    result = evaluate(
        "embedded", runs_dir=folder, name=sampler, n=8, limit=48, seed=1, sampler=sampler, settings=settings
    )
    return result.scores["countdown"].metrics["mean_at_8"]


def test_metrics_agree_within_their_confidence_interval(tmp_path: Path) -> None:
    expected = mean_at_8(tmp_path, "transformers")
    assert expected.low < mean_at_8(tmp_path, "vllm").value < expected.high
