"""Execution of a sweep: runs at a time, runs with several ranks, resumes, and its MLflow run."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import yaml

from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.errors import ConfigError, UserError
from bandpo_cli.experiments import sweep as run_sweep
from bandpo_cli.reports.compare_variants import Report
from bandpo_cli.storage.sweep_folder import SweepFolder
from bandpo_cli.sweeps import estimate, sweep_run
from bandpo_cli.sweeps.scheduler import LocalPool
from bandpo_cli.sweeps.sweep_plan import SweepConfig, SweepPlan, plan_sweep
from bandpo_cli.sweeps.sweep_run import Executor, SweepInfo, dry_run_info, open_mlflow_run, send_report
from bandpo_cli.tracking.mlflow_store import Store, sqlite_uri
from tests.reports.sweep_folders import edit_line, report_of, write_sweep

MODULE = sys.modules[run_sweep.__module__]
"""The package has the function in place of its module."""


def request_of(tmp_path: Path, seeds: str = "0,1,2") -> SweepPlan:
    layers = [{"steps": 3, "tracking": {"mlflow": False}}]
    return plan_sweep(None, {}, [], {"seeds": seeds}, layers, tmp_path)


def machine(monkeypatch: pytest.MonkeyPatch, gpus: str, cores: int = 8) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(MODULE, "usable_cores", lambda: cores)


def test_runs_at_a_time(tmp_path, monkeypatch):
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


def test_runs_that_cannot_be_divided_are_refused(tmp_path, monkeypatch):
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


def commands(monkeypatch, request, ranks, place) -> tuple[list[tuple[list[str], dict[str, str]]], SweepInfo]:
    """Return the commands and environments of a sweep, and what its callback got at the start."""
    monkeypatch.setattr(MODULE, "LocalPool", RecordedPool)
    monkeypatch.setattr(RecordedPool, "started", [])
    monkeypatch.setattr("bandpo_cli.sweeps.scheduler.POLL_S", 0.0)
    callback = mock.Mock()
    run_sweep(request, executor=Executor(gpus_per_run=ranks), runs_dir=place, name="s", callbacks=[callback])
    return RecordedPool.started, callback.start.call_args.args[0]


def test_a_resume_takes_as_many_gpus(tmp_path, monkeypatch):
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


def test_the_trial_has_as_many_ranks_as_a_run(tmp_path, monkeypatch):
    run = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(estimate.subprocess, "run", run)
    [config] = request_of(tmp_path, "0").runs.values()
    for ranks in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            estimate.seconds_from_trial(config, {}, ranks)
    commands = [call.args[0] for call in run.call_args_list]
    assert "--nproc" not in commands[0]
    assert commands[1][-2:] == ["--nproc", "2"]


def test_a_dry_run_of_a_sweep_checks_each_start_once(tmp_path, monkeypatch):
    """Three starts: seeds, radius and learning rate make no difference."""
    axes = {"bounds.delta": "0.1,0.2", "optim.lr": "1e-5,1e-4", "sampling.max_tokens": "4,400,8"}
    request = plan_sweep(None, axes, [], {"seeds": "0,1"}, [{"tracking": {"mlflow": False}}], tmp_path)
    run, info = mock.Mock(return_value=mock.Mock(returncode=0, stderr="")), dry_run_info(request, Executor())
    monkeypatch.setattr(estimate.subprocess, "run", run)
    estimate.check_starts(info, "runs/a@2")
    assert len(run.call_args_list) == 3
    assert run.call_args.args[0][-3:] == ["--dry-run", "--fork", "runs/a@2"]
    run.side_effect = [run.return_value, mock.Mock(returncode=2, stderr="warning\nerror: too long\n")]
    with pytest.raises(UserError, match=r"^run .*max_tokens=400.*: too long$"):
        estimate.check_starts(info, None)


def test_a_resume_has_as_many_runs_at_a_time_unless_the_number_is_given(tmp_path, monkeypatch):
    jobs = []
    monkeypatch.setattr(sweep_run, "_run_pending", lambda folder, executor, *_: jobs.append(executor.jobs))
    config = SweepConfig(seeds=(0, 1))
    run_sweep(config, executor=Executor(jobs=1), runs_dir=tmp_path, name="one")
    run_sweep(config, runs_dir=tmp_path, name="default")
    for name in ("one", "default"):
        run_sweep(name, runs_dir=tmp_path)
    run_sweep("one", executor=Executor(jobs=2), runs_dir=tmp_path)
    assert jobs == [1, None, 1, None, 2]


def execute(sweep: SweepFolder, store: Store, report: Report) -> Any:
    """Execute the sweep without runs, and return its MLflow run and a client."""
    from mlflow.tracking import MlflowClient

    sender, run_id = open_mlflow_run(sweep, store)
    assert run_id is not None
    send_report(sender, store.experiment, sweep, "FINISHED", report)
    client = MlflowClient(tracking_uri=store.uri, registry_uri=store.uri)
    return client, client.get_run(run_id)


@pytest.mark.slow
def test_the_leaderboard_and_a_description_after_a_resume(tmp_path, empty_database):
    """The variant `clip` has the name of a section of the runs' metrics. At step 0 MLflow shows a bar, else a curve."""
    database = Path(shutil.copy(empty_database, tmp_path))
    store = Store(sqlite_uri(database), "bandpo", (tmp_path / "files").as_uri())
    path = write_sweep(tmp_path / "runs" / "methods", {"clip": {0: 0.3, 1: 0.5}, "band": {0: 0.75, 1: 0.25}})
    (path / "plans").mkdir()
    for folder in path.glob("*-s?"):
        shutil.copy(folder / "config.yaml", path / "plans" / f"{folder.name}.yaml")
    sweep = SweepFolder.open(tmp_path / "runs", "methods")
    client, run = execute(sweep, store, report_of(sweep.path))
    assert {name.rpartition("/")[0] for name in run.data.metrics} == {"sweep/clip", "sweep/band"}
    assert run.data.metrics["sweep/clip/accuracy"] == pytest.approx((0.3 + 0.5) / 2)
    assert run.data.metrics["sweep/band/accuracy"] == pytest.approx((0.75 + 0.25) / 2)
    (point,) = client.get_metric_history(run.info.run_id, "sweep/clip/accuracy")
    assert point.step == 0
    description = run.data.tags["mlflow.note.content"]
    assert "| band | 2 | 0.500" in description
    assert "| clip (baseline) | 2 | 0.400" in description
    assert {"sweep.yaml", "report"} == {file.path for file in client.list_artifacts(run.info.run_id)}

    edit_line(sweep.path / "clip-s0", -1, **{"eval/countdown/mean_at_16": 0.1})
    _, resumed = execute(sweep, store, report_of(sweep.path))
    assert resumed.info.run_id == run.info.run_id
    assert resumed.data.metrics["sweep/clip/accuracy"] == pytest.approx((0.1 + 0.5) / 2)
    assert "| clip (baseline) | 2 | 0.300" in resumed.data.tags["mlflow.note.content"]

    client.set_tag(run.info.run_id, "mlflow.note.content", "the second attempt")
    _, again = execute(sweep, store, report_of(sweep.path))
    assert again.data.tags["mlflow.note.content"] == "the second attempt"


def test_trackers_that_fail_at_the_end_are_warnings(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(MODULE, "send_report", mock.Mock(side_effect=RuntimeError("no space")))
    config = TrackingConfig(trackers=["mlflow", "wandb"])
    MODULE._send_to_trackers(mock.Mock(runs=[], path=tmp_path), config, mock.Mock(), None, None)
    assert "MLflow did not accept the sweep's end (RuntimeError: no space)" in caplog.text
    assert "wandb did not accept the report of the sweep (" in caplog.text
