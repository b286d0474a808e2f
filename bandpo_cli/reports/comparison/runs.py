"""Data of one run for a report: curves and scalar metrics, read from the run folder, or the reason for excluding it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bandpo_cli.errors import UserError, first_line
from bandpo_cli.metric_names import SCORE
from bandpo_cli.reports.comparison.selection import VariantRun, read_settings
from bandpo_cli.reports.comparison.statistics import area_under
from bandpo_cli.reports.run_plots import Series, series
from bandpo_cli.storage.run_folder import iterate_metrics
from bandpo_cli.storage.run_record import read_summary

_BIN = re.compile(r"clip/active_fraction/(p_[\d.e-]+_[\d.e-]+)")

_MAX_STEPS = 10**12
_MAX_ABS_VALUE = 1e100  # larger than any real measurement; its square is a finite float64

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Evaluations:
    """Results of one evaluation set over a run.

    Attributes:
        n: completions per problem, as written in the metric name mean@n: a number, or "n".
        steps: training steps of the evaluations, ascending.
        mean: mean@n at these steps, in [0, 1].
        passes: pass@k of the last evaluation, by k.
    """

    n: str
    steps: list[int]
    mean: list[float]
    passes: dict[int, float]

    @property
    def area(self) -> float | None:
        """Area under the mean@n curve, divided by the steps it spans; None for a single evaluation."""
        return area_under(self.steps, self.mean)


@dataclass(frozen=True)
class VariantRunData:
    """Data of a finished run that a report uses.

    Attributes:
        run: variant, seed and folder.
        settings: the run's config by dotted key.
        steps: number of the last step.
        sets: results by evaluation set; only the sets evaluated at the last step.
        entropy: `train/entropy` over steps, nats per token.
        clipped: mean of `clip/active_fraction` over the steps.
        clipped_by_bin: clipped share of the tokens in each bin of π_old, over all steps of the run.
        token_share: each bin's share of all tokens.
        step_seconds: seconds of each step, without evaluations and checkpoints.
    """

    run: VariantRun
    settings: dict[str, Any]
    steps: int
    sets: dict[str, Evaluations]
    entropy: Series
    clipped: float | None
    clipped_by_bin: dict[str, float]
    token_share: dict[str, float]
    step_seconds: list[float]

    @property
    def final_entropy(self) -> float | None:
        """Mean of `train/entropy` over the last tenth of the steps, at least over the last step."""
        first = self.steps - max(1, self.steps // 10)
        return mean([value for step, value in zip(*self.entropy, strict=True) if step > first])


@dataclass(frozen=True)
class ExcludedRun:
    """A run that is excluded from all metrics, and the reason. The fields are keys of `bandpo report --format json`."""

    run: str
    arm: str
    seed: int
    reason: str


def read_variant_run(run: VariantRun) -> VariantRunData | ExcludedRun:
    """Return the data of `run`, or why it is excluded: failed, unfinished, not evaluated, damaged or missing."""
    try:
        return _read_finished_run(run)
    except UserError as error:
        return ExcludedRun(run.folder.name, run.arm, run.seed, str(error))


def accuracy_of(record: VariantRunData, sets: Sequence[str]) -> Series:
    """Return mean@n, averaged over `sets`, at the steps at which all of them were evaluated."""
    curves = [dict(zip(record.sets[label].steps, record.sets[label].mean, strict=True)) for label in sets]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return steps, [math.fsum(curve[step] for curve in curves) / len(curves) for step in steps]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean of `values`; None for an empty sequence."""
    return math.fsum(values) / len(values) if values else None


