"""Sweep folder: the plan, the settings of each run, the run folders, and their logs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from bandpo_cli.config.layers import read_yaml, to_yaml
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError, UserError, nearest
from bandpo_cli.paths import MAX_CONFIG_BYTES, path_exists, read_json_object
from bandpo_cli.storage.files import sync, write_json, write_text
from bandpo_cli.storage.run_folder import VALID_NAME, create_folder, find_folder, not_found
from bandpo_cli.storage.run_record import is_finished, keep_code

PLAN_FILE, STOPPED_FILE = "sweep.yaml", "stopped.json"
_RESERVED_NAMES = ("attempts", "logs", "plans", "report")
_MAX_ERROR_CHARS = 300

Value = TypeVar("Value")

Text = Annotated[str, Field(coerce_numbers_to_str=True)]
"""Text in a file of YAML, where it may be a number."""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep, an entry of `runs` in `sweep.yaml`. Its name is the name of its folder.

    The runs of a `variant` differ in the seed alone, those of a `group` also in the values of the axes, except method
    and divergence: a group is what `tuned_on` compares the settings of.
    """

    name: Text
    variant: Text
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**31)]
    group: Text = ""


@dataclass(frozen=True)
class _Plan:
    """The entries of `sweep.yaml` that a resume and a report need.

    Attributes:
        baseline: the variant that the others are compared with, None without one.
        fork: the checkpoint that every run continues, as PATH@STEP; None for runs from the start.
        gpus_per_run: GPUs, or processes on a CPU, of each run when the sweep was created.
        jobs: runs at a time that the sweep was created with; None if the machine decides.
    """

    runs: Annotated[list[SweepRun], Field(min_length=1)]
    baseline: Text | None = None
    fork: Annotated[str, Field(pattern=r"@\d{1,12}$")] | None = None
    gpus_per_run: Annotated[int, Field(strict=True, ge=1)] = 1
    jobs: Annotated[int, Field(strict=True, ge=1)] | None = None


