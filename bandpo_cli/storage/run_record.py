"""Reading a run folder: its summary and final status, and its settings and metrics with the time of each step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from bandpo_cli.config.layers import read_layer
from bandpo_cli.errors import UserError
from bandpo_cli.paths import MAX_CONFIG_BYTES, path_exists, read_json_object
from bandpo_cli.storage.files import is_locked, iterate_metrics, step_of
from bandpo_cli.types import RunStatus

Record = Mapping[str, Any]

SUMMARY_FILE = "summary.json"
PARENT = "parent"
"""The entry of `env.json` of a fork: `run`, `path` and `step` of the checkpoint that it continues, and `changed`, the
settings that differ, with the values of that run and of the fork."""


@dataclass(frozen=True)
class Summary:
    """The content of `summary.json`: all keys, and how the run ended (None where the file has no valid status)."""

    status: RunStatus | None
    content: Record

    @property
    def error(self) -> str | None:
        """The exception that ended the run."""
        error = self.content.get("error")
        return None if error is None else str(error)

    @property
    def stopped_by(self) -> str | None:
        """The criterion of `stop` that ended the run before its last step."""
        reason = self.content.get("stopped_by")
        return None if reason is None else str(reason)


@dataclass(frozen=True)
class StoredRun:
    """The content of a run folder.

    Attributes:
        path: the folder.
        config: `config.yaml`.
        env: `env.json`; empty when the run ended before it was written.
        records: the metrics, one line of `metrics.jsonl` per step.
        clocks: the time at which each step was done, milliseconds since 1970.
        status: how the run ended; None while a process is writing it.
        start_ms, end_ms: start of the run (not of a fork's parent) and time of its last write, milliseconds since 1970.
    """

    path: Path
    config: Record
    env: Record
    records: Sequence[Record]
    clocks: Mapping[int, int]
    status: RunStatus | None
    start_ms: int
    end_ms: int

    @property
    def tracking(self) -> Record:
        """The section `tracking` of the settings."""
        section = self.config.get("tracking")
        return section if isinstance(section, Mapping) else {}


def read_summary(run: Path) -> Summary | None:
    """Return the summary of the run in a folder, None where it has none. Raises UserError if the file is damaged."""
    if not path_exists(run / SUMMARY_FILE):
        return None
    content = read_json_object(run / SUMMARY_FILE, max_bytes=MAX_CONFIG_BYTES)
    status = content.get("status")
    return Summary(status if status in get_args(RunStatus) else None, content)


def parent_of(env: Record) -> str | None:
    """Return RUN@STEP of the checkpoint that a run with this `env.json` was forked from; None for another run."""
    parent = env.get(PARENT)
    return f"{parent.get('run')}@{parent.get('step')}" if isinstance(parent, Mapping) else None


def read_parent(run: Path) -> str | None:
    """Return `parent_of` of the run in a folder; None if its `env.json` is missing or damaged."""
    with suppress(UserError):
        return parent_of(read_json_object(run / "env.json"))
    return None


def is_finished(run: Path) -> bool:
    """Return whether the summary of the run in a folder has the status FINISHED; False if it is missing or damaged."""
    with suppress(UserError):
        summary = read_summary(run)
        return summary is not None and summary.status == "FINISHED"
    return False


def read_stored_run(path: Path, keep: Callable[[Record], Record] = dict) -> StoredRun:
    """Return the content of a run folder. Raises UserError, which names the file, where it is damaged.

    Args:
        keep: returns what to keep of a line of `metrics.jsonl`, at least step, `time/step` and `time/checkpoint`: all
            lines of a long run take more than a gigabyte.
    """
    config = read_layer(path / "config.yaml", "run settings")
    if not config:
        raise UserError(f"{path / 'config.yaml'}: it holds no settings, so this is not the folder of a run")
    env = read_json_object(path / "env.json") if path_exists(path / "env.json") else {}
    # Before summary and metrics: what a run that ends during these lines has not written yet, the next sync sends.
    writing = is_locked(path)
    summary = read_summary(path)
    lines = [keep(line) for line in iterate_metrics(path / "metrics.jsonl")]
    clocks = _step_times(path, lines)
    start = _written_ms(path / "config.yaml")
    end = max(start, _written_ms(path / "metrics.jsonl"), _written_ms(path / SUMMARY_FILE))
    parent = env.get(PARENT)
    after = parent.get("step") if isinstance(parent, Mapping) else None
    own = [line for line in lines if not isinstance(after, int) or line["step"] > after]
    if own:
        start = min(start, clocks[own[0]["step"]] - _milliseconds(own[0], "time/step"))
    # A process that had no chance to write a summary (SIGKILL, out of memory, power) left none, or an older one.
    status: RunStatus | None = None if writing else "KILLED"
    last = lines[-1]["step"] if lines else 0
    if not writing and summary is not None and summary.content.get("steps", last) == last:
        status = summary.status or "KILLED"
    return StoredRun(path, config, env, lines, clocks, status, start, end)


def _step_times(path: Path, lines: Sequence[Record]) -> dict[int, int]:
    """Return the time at which each step of `lines` was done, milliseconds since 1970.

    `metrics.jsonl` has no times. The last line was written when the file was; every other line at the latest when
    the next step began, which is `time/step` seconds before the next line. A pause between two steps (a resume) shows
    in the modification time of the step's own file of completions or evaluation, where there is one. In a copy of the
    folder with new file times the distances between steps are unchanged and the end is the time of the copy.
    """
    written: dict[int | None, int] = {}
    for file in (*(path / "samples").glob("step-*"), *(path / "evals").glob("step-*")):
        written[step_of(file)] = max(written.get(step_of(file), 0), _written_ms(file))
    later = _written_ms(path / "metrics.jsonl")
    times: dict[int, int] = {}
    for line in reversed(lines):
        step = line["step"]
        if type(step) is not int or step < 0:
            raise UserError(f"{path / 'metrics.jsonl'}: {step!r} is not a step; restore the file from a copy")
        if step in written:
            later = min(later, written[step] + _milliseconds(line, "time/checkpoint"))
        times[step] = later
        later -= _milliseconds(line, "time/step")
    return times


def _milliseconds(line: Record, key: str) -> int:
    value = line.get(key)
    return round(1000 * value) if isinstance(value, int | float) else 0


def _written_ms(path: Path) -> int:
    """Return the modification time of a file in milliseconds since 1970, 0 where there is no such file."""
    return path.stat().st_mtime_ns // 1_000_000 if path_exists(path) else 0
