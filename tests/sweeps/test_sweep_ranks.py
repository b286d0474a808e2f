"""Sweeps of runs with several ranks: slots, commands, the plan on disk, and what is refused."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import yaml

from bandpo_cli.errors import ConfigError
from bandpo_cli.experiments import sweep as run_sweep
from bandpo_cli.sweeps import estimate
from bandpo_cli.sweeps.scheduler import LocalPool
from bandpo_cli.sweeps.sweep_plan import SweepPlan, plan_sweep
from bandpo_cli.sweeps.sweep_run import Executor, SweepInfo, dry_run_info

MODULE = sys.modules[run_sweep.__module__]
"""The package has the function in place of its module."""


def request_of(tmp_path: Path, seeds: str = "0,1,2") -> SweepPlan:
    layers = [{"steps": 3, "tracking": {"mlflow": False}}]
    return plan_sweep(None, {}, [], {"seeds": seeds}, layers, tmp_path)


def machine(monkeypatch: pytest.MonkeyPatch, gpus: str, cores: int = 8) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(MODULE, "usable_cores", lambda: cores)


def test_runs_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(tmp_path)
    for gpus, jobs, ranks, slots, threads in (
        ("0,1,2,3", None, 2, 2, 2),
        ("0,1,2,3", None, 3, 1, 2),
        ("0,1,2,3", 1, 2, 1, 4),
        ("", None, 4, 2, 1),
        ("", None, None, 3, 2),
        ("", None, 16, 1, 1),
    ):
        machine(monkeypatch, gpus)
        info = dry_run_info(request, Executor(jobs=jobs, gpus_per_run=ranks))
        assert (info.slots, info.threads, info.ranks) == (slots, threads, ranks or 1)


def test_runs_that_cannot_be_divided_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "")
    request, executor = request_of(tmp_path, "0"), Executor(gpus_per_run=65)
    refused = pytest.raises(ConfigError, match=r"--gpus-per-run 65: sampling.prompts = 64: .* at most 64 ra")
    with refused:
        run_sweep(request, executor=executor, runs_dir=tmp_path, name="s")
    with refused:
        dry_run_info(request, executor)
    machine(monkeypatch, "4,6")
    with pytest.raises(ConfigError, match="--gpus-per-run 3: this machine has 2 GPUs"):
        run_sweep(request, executor=Executor(gpus_per_run=3), runs_dir=tmp_path, name="s")
    assert not (tmp_path / "s").exists()
    machine(monkeypatch, "")
    commands(monkeypatch, request, 2, tmp_path)
    with refused:
        commands(monkeypatch, "s", 65, tmp_path)


class RecordedPool(LocalPool):
    """A pool that records the commands and environments, and fails each run at once."""

    started: ClassVar[list[tuple[list[str], Mapping[str, str]]]] = []

    def start(self, name: str, command: Sequence[str], log: Path) -> None:
        self.started.append((list(command), self._variables[0]))

    def poll_finished(self) -> dict[str, int]:
        return {command[command.index("--name") + 1]: 1 for command, _ in self.started}


def commands(
    monkeypatch: pytest.MonkeyPatch, request: SweepPlan | str, ranks: int | None, place: Path
) -> tuple[Sequence[tuple[list[str], Mapping[str, str]]], SweepInfo]:
    monkeypatch.setattr(MODULE, "LocalPool", RecordedPool)
    monkeypatch.setattr(RecordedPool, "started", [])
    monkeypatch.setattr("bandpo_cli.sweeps.scheduler.POLL_S", 0.0)
    callback = mock.Mock()
    run_sweep(request, executor=Executor(gpus_per_run=ranks), runs_dir=place, name="s", callbacks=[callback])
    return RecordedPool.started, callback.start.call_args.args[0]


def test_a_resume_takes_as_many_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "4,5,6,7")
    ((command, variables),), _ = commands(monkeypatch, request_of(tmp_path, "0"), 2, tmp_path)
    assert command[command.index("--nproc") + 1] == "2"
    assert variables == {"CUDA_VISIBLE_DEVICES": "4,5", "OMP_NUM_THREADS": "4"}
    assert yaml.safe_load((tmp_path / "s" / "sweep.yaml").read_text())["gpus_per_run"] == 2
    started, info = commands(monkeypatch, "s", None, tmp_path)
    assert started[0][0][-1] == "2"
    assert info.ranks == 2
    started, _ = commands(monkeypatch, "s", 1, tmp_path)
    assert "--nproc" not in started[0][0]
    started, _ = commands(monkeypatch, request_of(tmp_path, "0"), None, tmp_path / "one")
    assert "--nproc" not in started[0][0]
    assert "gpus_per_run" not in yaml.safe_load((tmp_path / "one" / "s" / "sweep.yaml").read_text())
    machine(monkeypatch, "4")
    with pytest.raises(ConfigError, match="--gpus-per-run 2: this machine has 1 GPU"):
        commands(monkeypatch, "s", None, tmp_path)


def test_the_trial_has_as_many_ranks_as_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(estimate.subprocess, "run", run)
    [config] = request_of(tmp_path, "0").runs.values()
    for ranks in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            estimate.seconds_from_trial(config, {}, ranks)
    commands = [call.args[0] for call in run.call_args_list]
    assert "--nproc" not in commands[0]
    assert commands[1][-2:] == ["--nproc", "2"]