@dataclass(frozen=True, kw_only=True)
class SweepFolder(_Plan):
    """`runs/<name>/` of a sweep: `sweep.yaml`, `plans/`, `logs/`, `attempts/`, and the folders of its runs by name.

    Attributes:
        path: the folder; it is the runs folder of its runs.
        plan: the content of `sweep.yaml`.
    """

    path: Path
    plan: Mapping[str, Any]

    @classmethod
    def create(
        cls,
        runs_dir: Path,
        name: str,
        planned: Mapping[SweepRun, RunConfig],
        baseline: str | None,
        about: Mapping[str, Any],
    ) -> Self:
        """Create the folder and write the plan; `about` has further keys of it. Raises UserError for an invalid name.

        The settings are written first and `sweep.yaml` last: where it exists, the plan is complete.
        """
        path = create_folder(runs_dir, name)
        for run, config in planned.items():
            write_text(path / "plans" / f"{run.name}.yaml", to_yaml(config))
            keep_code(config.model_dump_json(), path / "plans")
        plan = {"name": path.name, "baseline": baseline, **about, "runs": [*map(asdict, planned)]}
        write_text(path / PLAN_FILE, yaml.safe_dump(plan, sort_keys=False, allow_unicode=True))
        return cls.read(path)

    @classmethod
    def open(cls, runs_dir: Path, text: str) -> Self:
        """Return the sweep that `text` names: a name in `runs_dir`, or the path of its folder.

        Raises UserError when there is none, its plan is damaged, or the settings of a run are missing.
        """
        path = find_folder(text, runs_dir, PLAN_FILE)
        if path is None:
            raise not_found("sweep", text, runs_dir, PLAN_FILE)
        folder = cls.read(path)
        for run in folder.runs:
            if not path_exists(file := folder.plan_path(run.name)):
                raise UserError(f"{file}: the settings of run '{run.name}' are missing")
        return folder

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the sweep in the folder `path`, for which `sweep.yaml` suffices; raise UserError if it is damaged.

        The file may come from anyone, and the names of its runs become folders.
        """
        file = path / PLAN_FILE
        content = read_yaml(file, str(file))
        plan = validated(_Plan, content, file)
        for name, times in Counter(run.name for run in plan.runs).items():
            if not VALID_NAME.fullmatch(name) or name in _RESERVED_NAMES or times > 1:
                raise UserError(f"{file}: runs: name = {name!r} is not a valid folder name or given twice")
        check_baseline(plan.baseline, [run.variant for run in plan.runs], f"{file}: ")
        return cls(path=path, plan=content, **vars(plan))

    def plan_path(self, name: str) -> Path:
        """Return the path of the file with all settings of a run."""
        return self.path / "plans" / f"{name}.yaml"

    def log_path(self, name: str) -> Path:
        """Return the path of the file with the output of a run."""
        return self.path / "logs" / f"{name}.log"

    def pending(self) -> list[SweepRun]:
        """Return the runs that have neither finished nor been stopped early."""
        stopped = self.stopped()
        return [run for run in self.runs if run.name not in stopped and not is_finished(self.path / run.name)]

    def stopped(self) -> dict[str, str]:
        """Return the runs that the sweep stopped early because they were far behind, each with the reason."""
        if not path_exists(path := self.path / STOPPED_FILE):
            return {}
        try:
            reasons = read_json_object(path, max_bytes=MAX_CONFIG_BYTES)
        except UserError as error:
            raise UserError(f"{error}, or remove it to run all runs") from None
        return {name: str(reason) for name, reason in reasons.items()}

    def record_stopped(self, name: str, reason: str) -> None:
        """Record in `stopped.json` that a run was stopped early, so that a resume does not start it again."""
        write_json(self.path / STOPPED_FILE, {**self.stopped(), name: reason})

    def archive_attempt(self, name: str) -> None:
        """Move the folder and log of an earlier attempt at a run to `attempts/`, so that the run can start again."""
        path, log = self.path / name, self.log_path(name)
        if not path.exists():
            return
        attempts = self.path / "attempts"
        attempts.mkdir(exist_ok=True)
        number = next(number for number in count(1) if not (attempts / f"{name}-{number}").exists())
        path.rename(attempts / f"{name}-{number}")
        if log.exists():
            log.rename(attempts / f"{name}-{number}.log")
        sync(self.path)

    def error_message(self, name: str) -> str:
        """Return the last error line in a run's log, else the last line that is not empty, at most 300 characters."""
        try:
            text = self.log_path(name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            text = ""
        printed = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in printed if line.startswith("error: ")]
        return (errors or printed or ["it printed nothing"])[-1][:_MAX_ERROR_CHARS]


def validated(class_: type[Value], content: object, file: Path, key: str = "") -> Value:
    """Return the entry `key` of `sweep.yaml`, or the complete file, as a dataclass; raise UserError if it is wrong."""
    try:
        return TypeAdapter(class_).validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, filter(lambda part: part != "", (key, *first["loc"])))) or "the plan"
        raise UserError(f"{file}: {place} = {str(first['input'])[:80]!r}: {first['msg']}") from None


def check_baseline(baseline: str | None, variants: Iterable[str], where: str = "") -> None:
    """Raise ConfigError, which begins with `where`, if `baseline` is neither None nor one of `variants`."""
    names = list(dict.fromkeys(variants))
    if baseline is not None and baseline not in names:
        none = f"no variant of that name{nearest(baseline, names)}"
        raise ConfigError(f"{where}baseline = {baseline!r}: {none}; variants: {', '.join(names)}")


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders in a runs folder or a sweep, then those of the sweeps in it."""
    runs = [file.parent for file in sorted(folder.glob("*/config.yaml"))]
    sweeps = [file.parent for file in sorted(folder.glob(f"*/{PLAN_FILE}"))]
    return [*runs, *(run for sweep in sweeps for run in find_runs(sweep))]


def by_variant(runs: Sequence[SweepRun]) -> dict[str, list[SweepRun]]:
    """Return the runs by variant, in the order of the first run of each variant."""
    grouped: dict[str, list[SweepRun]] = {}
    for run in runs:
        grouped.setdefault(run.variant, []).append(run)
    return grouped
