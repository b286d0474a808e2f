"""Tables of the runs of a report, read from their folders: a row per run, per step and per bin of probability.

Learning a task lowers the entropy, so at the same step the variant that has learned less has the higher entropy. The
entropies are therefore also taken at the same held-out accuracy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bandpo_cli.errors import UserError, first_line, plural
from bandpo_cli.metric_names import SCORE, STEP, Axis, probability_bins
from bandpo_cli.reports.run_variants import VariantRun, differing_settings, read_settings, shorten_list
from bandpo_cli.results import read_metrics_table
from bandpo_cli.storage.run_record import read_summary

Score = Literal["reward", "accuracy"]

RUN = ["variant", "seed"]
"""The index of a table with a row per run."""

FAR_BEHIND = 0.5
"""Runs and variants whose best accuracy is under this share of the best variant's have no entropy at equal accuracy
and do not lower the level."""


@dataclass(frozen=True)
class ExcludedRun:
    """A run that is excluded from all metrics, and the reason. The fields are keys of `bandpo report --format json`."""

    run: str
    variant: str
    seed: int
    reason: str


@dataclass(frozen=True)
class RunTables:
    """The finished runs of a report, in the order of their variants, the seeds of a variant ascending.

    Attributes:
        runs: a row per run, with the index `RUN`: `folder`; `settings`, the config by dotted key; `steps`, the last
            step; `n`, a dict with n of mean@n by evaluation set; and the metrics of a report by their key: `entropy`,
            `clipped`, `seconds_per_step`, and of every evaluation set those such as `accuracy/gsm8k` and
            `pass_at_4/gsm8k`, at the last evaluation.
        steps: a row per run and step, with the index variant, seed and step: `entropy`, `seconds`, and the scores of
            the evaluation sets, `accuracy/gsm8k` and `reward/gsm8k`; `amount` is what the run has taken on the axis.
        bins: a row per run and bin of π_old: `variant`, `seed`, `bin` (`0.1 – 0.5`), the `clipped` share of its tokens
            over all steps, and its share of all `tokens`.
        excluded: runs that failed, are not finished, not evaluated at their last step, damaged or missing.
        axis: what the runs are compared at equal amounts of.
        level: the largest amount that all runs reach with an evaluation: `runs` and `bins` are of the steps up to it,
            and the scores in `runs` are linear between evaluations; None for steps, where each run counts to its end.
    """

    runs: pd.DataFrame
    steps: pd.DataFrame
    bins: pd.DataFrame
    excluded: tuple[ExcludedRun, ...] = ()
    axis: Axis = STEP
    level: float | None = None

    def average(self, sets: Sequence[str]) -> RunTables:
        """Return the tables with the metrics over `sets`: `accuracy`, `reward`, `area` and `pass_at_k`.

        They are plain means over the sets, of runs and steps that have a value for every set.
        """
        runs, steps = self.runs.copy(), self.steps.copy()
        for table in (runs, steps):
            for key in sorted({column.partition("/")[0] for column in table.columns if "/" in column}):
                of_sets = table.reindex(columns=[f"{key}/{label}" for label in sets])
                table[key] = of_sets.astype(float).mean(axis=1, skipna=False)
        return replace(self, runs=runs, steps=steps)


def read_runs(
    selected: Iterable[VariantRun], start: int = 0, axis: Axis = STEP, with_budgets: bool = False
) -> RunTables:
    """Return the runs from step `start` on: the evaluation there, and the steps after it.

    A run that has reached a budget is finished on any axis but steps, and with `with_budgets` on that one, too. Raises
    UserError if two runs of a variant have the same seed, or a record does not have the metric of the axis.
    """
    excluded: list[ExcludedRun] = []
    finished: dict[str, dict[int, _Record]] = {}
    for run in selected:
        try:
            record = _read_record(run, start, with_budgets or axis != STEP)
        except UserError as error:
            excluded.append(ExcludedRun(run.folder.name, run.variant, run.seed, str(error)))
            continue
        other = finished.setdefault(run.variant, {}).setdefault(run.seed, record)
        if other is not record:
            keys = ", ".join(differing_settings([other.settings, record.settings])[:3])
            advice = f"they differ in {keys}: add it to --by" if keys else "give only one of them"
            which = f"seed {run.seed} of the variant '{run.variant}'"
            raise UserError(f"{other.run.folder} and {run.folder} are both {which}; {advice}")
    records = [of_variant[seed] for of_variant in finished.values() for seed in sorted(of_variant)]
    if not records:
        return RunTables(pd.DataFrame(), pd.DataFrame(), pd.DataFrame(), tuple(excluded), axis)
    ends = [float(amounts_of(record.table, axis, record.run.folder).iloc[-1]) for record in records]
    level = None if axis == STEP else min(ends)
    measured = [
        _measure(record, start, axis, end if level is None else level)
        for record, end in zip(records, ends, strict=True)
    ]
    rows, steps, bins = zip(*measured, strict=True)
    runs = pd.DataFrame(rows).set_index(RUN)
    joined = pd.concat([*steps], keys=[*runs.index], names=[*RUN, "step"])
    return RunTables(runs, joined, pd.concat(bins, ignore_index=True), tuple(excluded), axis, level)


def amounts_of(table: pd.DataFrame, axis: Axis, folder: Path) -> pd.Series[float]:
    """Return what a run has taken on an axis by step, from its metrics.

    Raises:
        UserError: the record has no such metric.
    """
    if axis == STEP:
        return table.index.to_series().astype(float)
    amounts = _column(table, axis.key)
    if amounts.isna().any():
        raise axis.missing(folder, amounts.index[amounts.isna()][0])
    return amounts


class _Record(NamedTuple):
    """A run that is not excluded. The metrics are by step; n is that of mean@n by evaluation set."""

    run: VariantRun
    settings: dict[str, Any]
    table: pd.DataFrame
    n: dict[str, str]


def _read_record(run: VariantRun, start: int, with_budgets: bool) -> _Record:
    """Return the record of a run. Raise UserError with the reason if it has to be excluded."""
    if not run.folder.is_dir():
        raise UserError("its folder does not exist")
    settings = read_settings(run.folder)
    try:
        table = read_metrics_table(run.folder / "metrics.jsonl", comparable=True).loc[start:]
    except UserError as error:
        raise UserError(f"damaged: {str(error).replace(f'{run.folder}/', '')}") from None
    last = int(table.index[-1]) if len(table) else 0
    _check_finished(run.folder, last, settings.get("steps"), with_budgets)
    evaluated = table.columns[table.iloc[-1].notna()] if len(table) else ()
    matches = [match for match in map(SCORE.fullmatch, evaluated) if match]
    n = {match[1]: match[3] for match in matches if match[2] == "mean"}
    if not n:
        raise UserError(f"no evaluation at its last step, {last}")
    return _Record(run, settings, table, n)


def _measure(
    record: _Record, start: int, axis: Axis, end: float
) -> tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]:
    """Return the row of a run up to `end` on the axis, all of its steps, and its bins up to `end`."""
    (run, settings, table, n), amounts = record, amounts_of(record.table, axis, record.run.folder)
    training = table.loc[start + 1 :]
    pauses = [_column(training, name).fillna(0.0) for name in ("time/eval", "time/checkpoint")]
    seconds = _column(training, "time/step") - pauses[0] - pauses[1]
    entropy = _column(training, "train/entropy")
    steps = pd.DataFrame({"amount": amounts, "entropy": entropy, "seconds": seconds}, table.index)
    within = amounts.index[amounts <= end]
    last, training = int(within[-1]), training.loc[: within[-1]]
    row = {
        **vars(run),
        "settings": settings,
        "steps": last,
        "n": n,
        "entropy": entropy.loc[last - max(1, last // 10) + 1 : last].mean(),
        "clipped": _column(training, "clip/active_fraction").mean(),
        "seconds_per_step": seconds.loc[:last].mean(),
    }
    for label in n:
        accuracy = table[f"eval/{label}/mean_at_{n[label]}"]
        reward = table.get(f"eval/{label}/reward", accuracy)  # verl's runs have no reward
        for key, curve in (("accuracy", accuracy), ("reward", reward)):
            steps[f"{key}/{label}"] = curve
            row[f"{key}/{label}"] = at_axis(curve, amounts, [end])[0]
        before = reward[amounts < end].set_axis(amounts[amounts < end])
        last_point = pd.Series({end: row[f"reward/{label}"]})
        curve = pd.concat([before, last_point]).dropna()
        span = curve.index[-1] - curve.index[0]
        row[f"area/{label}"] = np.trapezoid(curve, curve.index) / span if span else np.nan
    for match in filter(None, map(SCORE.fullmatch, table.columns)):
        if match[2] == "pass" and match[1] in n and match[3].isdecimal():
            row[f"pass_at_{match[3]}/{match[1]}"] = at_axis(table[match[0]], amounts, [end])[0]
    return row, steps, _bins(training).assign(variant=run.variant, seed=run.seed)


def _column(table: pd.DataFrame, name: str) -> pd.Series[float]:
    """Return a column of a table, NaN if it has none of that name."""
    return table.get(name, pd.Series(np.nan, table.index))


def at_axis(
    curve: pd.Series[float], axis: pd.Series[float], points: Sequence[float] | NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the values of a curve at points of an axis, [N], linear between the steps that have a value.

    Args:
        curve: values by step; NaN for a step without one.
        axis: what the run has taken by step, such as its sampled tokens; it has a value at each step of the curve.
        points: [N], on the axis; a point before the first or after the last value of the curve has NaN.
    """
    known = curve.dropna()
    if known.empty:
        return np.full(len(points), np.nan)
    return np.interp(points, axis.loc[known.index], known, left=np.nan, right=np.nan)


