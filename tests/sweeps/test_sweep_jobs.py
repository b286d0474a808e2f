"""The number of runs at a time in a resume of a sweep."""

from pathlib import Path

import pytest

from bandpo_cli.experiments import sweep
from bandpo_cli.sweeps import sweep_run
from bandpo_cli.sweeps.sweep_plan import SweepConfig


def test_a_resume_has_as_many_runs_at_a_time_unless_the_number_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[int | None] = []
    monkeypatch.setattr(sweep_run, "_run_pending", lambda folder, executor, *_: jobs.append(executor.jobs))
    config = SweepConfig(seeds=(0, 1))
    sweep(config, executor=sweep_run.Executor(jobs=1), runs_dir=tmp_path, name="one")
    sweep(config, runs_dir=tmp_path, name="default")
    for name in ("one", "default"):
        sweep(name, runs_dir=tmp_path)
    sweep("one", executor=sweep_run.Executor(jobs=2), runs_dir=tmp_path)
    assert jobs == [1, None, 1, None, 2]