def _read_finished_run(run: VariantRun) -> VariantRunData:
    """Return the data of `run`.

    Raises:
        UserError: the run has to be excluded; the message is the reason.
    """
    if not run.folder.is_dir():
        raise UserError("its folder does not exist")
    settings = read_settings(run.folder)
    records = _read_records(run.folder)
    last = records[-1]["step"] if records else 0
    _check_finished(run.folder, last, settings.get("steps"))
    sets = _evaluations(records)
    if not sets:
        raise UserError(f"no evaluation at its last step, {last}")
    training = [record for record in records if record["step"] > 0]
    bins = _sum_bins(training)
    tokens = math.fsum(share for _, share in bins.values())
    return VariantRunData(
        run=run,
        settings=settings,
        steps=last,
        sets=sets,
        entropy=series(training, "train/entropy"),
        clipped=mean(series(training, "clip/active_fraction")[1]),
        clipped_by_bin={name: clipped / share for name, (clipped, share) in bins.items() if share > 0},
        token_share={name: share / tokens for name, (_, share) in bins.items() if tokens > 0},
        step_seconds=[seconds for seconds in map(_training_seconds, training) if seconds is not None],
    )


def _read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl by ascending step, without values that are not usable numbers.

    Of two records of the same step the last one counts.
    """
    records: dict[int, dict[str, Any]] = {}
    try:
        for line in iterate_metrics(folder / "metrics.jsonl"):
            step = line["step"]
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < _MAX_STEPS:
                raise UserError(f"metrics.jsonl has a step {json.dumps(step)[:40]}")
            records[step] = {key: value for key, value in line.items() if _is_number(value)}
    except UserError as error:
        raise UserError(f"damaged: {str(error).replace(f'{folder}/', '')}") from None
    except OSError as error:
        raise UserError(f"metrics.jsonl: {error.strerror or error}") from None
    return [records[step] for step in sorted(records)]


def _is_number(value: Any) -> bool:
    """Return True for numbers other than NaN, infinities and those whose square overflows a float64."""
    return isinstance(value, int | float) and abs(value) < _MAX_ABS_VALUE


def _check_finished(folder: Path, last: int, steps: Any) -> None:
    """Raise UserError unless summary.json says FINISHED and metrics.jsonl reaches the configured number of steps."""
    of_steps = f"step {last} of {steps}" if isinstance(steps, int) else f"step {last}"
    try:
        summary = read_summary(folder)
        content = {"status": None} if summary is None else summary.content
        status = content["status"]
    except (UserError, KeyError):
        raise UserError("damaged: summary.json is not readable") from None
    if summary is None:
        raise UserError(f"not finished: {of_steps}, no summary.json")
    if summary.status != "FINISHED":
        error = first_line(str(content.get("error") or ""))
        raise UserError(f"{str(status).lower()} at {of_steps}{f': {error}' if error else ''}")
    if isinstance(steps, int) and last < steps:
        raise UserError(f"metrics.jsonl ends at {of_steps}")


def _evaluations(records: Sequence[Record]) -> dict[str, Evaluations]:
    """Return the sets that were evaluated at the last step, in the order of their keys in the last record."""
    final = {match[0]: match for name in (records[-1] if records else {}) if (match := SCORE.fullmatch(name))}
    means = {match[1]: match for match in final.values() if match[2] == "mean"}
    sets = {}
    for label, match in means.items():
        steps, values = series(records, match[0])
        passes = {
            int(other[3]): float(records[-1][other[0]])
            for other in final.values()
            if other[1] == label and other[2] == "pass" and other[3].isdecimal()
        }
        sets[label] = Evaluations(match[3], steps, values, passes)
    return sets


def _sum_bins(records: Sequence[Record]) -> dict[str, tuple[float, float]]:
    """Return the sums over steps of (clipped tokens, tokens) per bin of π_old, as shares of each step's tokens."""
    totals: dict[str, tuple[float, float]] = {}
    for record in records:
        for name in filter(None, map(_BIN.fullmatch, record)):
            share = record.get(f"clip/token_share/{name[1]}")
            if share is not None:
                clipped, tokens = totals.get(name[1], (0.0, 0.0))
                totals[name[1]] = (clipped + share * record[name[0]], tokens + share)
    return dict(sorted(totals.items(), key=lambda item: float(item[0].split("_")[1])))


def _training_seconds(record: Record) -> float | None:
    """Return the seconds of a step without its evaluation and checkpoint; None where no time was recorded."""
    if "time/step" not in record:
        return None
    return float(record["time/step"] - record.get("time/eval", 0.0) - record.get("time/checkpoint", 0.0))