def _bins(training: pd.DataFrame) -> pd.DataFrame:
    """Return the `clipped` share of the tokens of each `bin` of π_old over all steps, and its share of all `tokens`."""
    rows = []
    for name, text in probability_bins(training.columns):
        tokens = _column(training, name.replace("active_fraction", "token_share"))
        known = pd.DataFrame({"clipped": training[name] * tokens, "tokens": tokens}).dropna()
        if len(known):
            rows.append({"bin": text, **known.sum()})
    bins = pd.DataFrame(rows, columns=["bin", "clipped", "tokens"])
    bins["clipped"] /= bins["tokens"].where(bins["tokens"] > 0)
    bins["tokens"] /= bins["tokens"].sum() or np.nan
    return bins


def _check_finished(folder: Path, last: int, steps: Any, with_budgets: bool) -> None:
    """Raise UserError unless summary.json says FINISHED and metrics.jsonl reaches the configured number of steps, or
    with `with_budgets` a budget.
    """
    of_steps = f"step {last} of {steps}" if isinstance(steps, int) else f"step {last}"
    summary = read_summary(folder)
    if summary is None:
        raise UserError(f"not finished: {of_steps}, no summary.json")
    if summary.status != "FINISHED":
        status = str(summary.content.get("status", "no status")).lower()
        raise UserError(": ".join(filter(None, [f"{status} at {of_steps}", first_line(summary.error or "")])))
    if summary.stopped_by is not None:
        at_budget = summary.stopped_by.startswith(("stop.tokens", "stop.flops"))
        if at_budget and with_budgets:
            return
        advice = "; --x tokens, flops or seconds compares such runs" if at_budget else ""
        raise UserError(f"ended at {of_steps}: {first_line(summary.stopped_by)}{advice}")
    if isinstance(steps, int) and last < steps:
        raise UserError(f"metrics.jsonl ends at {of_steps}")


