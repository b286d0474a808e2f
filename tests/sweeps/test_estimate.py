"""Estimates use finished runs of the same shape and number of threads, and no others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bandpo_cli.config.layers import resolve, to_yaml
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.sweeps.estimate import START_S, seconds_from_earlier_runs

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
