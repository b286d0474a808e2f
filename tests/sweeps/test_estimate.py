"""Estimates of a sweep: its time, from finished runs of the same shape, and the disk space of its checkpoints."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bandpo_cli.cli.sweep import SweepView
from bandpo_cli.config.layers import resolve, to_yaml
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.sweeps import estimate
from bandpo_cli.sweeps.estimate import START_S, estimate_disk_space, seconds_from_earlier_runs
from bandpo_cli.sweeps.sweep_plan import plan_sweep
from bandpo_cli.sweeps.sweep_run import Executor, SweepInfo, dry_run_info
from tests.conftest import output_of

CONFIG = resolve([{"steps": 50}])


def write(
    place: Path, name: str, seconds: float, threads: int = 1, gpus: Sequence[str] = (), ranks: int = 1,
    status: str = "FINISHED", **settings: Any,
) -> Path:  # fmt: skip
    folder = RunFolder.create(place, name)
    folder.write_config(to_yaml(resolve([{"steps": 10}, settings])))
    folder.write_env({"hardware": {"torch_threads": threads, "gpus": list(gpus)}, "ranks": ranks})
    folder.write_summary({"status": status, "steps": 10, "time/train_s": seconds})
    return folder.path


def test_the_estimate_is_the_median_scaled_to_the_steps(tmp_path):
    assert seconds_from_earlier_runs(CONFIG, tmp_path, 1) is None
    write(tmp_path, "a", 20.0, bounds={"delta": 0.2}, seed=3)  # radius and seed do not change the time
    write(tmp_path / "sweep", "b", 40.0)
    (tmp_path / "sweep" / "sweep.yaml").touch()
    write(tmp_path, "c", 30.0)
    assert seconds_from_earlier_runs(CONFIG, tmp_path, 1) == START_S + 150.0


def test_runs_of_other_shapes_and_ranks_and_damaged_runs_are_left_out(tmp_path):
    write(tmp_path, "threads", 1.0, threads=2)
    write(tmp_path, "larger", 1.0, sampling={"samples": 4}, evaluation={"samples": 4, "k": [4]})
    write(tmp_path, "failed", 1.0, status="FAILED")
    (write(tmp_path, "damaged", 1.0) / "env.json").write_text("{")
    (write(tmp_path, "old", 1.0) / "env.json").write_text('{"hardware": {}}')
    assert seconds_from_earlier_runs(CONFIG, tmp_path, 1) is None
    write(tmp_path, "gpu", 10.0, threads=16, gpus=["a card"])
    write(tmp_path, "two", 6.0, gpus=["a card", "a card"], ranks=2)
    assert seconds_from_earlier_runs(CONFIG, tmp_path, 1) == START_S + 50.0
    assert seconds_from_earlier_runs(CONFIG, tmp_path, 1, ranks=2) == START_S + 30.0
    assert seconds_from_earlier_runs(CONFIG, tmp_path, 1, ranks=4) is None


MILLION = np.zeros((1000, 1000), np.float16)


@pytest.fixture(autouse=True)
def model(tmp_path):
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
    info = sweep_of(tmp_path, **checkpoint)
    assert info.forked_at == 0
    needed, free = estimate_disk_space(info, tmp_path / "later" / "runs")
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
            "warning: checkpoints: about 86 GB in the end; 80 GB are free; --set checkpoint.keep_l",
        ),
    ],
)
def test_the_plan_has_a_line_from_one_gigabyte_on(tmp_path, monkeypatch, needed, free, line):
    monkeypatch.setattr(estimate, "estimate_disk_space", lambda *_: (needed, free))
    monkeypatch.setattr(estimate, "estimate_time", lambda *_: None)
    printed = output_of(lambda console: SweepView(console, tmp_path).print_plan(sweep_of(tmp_path)))
    assert line in printed
    assert ("checkpoints" in printed) == bool(line)