def common_sets(runs: pd.DataFrame) -> list[str]:
    """Return the evaluation sets that all runs have; raise UserError if there is none."""
    first, *others = runs["n"]
    sets = [label for label in first if all(label in other for other in others)]
    if not sets:
        index = min(range(len(others)), key=lambda place: len(others[place].keys() & first.keys()))
        folders = [folder.name for folder in runs["folder"]]
        raise UserError(
            f"the runs share no evaluation set: {folders[0]} has {', '.join(first)}, "
            f"{folders[index + 1]} has {', '.join(others[index])}; make a report of each group"
        )
    return sets


def common_n(runs: pd.DataFrame, sets: Sequence[str]) -> str:
    """Return n of mean@n, the number of completions per problem; "n" where the number differs."""
    ns = {of_run[label] for of_run in runs["n"] for label in sets}
    return ns.pop() if len(ns) == 1 else "n"


def scores_of(tables: RunTables) -> Sequence[Score]:
    """Return what runs are compared by: the accuracy, and before it the reward if rewards are not just 0 and 1."""
    steps = tables.steps
    labels = [column.partition("/")[2] for column in steps.columns if column.startswith("accuracy/")]
    nonbinary = any(not steps[f"reward/{label}"].equals(steps[f"accuracy/{label}"]) for label in labels)
    return ("reward", "accuracy") if nonbinary else ("accuracy",)


class EqualAccuracy(NamedTuple):
    """Entropies of the runs at the same held-out accuracy, nats per token by variant and seed.

    `level` is the accuracy, in [0, 1]; None where fewer than two variants have a value. `notes` are sentences on the
    level and on the runs without a value, or why there is no level.
    """

    level: float | None
    values: dict[tuple[str, int], float]
    notes: list[str]


