"""Seeds and problems that a sweep needs to show a difference, from the variance components of a finished sweep."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtri

from bandpo_cli.errors import UserError, plural
from bandpo_cli.evaluation.verdicts import ALPHA, observations
from bandpo_cli.paths import path_exists
from bandpo_cli.reports.run_tables import common_sets, read_runs
from bandpo_cli.reports.run_variants import common_start, select_runs, shorten_list
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.run_record import read_record, usable_cores
from bandpo_cli.storage.sweep_folder import check_baseline
from bandpo_cli.sweeps.estimate import START_S, total_seconds
from bandpo_cli.sweeps.scheduler import visible_gpus

FACTORS = (0.5, 1, 2, 4, 8)
"""Multiples of the pilot's number of problems that a plan has rows for."""

_ADVICE = "give a sweep that finished with evaluations, such as: bandpo sweep --method band,clip --seeds 0,1"


class Components(NamedTuple):
    """Variances of the difference between two variants on one problem, by their cause.

    `seed`: the same on all problems. `problem`: the same in all seeds. `cell`: of one problem in one seed, with the
    part of it that the number of `completions` causes (NaN with one completion).
    """

    seed: float
    problem: float
    cell: float
    completions: float


class PlanRow(NamedTuple):
    """The sweep that shows the difference with one number of held-out problems.

    `seeds` per variant, with the 90% interval `low` to `high` by the uncertainty of the pilot's variance, suffice for a
    conclusion on these problems; `seeds_elsewhere` for a conclusion on others of the kind (None: no number suffices).
    """

    problems: int
    seeds: int
    low: int
    high: int
    seeds_elsewhere: int | None
    runs: int
    seconds: float


def plan_power(
    pilot: Path, difference: float, runs_dir: Path, jobs: int | None = None, baseline: str | None = None
) -> tuple[str, Components, list[PlanRow]]:
    """Return the size of a pilot in words, its variance components, and the sweeps that show a difference in accuracy.

    The test is that of a report: paired, at 5% divided by the number of comparisons, with 80% power. The variances are
    those of the differences from the baseline (else the first variant) at the last evaluation, averaged over variants;
    for a pilot of one variant twice its own variance. Problems of several sets have equal weight. `jobs` is the number
    of runs at a time, by default one per GPU, else per core.

    Raises UserError if the difference is not between 0 and 1, or the pilot has too few seeds or problems.
    """
    if not 0 < difference < 1:
        raise UserError(f"--power {difference:g}: a difference of accuracies above 0 and below 1, as in 0.02")
    selection = select_runs([pilot], runs_dir, baseline)
    start, tables = common_start(selection.runs), read_runs(selection.runs, with_budgets=True)
    excluded = [f"{run.run} ({run.reason})" for run in tables.excluded]
    if (runs := tables.runs).empty:
        raise UserError(f"--pilot {pilot}: {'; '.join(['no run can be used', *excluded[:1], _ADVICE])}")
    sets, scores = common_sets(runs), dict[str, dict[int, dict[str, float]]]()
    for (variant, seed), folder, steps in zip(runs.index, runs["folder"], runs["steps"], strict=True):
        path = folder / "evals" / f"step-{steps:06d}.json"
        if not path_exists(path):
            raise UserError(f"--pilot {pilot}: {path} is missing, the evaluation at the last step; {_ADVICE}")
        scores.setdefault(variant, {})[seed] = _by_problem(path, sets)
    check_baseline(baseline, scores)
    first = selection.baseline if selection.baseline in scores else next(iter(scores))
    seeds = sorted(set.intersection(*map(set, scores.values())))
    ids = sorted(set.intersection(*(set(row) for rows in scores.values() for row in rows.values())))
    size = f"{plural(len(seeds), 'seed')} and {plural(len(ids), 'problem')}"
    if len(seeds) < 2 or len(ids) < 2:
        raise UserError(f"--pilot {pilot}: its variants share {size}; the spread needs two or more of each")
    n = min(int(n) if n.isdecimal() else 1 for of_run in runs["n"] for n in of_run.values())
    values = {
        name: np.array([[of[seed][id_] for id_ in ids] for seed in seeds]) for name, of in scores.items()
    }
    noise = {name: np.mean(x * (1 - x)) / (n - 1) if n > 1 else math.nan for name, x in values.items()}
    base, base_noise = values.pop(first), noise.pop(first)
    found = [variance_components(values[name] - base, noise[name] + base_noise) for name in values]
    found = found or [variance_components(base * math.sqrt(2), 2 * base_noise)]
    components, alpha = Components(*map(float, np.mean(found, axis=0))), ALPHA / len(found)
    if not components.seed + components.cell:
        raise UserError(f"--pilot {pilot}: the differences are the same in every seed; they show no spread")
    jobs = jobs or len(visible_gpus(os.environ)) or usable_cores()
    rows, degrees = list[PlanRow](), len(seeds) - 1
    z_squared = observations(0.01, alpha) * 0.01**2  # of many observations: (1.96 + 0.84)² at 5%
    timed = np.mean([_seconds(folder, start) for folder in runs["folder"]], axis=0)
    for problems in sorted({max(2, round(factor * len(ids))) for factor in FACTORS}):
        variance = components.seed + components.cell / problems
        chi_squared = (degrees, chdtri(degrees, 0.05), chdtri(degrees, 0.95))
        scaled = (difference * math.sqrt(x / degrees / variance) for x in chi_squared)
        needed, low, high = (observations(change, alpha) for change in scaled)
        left = difference**2 / z_squared - components.problem / problems
        elsewhere = max(needed, math.ceil(variance / left)) if left > 0 else None
        lengths = [START_S + timed[0] + timed[1] * problems / len(ids)] * (needed * (1 + len(found)))
        counts = problems, needed, low, high, elsewhere, len(lengths)
        rows.append(PlanRow(*counts, total_seconds(lengths, jobs)))
    without = f", without {shorten_list(excluded)}" if excluded else ""
    return f"{plural(len(scores), 'variant')} with {size}{without}", components, rows


def variance_components(changes_SP: NDArray[np.float64], completions: float) -> Components:
    """Return the variance components of the differences in S seeds on P problems, by two-way analysis of variance."""
    seeds, problems = changes_SP.shape
    rows, columns = changes_SP.mean(axis=1, keepdims=True), changes_SP.mean(axis=0, keepdims=True)
    rest = changes_SP - rows - columns + changes_SP.mean()
    cell = np.sum(rest**2) / ((seeds - 1) * (problems - 1))
    seed, problem = rows.var(ddof=1) - cell / problems, columns.var(ddof=1) - cell / seeds
    return Components(max(0.0, seed), max(0.0, problem), cell, completions)


def _by_problem(path: Path, sets: Sequence[str]) -> dict[str, float]:
    """Return mean@n of every problem of an evaluation in training, by set and id."""
    record = read_record(path)["sets"]
    try:
        return {
            f"{label}/{id_}": next(float(value) for name, value in row.items() if name.startswith("mean_at_"))
            for label in sets
            for id_, row in record[label]["by_problem"].items()
        }
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError):
        raise UserError(f"{path}: the evaluation has no accuracy by problem") from None


def _seconds(folder: Path, start: int) -> tuple[float, float]:
    """Return the seconds of the steps of a run without its evaluations, and of these; of a fork, after `start`."""
    records = [line for line in RunFolder(folder).read_metrics() if line["step"] > start or not start]
    evaluating = sum(record.get("time/eval", 0.0) for record in records)
    return sum(record.get("time/step", 0.0) for record in records) - evaluating, evaluating
