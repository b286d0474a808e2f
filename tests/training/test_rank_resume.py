"""A run that resumes with another number of ranks continues as the uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bandpo_cli.config.layers import resolve
from bandpo_cli.metric_names import without_clock
from bandpo_cli.models.sharding import full_tensor
from bandpo_cli.models.weights import checkpoint_weights
from bandpo_cli.ranks import SINGLE, Ranks
from bandpo_cli.storage.checkpoints import complete_checkpoints
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training.components import build_components
from bandpo_cli.training.loop import train
from tests.training.recording import SETTINGS
from tests.training.several_ranks import run_ranks

LAYER: dict[str, Any] = {
    "steps": 3,
    "optim": {"lr": 5e-5, "warmup_steps": 0},
    "checkpoint": {"every": 1, "background": True},
}

Result = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def part(ranks: Ranks, folder: Path, model: Path, first: int, stop_after: int, max_lag: int = 0) -> Result:
    """Train from step `first` up to a stop after a step; return the lines, and the weights and optimizer state."""
    config = resolve([SETTINGS, LAYER, {"model": {"path": str(model)}, "sampling": {"max_lag": max_lag}}])
    run = RunFolder(folder)
    components = build_components(config, build_task(config.task), ranks)
    lines: list[dict[str, float]] = []

    def stop() -> bool:
        return ranks.is_main and len(lines) > 0 and lines[-1]["step"] == stop_after

    try:
        if first:
            components.resume_from(run.checkpoint_dir(first - 1))
        for report in train(config, components, run, first=first, stop=stop):
            lines.append(without_clock(report.record))
        state = {
            f"weight {key}": checkpoint_weight.clone()
            for key, checkpoint_weight in checkpoint_weights(components.policy.model)
        }
        state |= {key: full_tensor(value).clone() for key, value in components.optimizer.state().items()}
    finally:
        components.close()
    return lines, state


def on(size: int, results: Path, *arguments: Any) -> Result:
    return part(SINGLE, *arguments) if size == 1 else run_ranks(size, results, part, *arguments)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "tolerance", "max_lag"),
    [(1, 2, 1e-5, 0), (2, 2, 0.0, 0), (2, 1, 1e-5, 1)],
)
def test_a_run_stopped_after_a_step_resumes_on_other_ranks(
    tmp_path: Path, small_model: Path, before: int, after: int, tolerance: float, max_lag: int
) -> None:
    """Compared with the run of one process where the numbers differ, else exactly with that of two ranks."""
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    expected, state = on(
        2 if tolerance == 0.0 else 1, tmp_path / "results-0", tmp_path / "whole", small_model, 0, 3, max_lag
    )
    on(before, tmp_path / "results-1", tmp_path / "stopped", small_model, 0, 1, max_lag)
    stopped = RunFolder(tmp_path / "stopped")
    assert max(complete_checkpoints(stopped).complete) == 1
    assert (stopped.checkpoint_dir(1) / "trainer" / "optimizer").is_dir() == (before == 2)
    lines, found = on(after, tmp_path / "results-2", stopped.path, small_model, 2, 3, max_lag)
    assert [line["step"] for line in lines] == [2, 3]
    assert [line.get("sampler/lag", 0) for line in lines] == [2 * max_lag] * 2
    for line, other in zip(lines, expected[2:], strict=True):
        assert line == pytest.approx(other, abs=tolerance, rel=tolerance, nan_ok=True)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0)