def entropy_at_equal_accuracy(steps: pd.DataFrame) -> EqualAccuracy:
    """Return the entropy of each run at the moment at which its held-out accuracy first reaches a common level.

    The level is the highest accuracy that all compared runs reach at some evaluation. Not compared are variants that
    fall far behind (the median over seeds of the runs' best accuracies is under `FAR_BEHIND` times that of the best
    variant), and single runs of other variants whose best accuracy is under the same limit. The level is a minimum over
    runs, so a single run determines it: a note names this run, and gives the level without it.

    There are no values if fewer than two variants have one, or if a run starts at or above the level: the moment at
    which such a run reached it is not known. `steps` has `accuracy` and `entropy` by variant, seed and step.
    """
    accuracy, entropy = (
        {run: curve.droplevel([*RUN]) for run, curve in steps[name].dropna().groupby(level=RUN, sort=False)}
        for name in ("accuracy", "entropy")
    )
    best = steps["accuracy"].dropna().groupby(level=RUN, sort=False).max()
    typical = best.groupby(level="variant", sort=False).median()
    limit = FAR_BEHIND * typical.max()
    behind = list(typical.index[typical < limit])
    compared = [run for run in best.index if run[0] not in behind and best[run] >= limit and run in entropy]
    none = "No entropy at equal held-out accuracy"
    if len({variant for variant, _ in compared}) < 2:
        why = "fewer than two variants are left without those whose best value (median over seeds) is under half of"
        note = f"{none}: {why} the best variant's, {shorten_list(behind)}."
        return EqualAccuracy(None, {}, [note] if behind else [])
    lowest, second = sorted(compared, key=best.__getitem__)[:2]
    level, percent, next_percent = float(best[lowest]), percent_text(best[lowest]), percent_text(best[second])
    start = max(accuracy[run].iloc[0] for run in compared)
    if level <= start:
        above = f"{percent}, is not above all first evaluations (up to {percent_text(start)})"
        return EqualAccuracy(None, {}, [f"{none}: the highest level that all compared runs reach, {above}."])
    reached = {run: entropy_when_reached(entropy[run], accuracy[run], level) for run in compared}
    values = {run: value for run, value in reached.items() if value is not None}
    if len({variant for variant, _ in values}) < 2:
        return EqualAccuracy(None, {}, [])
    texts = {(variant, seed): f"{variant} (seed {seed})" for variant, seed in best.index}
    notes = [
        f"The entropy of a run is taken where its held-out accuracy first reaches {percent}, the highest level that "
        f"all compared runs reach. {texts[lowest]} does not exceed {percent}"
        + ("." if next_percent == percent else f"; without this run, the level would be {next_percent}.")
    ]
    if behind:
        notes.append(
            f"No entropy at {percent} held-out accuracy, since the best value (median over seeds) is under half of the "
            f"best variant's: {shorten_list(behind)}."
        )
    if missing := [text for run, text in texts.items() if run[0] not in behind and run not in values]:
        notes.append(
            f"{plural(len(missing), 'run')} of the compared variants without entropy at {percent} held-out accuracy: "
            f"{shorten_list(missing)}."
        )
    return EqualAccuracy(level, values, notes)


def entropy_when_reached(entropy: pd.Series[float], accuracy: pd.Series[float], level: float) -> float | None:
    """Return the entropy of the policy when `accuracy` first reaches `level` from below; None if it never does.

    Between evaluations the accuracy is taken as linear. The value is read from the straight line fitted by least
    squares to the entropies of the steps between the evaluations before and after that moment: this reduces the noise
    of single steps and follows the trend. Where the line leaves the range of these entropies or of their steps, the
    value is that at the end of the range.

    Args:
        entropy: nats per token by step; the value of a step is the entropy of the policy after the step before.
        accuracy: held-out accuracy by step.
        level: the accuracy at which the entropy is taken.

    Returns:
        Nats per token. None also if no entropy was recorded between the two evaluations, or if `accuracy` starts at or
        above the level.
    """
    reached = (accuracy >= level).to_numpy()
    if reached[0] or not reached.any():
        return None
    crossing = accuracy.iloc[reached.argmax() - 1 : reached.argmax() + 1]
    moment = np.interp(level, crossing, crossing.index)
    between = entropy.loc[crossing.index[0] + 1 : crossing.index[1] + 1]
    if between.empty:
        return None
    policies = between.index.to_numpy() - 1
    line = np.polyfit(policies, between, min(1, len(between) - 1))
    value = np.polyval(line, np.clip(moment, policies[0], policies[-1]))
    return float(np.clip(value, between.min(), between.max()))


def percent_text(accuracy: float) -> str:
    """Return an accuracy in percent with three digits, without trailing zeros: `21.8%`, `40%`."""
    return f"{100 * accuracy:.3g}%"
