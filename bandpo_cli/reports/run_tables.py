"""Tables of the runs of a report, read from their folders: a row per run, per step and per bin of probability."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import pandas as pd

from bandpo_cli.errors import UserError, first_line
from bandpo_cli.metric_names import SCORE
from bandpo_cli.reports.run_plots import probability_bins
from bandpo_cli.reports.run_variants import VariantRun, differing_settings, read_settings
from bandpo_cli.results import read_metrics_table
from bandpo_cli.storage.run_record import read_summary

Score = Literal["reward", "accuracy"]

RUN = ["variant", "seed"]
"""The index of a table with a row per run."""


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
            the evaluation sets, `accuracy/gsm8k` and `reward/gsm8k`.
        bins: a row per run and bin of π_old: `variant`, `seed`, `bin` (`0.1 – 0.5`), the `clipped` share of its tokens
            over all steps, and its share of all `tokens`.
        excluded: runs that failed, are not finished, not evaluated at their last step, damaged or missing.
    """

    runs: pd.DataFrame
    steps: pd.DataFrame
    bins: pd.DataFrame
    excluded: tuple[ExcludedRun, ...] = ()

    def average(self, sets: Sequence[str]) -> RunTables:
        """Return the tables with the metrics over `sets`: `accuracy`, `reward`, `area` and `pass_at_k`.

        They are plain means over the sets, of runs and steps that have a value for every set.
        """
        runs, steps = self.runs.copy(), self.steps.copy()
        for table in (runs, steps):
            keys = {column.partition("/")[0] for column in table.columns if "/" in column}
            for key in sorted(keys):
                columns = [f"{key}/{label}" for label in sets]
                complete = table.reindex(columns=columns).dropna()
                table[key] = pd.Series(map(fmean, complete.to_numpy()), complete.index, dtype=float)
        return RunTables(runs, steps, self.bins, self.excluded)


def read_runs(selected: Iterable[VariantRun], start: int = 0) -> RunTables:
    """Return the runs from step `start` on: the evaluation there, and the steps after it.

    Raises:
        UserError: two runs of a variant have the same seed.
    """
    excluded: list[ExcludedRun] = []
    finished: dict[str, dict[int, _Tables]] = {}
    for run in selected:
        try:
            tables = _read_run(run, start)
        except UserError as error:
            excluded.append(ExcludedRun(run.folder.name, run.variant, run.seed, str(error)))
            continue
        other = finished.setdefault(run.variant, {}).setdefault(run.seed, tables)
        if other is not tables:
            keys = ", ".join(differing_settings([other[0]["settings"], tables[0]["settings"]])[:3])
            advice = f"they differ in {keys}: add it to --by" if keys else "give only one of them"
            which = f"seed {run.seed} of the variant '{run.variant}'"
            raise UserError(f"{other[0]['folder']} and {run.folder} are both {which}; {advice}")
    ordered = [runs[seed] for runs in finished.values() for seed in sorted(runs)]
    if not ordered:
        return RunTables(pd.DataFrame(), pd.DataFrame(), pd.DataFrame(), tuple(excluded))
    rows, steps, bins = zip(*ordered, strict=True)
    runs = pd.DataFrame(rows).set_index(RUN)
    joined = pd.concat(steps, keys=runs.index, names=[*RUN, "step"])
    return RunTables(runs, joined, pd.concat(bins, ignore_index=True), tuple(excluded))


_Tables = tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]
"""The row of a run, its steps and its bins."""


