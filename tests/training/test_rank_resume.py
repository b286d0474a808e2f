"""A run that resumes with another number of ranks continues as the uninterrupted one."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from bandpo_cli.config.layers import resolve
from bandpo_cli.metric_names import without_clock
from bandpo_cli.models.weights import checkpoint_weights, full_tensor
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.storage.checkpoints import complete_checkpoints
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training.build import build_components
from bandpo_cli.training.loop import train
from tests.sampling.stub_engine import forked_engines
from tests.training.recording import SETTINGS
from tests.training.several_ranks import run_ranks

LAYER: dict[str, Any] = {
    "steps": 2,
    "sampling": {"max_lag": 1},
    "optim": {"lr": 5e-5, "warmup_steps": 0},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 1, "background": True},
}

Result = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def part(ranks: Ranks, folder: Path, model: Path, first: int, stop_after: int) -> Result:
    """Train from step `first` up to a stop after a step; return the lines, and the weights and optimizer state."""
    config = resolve([SETTINGS, LAYER, {"model": {"path": str(model)}}])
    run = RunFolder(folder)
    lines: list[dict[str, float]] = []

    def stop() -> bool:
        return ranks.is_main and len(lines) > 0 and lines[-1]["step"] == stop_after

    with forked_engines(), closing(build_components(config, build_task(config.task), ranks)) as components:
        if first:
            components.resume_from(run.checkpoint_dir(first - 1))
        for report in train(config, components, run, first=first, stop=stop):
            lines.append(without_clock(report.record))
        weights = checkpoint_weights(components.policy.model)
        state = {f"weight {key}": weight.clone() for key, weight in weights}
        state |= {key: full_tensor(value).clone() for key, value in components.optimizer.state().items()}
    return lines, state


@pytest.mark.slow
def test_a_run_of_two_ranks_stopped_after_a_step_resumes_with_one(tmp_path: Path, small_model: Path) -> None:
    """It is nearly the uninterrupted run of one process, which adds in another order."""
    stopped = RunFolder(tmp_path / "stopped")
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    expected, state = part(SINGLE, tmp_path / "whole", small_model, 0, 2)
    run_ranks(2, tmp_path / "ranks", part, stopped.path, small_model, 0, 1)
    assert list(complete_checkpoints(stopped).complete) == [1]
    (line,), resumed = part(SINGLE, stopped.path, small_model, 2, 2)
    assert (line["step"], line["sampler/lag"]) == (2, 2)
    assert line == pytest.approx(expected[-1], abs=1e-5, rel=1e-5, nan_ok=True)
    assert resumed.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(resumed[name], tensor, atol=1e-5, rtol=0)
