"""The disk space of the checkpoints of a sweep: the estimate at its start, and the line about it."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from bandpo_cli.cli.sweep import SweepView
from bandpo_cli.sweeps import estimate
from bandpo_cli.sweeps.estimate import estimate_disk_space
from bandpo_cli.sweeps.sweep_plan import plan_sweep
from bandpo_cli.sweeps.sweep_run import Executor, SweepInfo, dry_run_info

MILLION = np.zeros((1000, 1000), np.float16)


@pytest.fixture(autouse=True)
def model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")


def sweep_of(tmp_path: Path, **checkpoint: object) -> SweepInfo:
    model = {"path": str(tmp_path / "model")}
    layers = [{"steps": 40, "model": model, "task": {"name": "countdown"}, "checkpoint": checkpoint}]
    return dry_run_info(plan_sweep(None, {}, [], {"seeds": "0,1,2"}, layers, tmp_path), Executor())


@pytest.mark.parametrize(
    ("checkpoint", "per_run"),
    [
        ({}, 3),  # of every 10 steps: the last 2 and the best
        ({"keep_last": 1, "keep_best": 0}, 1),
        ({"keep_last": None}, 4),
        ({"every": 0, "keep_last": None}, 1),
        ({"every": 30}, 2),
    ],
)
def test_three_runs_of_a_model_with_two_million_weights(tmp_path, checkpoint, per_run):
    for part in ("a", "b"):
        save_file({part: MILLION}, tmp_path / "model" / f"{part}.safetensors")
    needed, free = estimate_disk_space(sweep_of(tmp_path, **checkpoint), tmp_path / "later" / "runs")
    assert needed == 3 * per_run * 2_000_000 * 12
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


@pytest.mark.parametrize(
    ("needed", "free", "line"),
    [
        (0.9e9, 0.5e9, ""),
        (86.4e9, 100e9, "checkpoints: about 86 GB in the end; 100 GB are free\n"),
        (
            86.4e9,
            80e9,
            "warning: checkpoints: about 86 GB in the end; 80 GB are free; --set checkpoint.keep_last=1",
        ),
    ],
)
def test_the_plan_has_a_line_from_one_gigabyte_on(tmp_path, monkeypatch, needed, free, line):
    monkeypatch.setattr(estimate, "estimate_disk_space", lambda *_: (needed, free))
    monkeypatch.setattr(estimate, "estimate_time", lambda *_: None)
    out = io.StringIO()
    SweepView(Console(file=out, width=100), tmp_path).print_plan(sweep_of(tmp_path))
    assert line in out.getvalue()
    assert ("checkpoints" in out.getvalue()) == bool(line)