def _read_run(run: VariantRun, start: int) -> _Tables:
    """Return the tables of a run. Raise UserError with the reason if it has to be excluded."""
    if not run.folder.is_dir():
        raise UserError("its folder does not exist")
    settings = read_settings(run.folder)
    try:
        table = read_metrics_table(run.folder / "metrics.jsonl").loc[start:]
    except UserError as error:
        raise UserError(f"damaged: {str(error).replace(f'{run.folder}/', '')}") from None
    last = int(table.index[-1]) if len(table) else 0
    _check_finished(run.folder, last, settings.get("steps"))
    steps, scores, n = _evaluations(table)
    if not n:
        raise UserError(f"no evaluation at its last step, {last}")
    training = table.loc[start + 1 :]
    bins = _bins(training).assign(variant=run.variant, seed=run.seed)
    steps["entropy"] = _column(training, "train/entropy")
    pauses = [_column(training, name).fillna(0.0) for name in ("time/eval", "time/checkpoint")]
    steps["seconds"] = _column(training, "time/step") - pauses[0] - pauses[1]
    last_tenth = steps["entropy"].loc[last - max(1, last // 10) + 1 :]
    row = {
        **vars(run),
        "settings": settings,
        "steps": last,
        "n": n,
        "entropy": _mean(last_tenth),
        "clipped": _mean(_column(training, "clip/active_fraction")),
        "seconds_per_step": _mean(steps["seconds"]),
        **scores,
    }
    return row, steps, bins


def _column(table: pd.DataFrame, name: str) -> pd.Series[float]:
    """Return a column of a table, NaN if it has none of that name."""
    return table[name] if name in table else pd.Series(np.nan, table.index)


def _mean(values: pd.Series[float]) -> float:
    """Return the mean of the values that are not NaN; NaN without any."""
    known = values.dropna()
    return fmean(known) if len(known) else np.nan


def _evaluations(table: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, float], dict[str, str]]:
    """Return the scores by step, the metrics of the last evaluation, and n of mean@n, of the sets evaluated last.

    The mean reward is mean@n where it is not recorded.
    """
    last = table.iloc[-1].dropna() if len(table) else pd.Series(dtype=float)
    matches = [match.group(1, 2, 3, 0) for match in map(SCORE.fullmatch, last.index) if match]
    n = {label: number for label, kind, number, _ in matches if kind == "mean"}
    steps, scores = pd.DataFrame(index=table.index), dict[str, float]()
    for label in n:
        accuracy = table[f"eval/{label}/mean_at_{n[label]}"]
        reward = _column(table, f"eval/{label}/reward")
        steps[f"accuracy/{label}"] = accuracy
        steps[f"reward/{label}"] = reward if reward.count() == accuracy.count() else accuracy
        curve = steps[f"reward/{label}"].dropna()
        scores |= {f"{key}/{label}": steps[f"{key}/{label}"].iloc[-1] for key in ("reward", "accuracy")}
        scores[f"area/{label}"] = area_under(curve)
    for label, kind, k, key in matches:
        if kind == "pass" and label in n and k.isdecimal():
            scores[f"pass_at_{k}/{label}"] = last[key]
    return steps, scores, n


def area_under(curve: pd.Series[float]) -> float:
    """Return the area under values by step by the trapezoid rule, divided by the steps it spans; NaN for one step."""
    if len(curve) < 2:
        return np.nan
    return float(np.trapezoid(curve, curve.index) / (curve.index[-1] - curve.index[0]))


def _bins(training: pd.DataFrame) -> pd.DataFrame:
    """Return the `clipped` share of the tokens of each `bin` of π_old over all steps, and its share of all `tokens`."""
    rows = []
    for name, text in probability_bins(training.columns):
        shares = _column(training, name.replace("active_fraction", "token_share"))
        known = pd.DataFrame({"clipped": training[name] * shares, "tokens": shares}).dropna()
        if len(known):
            rows.append({"bin": text, "clipped": sum(known["clipped"]), "tokens": sum(known["tokens"])})
    bins = pd.DataFrame(rows, columns=["bin", "clipped", "tokens"])
    bins["clipped"] /= bins["tokens"].where(bins["tokens"] > 0)
    bins["tokens"] /= sum(bins["tokens"]) or np.nan
    return bins


def _check_finished(folder: Path, last: int, steps: Any) -> None:
    """Raise UserError unless summary.json says FINISHED and metrics.jsonl reaches the configured number of steps."""
    of_steps = f"step {last} of {steps}" if isinstance(steps, int) else f"step {last}"
    try:
        summary = read_summary(folder)
    except UserError:
        raise UserError("damaged: summary.json is not readable") from None
    if summary is None:
        raise UserError(f"not finished: {of_steps}, no summary.json")
    if summary.status != "FINISHED":
        status = str(summary.content.get("status", "no status")).lower()
        raise UserError(": ".join(filter(None, [f"{status} at {of_steps}", first_line(summary.error or "")])))
    if summary.stopped_by is not None:
        raise UserError(f"ended at {of_steps}: {first_line(summary.stopped_by)}")
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
