"""Training with a scheduled radius: the bounds of each step are those of its radius, also across a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bandpo_cli.bounds import band_bounds
from bandpo_cli.config.layers import resolve
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.tables import read_token_table
from bandpo_cli.tasks.base import build_task
from bandpo_cli.training.components import build_components
from tests.training.test_resume import SMALL, both, check_same, record, run_until

pytestmark = pytest.mark.usefixtures("one_thread")

LINEAR: dict[str, Any] = {"bounds": {"delta": 0.05, "delta_end": 0.01, "delta_schedule": "linear"}}
RADII = {1: 0.042, 2: 0.034, 3: 0.026, 4: 0.018, 5: 0.01}
"""0.05 − 0.04·step/5."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, RunFolder]:
    """Return an uninterrupted run of five steps, and one that was stopped after step 3 and resumed from step 2."""
    return both(tmp_path_factory.mktemp("scheduled"), LINEAR, {"evaluation": {"every": 1, "problems": 2}})


def test_bounds_of_every_step_are_those_of_its_radius(runs: tuple[RunFolder, RunFolder]) -> None:
    uninterrupted, _ = runs
    for step, delta in RADII.items():
        table = read_token_table(uninterrupted.path / f"tokens/step-{step:06d}.parquet")
        expected = band_bounds(np.asarray(table["old_logprob"], np.float64), "kl", delta, 10.0)
        assert len(table["lower"]) > 50
        np.testing.assert_allclose(table["lower"], expected.lower, rtol=2e-5, atol=1e-7)
        np.testing.assert_allclose(table["upper"], expected.upper, rtol=2e-5)


def test_the_radius_of_every_step_is_a_metric(runs: tuple[RunFolder, RunFolder]) -> None:
    uninterrupted, _ = runs
    found = {line["step"]: line["bounds/delta"] for line in record(uninterrupted) if line["step"]}
    assert found == pytest.approx(RADII)
    assert "bounds/delta" not in record(uninterrupted)[0]  # step 0 evaluates and trains on nothing


def test_a_run_resumed_within_the_schedule_equals_an_uninterrupted_one(
    runs: tuple[RunFolder, RunFolder],
) -> None:
    check_same(*runs)


def test_a_stated_constant_radius_changes_nothing(tmp_path: Path) -> None:
    """Same metrics, keys included, and the same files as without the keys of the schedule."""
    folders = []
    for name, bounds in (("absent", {}), ("stated", {"delta_schedule": "constant", "delta_end": None})):
        config = resolve([SMALL, {"steps": 1, "bounds": bounds}])
        folders.append(RunFolder.create(tmp_path, name))
        run_until(config, folders[-1], build_components(config, build_task(config.task)), 0, 1)
    absent, stated = map(record, folders)
    assert absent == stated
    assert len(absent) == 2
    assert not [key for line in absent for key in line if key.startswith("bounds/")]
