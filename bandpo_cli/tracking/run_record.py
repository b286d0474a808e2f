"""A run as its folder tells it, for sending it to MLflow later: settings, metrics with their clocks, how it ended."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from bandpo_cli.config.layers import read_layer
from bandpo_cli.errors import UserError
from bandpo_cli.storage.files import LOCK, step_name
from bandpo_cli.storage.run_folder import read_metrics
from bandpo_cli.tracking.mirror import MetricRecord
from bandpo_cli.types import RunStatus

_STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)


@dataclass(frozen=True)
class StoredRun:
    """What the folder of a run holds.

    Attributes:
        path: the folder.
        config: `config.yaml`.
        env: `env.json`; empty when the run ended before it was written.
        records: the metrics, a record a step.
        status: how the run ended; None while a process is writing it.
        start_ms, end_ms: when it began and when it last wrote, milliseconds since 1970.
    """

    path: Path
    config: Mapping[str, Any]
    env: Mapping[str, Any]
    records: Sequence[MetricRecord]
    status: RunStatus | None
    start_ms: int
    end_ms: int

    @property
    def tracking(self) -> Mapping[str, Any]:
        """The section `tracking` of the settings."""
        section = self.config.get("tracking")
        return section if isinstance(section, Mapping) else {}


def read_stored_run(path: Path) -> StoredRun:
    """Read the folder of a run. Raises UserError, naming the file, where it is damaged."""
    config = read_layer(path / "config.yaml", "run settings")
    env, summary = _mapping(path / "env.json"), _mapping(path / "summary.json")
    if not config:
        raise UserError(f"{path / 'config.yaml'}: it holds no settings, so this is not the folder of a run")
    writing = is_locked(path)  # before the metrics: a run that ends meanwhile is sent whole the next time
    lines = read_metrics(path / "metrics.jsonl")
    records = with_timestamps(path, lines)
    written = _written_ms(path / "config.yaml") or 0
    first = records[0].clock_ms - round(1000 * _seconds(lines[0], "time/step")) if records else written
    last = max(_written_ms(path / name) or 0 for name in ("config.yaml", "metrics.jsonl", "summary.json"))
    status = None if writing else final_status(summary, lines)
    return StoredRun(path, config, env, records, status, min(first, written), last)


def final_status(summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> RunStatus:
    """Return how a run that no process writes any more has ended.

    `summary.json` says it, unless it is missing or of before the last resume: then the process was ended from outside
    without a chance to say so (SIGKILL, memory, the machine), which is KILLED. An exception or Ctrl-C leaves a summary.
    """
    last = lines[-1]["step"] if lines else 0
    if summary.get("steps", last) != last:
        return "KILLED"
    return next((status for status in _STATUSES if status == summary.get("status")), "KILLED")


def is_locked(path: Path) -> bool:
    """Tell whether another process holds the lock of the run in the folder `path`; one that is dead holds none.

    Not for the process that holds it: to close the file, as this does, would let go of its own lock.
    """
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)  # which lets go of the lock


def read_records(path: Path) -> list[MetricRecord]:
    """Return the metrics of the run in the folder `path` with their clocks. Raises UserError for a damaged file."""
    return with_timestamps(path, read_metrics(path / "metrics.jsonl"))


def with_timestamps(path: Path, lines: Sequence[Mapping[str, Any]]) -> list[MetricRecord]:
    """Return the lines of `metrics.jsonl` as records, each with the clock of when it was written.

    The lines have no clock. The last one was written when the file was; each other at the latest when the next step
    began, `time/step` seconds before the next line. A pause between them (a resume) shows in the time at which the
    step's own file of completions or evaluation was written, where there is one. A copy of the folder with new file
    times keeps the distances between steps, and gives the end of the copying as the end.
    """
    later = _written_ms(path / "metrics.jsonl") or 0
    records = []
    for line in reversed(lines):
        step = line["step"]
        if type(step) is not int or step < 0:
            raise UserError(f"{path / 'metrics.jsonl'}: {step!r} is no step")
        own = [
            _written_ms(path / name)
            for name in (f"samples/{step_name(step)}.parquet", f"evals/{step_name(step)}.json")
        ]
        times = [time for time in own if time is not None]
        if times:
            later = min(later, max(times) + round(1000 * _seconds(line, "time/checkpoint")))
        records.append(MetricRecord.of(step, line, later))
        later -= round(1000 * _seconds(line, "time/step"))
    return records[::-1]


def _seconds(line: Mapping[str, Any], key: str) -> float:
    value = line.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _written_ms(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns // 1_000_000
    except OSError:
        return None


def _mapping(path: Path) -> Mapping[str, Any]:
    """Return what the file holds, empty where there is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        line = (str(error).splitlines() or [""])[0][:200]
        raise UserError(f"{path}: not readable: {line}; put back a whole copy of the file") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: it does not hold keys and values; put back a whole copy of the file")
    return found
