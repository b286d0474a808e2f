"""One run, read from its folder: the curves and values that a report is made of, or why it has none."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo_cli.errors import UserError
from bandpo_cli.reports.run_plots import Series, series
from bandpo_cli.reports.sweep.selection import ArmRun, read_settings
from bandpo_cli.reports.sweep.statistics import area_under
from bandpo_cli.storage.run_folder import read_metrics
from bandpo_cli.storage.run_record import read_summary

_EVAL = re.compile(r"eval/(.+)/(mean|pass)_at_(\d+|n)")
_BIN = re.compile(r"clip/active_fraction/(p_[\d.e-]+_[\d.e-]+)")

_MOST_STEPS = 10**12
_MAX_ABS_VALUE = 1e100  # nothing that is measured is as large

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Evaluations:
    """One evaluation set over a run.

    Attributes:
        n: completions a problem, as the name of mean@n has it.
        steps, mean: the curve of mean@n.
        passes: pass@k of the last evaluation, by k.
    """

    n: str
    steps: list[int]
    mean: list[float]
    passes: dict[int, float]

    @property
    def area(self) -> float | None:
        """Area under the curve over the steps it spans; None for a single evaluation."""
        return area_under(self.steps, self.mean)


@dataclass(frozen=True)
class ArmRunData:
    """What a report takes from a whole run.

    Attributes:
        run: its arm, seed and folder.
        settings: by dotted key.
        steps: its last step.
        sets: by evaluation set, those alone that were evaluated at the last step.
        entropy: `train/entropy` over steps, nats a token.
        clipped: mean of `clip/active_fraction` over the steps.
        clipped_by_bin: by bin of π_old, the clipped share of its tokens over the whole run.
        token_share: by bin, its share of all tokens.
        seconds: a step's mean, without evaluations and checkpoints.
    """

    run: ArmRun
    settings: dict[str, Any]
    steps: int
    sets: dict[str, Evaluations]
    entropy: Series
    clipped: float | None
    clipped_by_bin: dict[str, float]
    token_share: dict[str, float]
    seconds: float | None

    @property
    def final_entropy(self) -> float | None:
        """Mean of `train/entropy` over the last tenth of the steps, at least the last one."""
        first = self.steps - max(1, self.steps // 10)
        return mean([value for step, value in zip(*self.entropy, strict=True) if step > first])


@dataclass(frozen=True)
class ExcludedRun:
    """A run that no figure is of, and why."""

    run: str
    arm: str
    seed: int
    reason: str


def read_arm_run(run: ArmRun) -> ArmRunData | ExcludedRun:
    """Return the run's record; what failed, is unfinished, not evaluated, damaged or gone is left out, with why."""
    try:
        return _read(run)
    except UserError as error:
        return ExcludedRun(run.folder.name, run.arm, run.seed, str(error))


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, None for no values."""
    return math.fsum(values) / len(values) if values else None


def _read(run: ArmRun) -> ArmRunData:
    """Raises UserError with the reason where the run cannot be counted."""
    if not run.folder.is_dir():
        raise UserError("its folder is not there")
    settings = read_settings(run.folder)
    records = _records(run.folder)
    last = records[-1]["step"] if records else 0
    _refuse_unfinished(run.folder, last, settings.get("steps"))
    sets = _evaluations(records)
    if not sets:
        raise UserError(f"no evaluation at its last step, {last}")
    training = [record for record in records if record["step"] > 0]
    bins = _bins(training)
    tokens = math.fsum(share for _, share in bins.values())
    return ArmRunData(
        run=run,
        settings=settings,
        steps=last,
        sets=sets,
        entropy=series(training, "train/entropy"),
        clipped=mean(series(training, "clip/active_fraction")[1]),
        clipped_by_bin={name: clipped / share for name, (clipped, share) in bins.items() if share > 0},
        token_share={name: share / tokens for name, (_, share) in bins.items() if tokens > 0},
        seconds=mean([each for each in map(_seconds, training) if each is not None]),
    )


def _records(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl in the order of their steps, with numbers alone (others are left out)."""
    try:
        lines = read_metrics(folder / "metrics.jsonl")
    except UserError as error:
        raise UserError(f"damaged: {str(error).replace(f'{folder}/', '')}") from None
    except OSError as error:
        raise UserError(f"metrics.jsonl: {error.strerror or error}") from None
    records: dict[int, dict[str, Any]] = {}
    for line in lines:
        step = line["step"]
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < _MOST_STEPS:
            raise UserError(f"damaged: metrics.jsonl has a step {json.dumps(step)[:40]}")
        records[step] = {key: value for key, value in line.items() if _is_number(value)}
    return [records[step] for step in sorted(records)]


def _is_number(value: Any) -> bool:
    """Tell what can be counted with from NaN, infinities and numbers whose squares no float can hold."""
    return isinstance(value, int | float) and abs(value) < _MAX_ABS_VALUE


def _refuse_unfinished(folder: Path, last: int, steps: Any) -> None:
    of_steps = f"step {last} of {steps}" if isinstance(steps, int) else f"step {last}"
    try:
        summary = read_summary(folder)
    except UserError:
        raise UserError("damaged: summary.json is not readable") from None
    if summary is None:
        raise UserError(f"not finished: {of_steps}, no summary.json")
    if "status" not in summary.content:
        raise UserError("damaged: summary.json is not readable")
    if summary.status != "FINISHED":
        error = str(summary.content.get("error") or "").split("\n")[0][:200]
        raise UserError(
            f"{str(summary.content['status']).lower()} at {of_steps}{f': {error}' if error else ''}"
        )
    if isinstance(steps, int) and last < steps:
        raise UserError(f"metrics.jsonl ends at {of_steps}")


def _evaluations(records: Sequence[Record]) -> dict[str, Evaluations]:
    """Return the sets that were evaluated at the last step, in the order in which a record has them."""
    final = {match[0]: match for name in (records[-1] if records else {}) if (match := _EVAL.fullmatch(name))}
    means = {match[1]: match for match in final.values() if match[2] == "mean"}
    found = {}
    for label, match in means.items():
        steps, values = series(records, match[0])
        passes = {
            int(each[3]): float(records[-1][each[0]])
            for each in final.values()
            if each[1] == label and each[2] == "pass" and each[3].isdecimal()
        }
        found[label] = Evaluations(match[3], steps, values, passes)
    return found


def _bins(records: Sequence[Record]) -> dict[str, tuple[float, float]]:
    """Return, by bin, the sums over steps of clipped tokens and of tokens, both as shares of a step's tokens."""
    totals: dict[str, tuple[float, float]] = {}
    for record in records:
        for name in filter(None, map(_BIN.fullmatch, record)):
            share = record.get(f"clip/token_share/{name[1]}")
            if share is not None:
                clipped, tokens = totals.get(name[1], (0.0, 0.0))
                totals[name[1]] = (clipped + share * record[name[0]], tokens + share)
    return dict(sorted(totals.items(), key=lambda item: float(item[0].split("_")[1])))


def _seconds(record: Record) -> float | None:
    if "time/step" not in record:
        return None
    return float(record["time/step"] - record.get("time/eval", 0.0) - record.get("time/checkpoint", 0.0))
