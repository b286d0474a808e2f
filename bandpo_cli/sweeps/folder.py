"""The folder of a sweep: the plan, each run's settings, the runs themselves and what they printed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bandpo_cli.config.layers import to_yaml
from bandpo_cli.errors import UserError, nearest
from bandpo_cli.sweeps.plan import PlannedRun
from bandpo_cli.tracking.files import sync_folder, write_json, write_text
from bandpo_cli.tracking.run_names import make_folder

PLAN, STOPPED = "sweep.yaml", "stopped.json"


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
        path = make_folder(runs_dir, name)
        for run in planned:
            write_text(path / "plans" / f"{run.name}.yaml", to_yaml(run.config))
        runs = [SweepRun(run.name, run.arm, run.seed) for run in planned]
        plan = {"name": name, "baseline": baseline, **about, "runs": [vars(run) for run in runs]}
        write_text(path / PLAN, yaml.safe_dump(plan, sort_keys=False, allow_unicode=True))
        return cls(path, runs, baseline)

    @classmethod
    def open(cls, runs_dir: Path, text: str) -> SweepFolder:
        """Return the sweep that `text` names: a name in `runs_dir`, or the path of its folder.

        Raises UserError when there is none, or its plan is damaged.
        """
        for path in (runs_dir / text, Path(text).expanduser()):
            if text and (path / PLAN).is_file():
                return cls._read(path)
        names = sorted(path.parent.name for path in runs_dir.glob(f"*/{PLAN}"))
        there = f"it has {', '.join(names[-5:])}" if names else "it has none"
        raise UserError(f"no sweep {text!r} in {runs_dir}{nearest(text, names)}; {there}")

    @classmethod
    def _read(cls, path: Path) -> SweepFolder:
        try:
            plan = yaml.safe_load((path / PLAN).read_text(encoding="utf-8"))
            runs = [SweepRun(str(run["name"]), str(run["arm"]), int(run["seed"])) for run in plan["runs"]]
            baseline = plan.get("baseline")
        except (
            OSError,
            UnicodeDecodeError,
            yaml.YAMLError,
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"{path / PLAN}: not readable as the plan of a sweep: {line}") from None
        for run in runs:
            if not (path / "plans" / f"{run.name}.yaml").is_file():
                raise UserError(f"{path}: the settings of run '{run.name}' are gone (plans/{run.name}.yaml)")
        return cls(path, runs, baseline)

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

    def is_whole(self, name: str) -> bool:
        """Tell whether a run has reached its end and has its summary."""
        try:
            summary = json.loads((self.run_path(name) / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(summary, dict) and summary.get("status") == "FINISHED"

    def stopped(self) -> dict[str, str]:
        """Return the runs that were ended early for want of hope, with the reason."""
        try:
            found = json.loads((self.path / STOPPED).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path / STOPPED}: not readable: {error}") from None
        return {str(name): str(why) for name, why in found.items()} if isinstance(found, dict) else {}

    def note_stopped(self, name: str, why: str) -> None:
        """Keep in mind that a run was ended early, so that a resume does not start it again."""
        write_json(self.path / STOPPED, {**self.stopped(), name: why})

    def set_aside(self, name: str) -> None:
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

    def last_words(self, name: str) -> str:
        """Return the line in which a run said why it ended: its error line, else the last that it printed."""
        try:
            lines = self.log_path(name).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return "it printed nothing"
        said = [line.strip() for line in lines if line.strip()]
        errors = [line for line in said if line.startswith("error: ")]
        return (errors or said or ["it printed nothing"])[-1][:300]
