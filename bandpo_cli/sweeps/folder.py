"""The folder of a sweep: the plan, each run's settings, the runs themselves and what they printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bandpo_cli.config.layers import to_yaml
from bandpo_cli.config.yaml_loader import read_yaml
from bandpo_cli.errors import UserError, nearest
from bandpo_cli.paths import folders_containing, path_exists, read_text, user_path
from bandpo_cli.storage.files import sync_folder, write_json, write_text
from bandpo_cli.storage.run_folder import create_folder, is_valid_name
from bandpo_cli.sweeps.plan import PlannedRun

PLAN_FILE, STOPPED_FILE = "sweep.yaml", "stopped.json"
_RESERVED_NAMES = ("attempts", "logs", "plans", "report")
_MOST_SEED = 2**31


@dataclass(frozen=True)
class SweepRun:
    """A run as the plan on disk has it."""

    name: str
    arm: str
    seed: int


class SweepFolder:
    """`runs/<name>/` of a sweep: `sweep.yaml`, `plans/`, `logs/`, `attempts/`, and a run folder for each run.

    Attributes:
        path: the folder; the runs folder of its runs.
        runs: what is planned.
    """

    def __init__(self, path: Path, runs: Sequence[SweepRun], baseline: str | None) -> None:
        self.path = path
        self.runs = list(runs)
        self.baseline = baseline

    @classmethod
    def create(
        cls,
        runs_dir: Path,
        name: str,
        planned: Sequence[PlannedRun],
        baseline: str | None,
        about: Mapping[str, Any],
    ) -> SweepFolder:
        """Make the folder and write the plan. Raises UserError for a name that is taken or not plain.

        The settings come first and `sweep.yaml` last: where it is, the plan is whole.
        """
        path = create_folder(runs_dir, name)
        for run in planned:
            write_text(path / "plans" / f"{run.name}.yaml", to_yaml(run.config))
        runs = [SweepRun(run.name, run.arm, run.seed) for run in planned]
        plan = {"name": name, "baseline": baseline, **about, "runs": [vars(run) for run in runs]}
        write_text(path / PLAN_FILE, yaml.safe_dump(plan, sort_keys=False, allow_unicode=True))
        return cls(path, runs, baseline)

    @classmethod
    def open(cls, runs_dir: Path, text: str) -> SweepFolder:
        """Return the sweep that `text` names: a name in `runs_dir`, or the path of its folder.

        Raises UserError when there is none, or its plan is damaged.
        """
        for path in (runs_dir / text, user_path(text)):
            if text and path_exists(path / PLAN_FILE):
                return cls._read(path)
        names = folders_containing(runs_dir, PLAN_FILE)
        there = f"it has {', '.join(names[-5:])}" if names else "it has none"
        raise UserError(f"no sweep {text!r} in {runs_dir}{nearest(text, names)}; {there}")

    @classmethod
    def _read(cls, path: Path) -> SweepFolder:
        plan = read_yaml(path / PLAN_FILE, str(path / PLAN_FILE))
        try:
            runs = [SweepRun(run["name"], str(run["arm"]), run["seed"]) for run in plan["runs"]]
            baseline = plan.get("baseline")
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path / PLAN_FILE}: not readable as the plan of a sweep: {error}") from None
        if not runs:
            raise UserError(f"{path / PLAN_FILE}: lists no runs")
        seen: set[str] = set()
        for run in runs:
            _check(run, seen, path / PLAN_FILE)
            if not path_exists(path / "plans" / f"{run.name}.yaml"):
                raise UserError(f"{path}: the settings of run '{run.name}' are gone (plans/{run.name}.yaml)")
        return cls(path, runs, None if baseline is None else str(baseline))

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self.path.name

    def run_path(self, name: str) -> Path:
        """Return where a run's folder belongs."""
        return self.path / name

    def plan_path(self, name: str) -> Path:
        """Return the file with all settings of a run."""
        return self.path / "plans" / f"{name}.yaml"

    def log_path(self, name: str) -> Path:
        """Return the file with what a run printed."""
        return self.path / "logs" / f"{name}.log"

    def is_finished(self, name: str) -> bool:
        """Tell whether a run has reached its end and has its summary."""
        try:
            summary = json.loads(read_text(self.run_path(name) / "summary.json", "summary.json"))
        except (UserError, ValueError, RecursionError):
            return False
        return isinstance(summary, dict) and summary.get("status") == "FINISHED"

    def stopped(self) -> dict[str, str]:
        """Return the runs that were ended early for want of hope, with the reason."""
        path = self.path / STOPPED_FILE
        if not path_exists(path):
            return {}
        text = read_text(path, str(path))
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: not readable as JSON: {error}") from None
        if not isinstance(found, dict):
            raise UserError(
                f"{path}: expected the names of runs, each with a reason; remove it to run them all"
            )
        return {str(name): str(why) for name, why in found.items()}

    def record_stopped(self, name: str, why: str) -> None:
        """Keep in mind that a run was ended early, so that a resume does not start it again."""
        write_json(self.path / STOPPED_FILE, {**self.stopped(), name: why})

    def archive_attempt(self, name: str) -> None:
        """Move what an earlier attempt at a run left to `attempts/`, so that the run can begin anew."""
        path = self.run_path(name)
        if not path.exists():
            return
        attempts = self.path / "attempts"
        attempts.mkdir(exist_ok=True)
        number = 1
        while (attempts / f"{name}-{number}").exists():
            number += 1
        path.rename(attempts / f"{name}-{number}")
        if self.log_path(name).exists():
            self.log_path(name).rename(attempts / f"{name}-{number}.log")
        sync_folder(self.path)

    def error_message(self, name: str) -> str:
        """Return the line in which a run said why it ended: its error line, else the last that it printed."""
        try:
            lines = self.log_path(name).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return "it printed nothing"
        said = [line.strip() for line in lines if line.strip()]
        errors = [line for line in said if line.startswith("error: ")]
        return (errors or said or ["it printed nothing"])[-1][:300]


def _check(run: SweepRun, seen: set[str], plan: Path) -> None:
    """Refuse what no sweep wrote: a plan may come from anyone, and its names become folders."""
    if not isinstance(run.name, str) or not is_valid_name(run.name) or run.name in _RESERVED_NAMES:
        raise UserError(f"{plan}: name = {run.name!r} is no run's name: one plain folder name is expected")
    if run.name in seen:
        raise UserError(f"{plan}: has the run '{run.name}' twice")
    if not isinstance(run.seed, int) or isinstance(run.seed, bool) or not 0 <= run.seed < _MOST_SEED:
        raise UserError(f"{plan}: run '{run.name}': seed = {run.seed!r} is no whole number from 0 on")
    seen.add(run.name)
