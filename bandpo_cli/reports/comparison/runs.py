"""Data of one run for a report: curves and scalar metrics, read from the run folder, or the reason for excluding it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from bandpo_cli.errors import UserError, first_line
from bandpo_cli.metric_names import SCORE
from bandpo_cli.reports.comparison.selection import VariantRun, read_settings
from bandpo_cli.reports.comparison.statistics import area_under
from bandpo_cli.reports.run_plots import Curve, probability_bins, series
from bandpo_cli.storage.run_folder import iterate_metrics
from bandpo_cli.storage.run_record import read_summary

_MAX_STEPS, _MAX_ABS_VALUE = 10**12, 1e100  # larger than any real measurement; a finite float64 when squared


Score = Literal["reward", "accuracy"]


@dataclass(frozen=True)
class Evaluations:
    """Results of one evaluation set over a run.

    Attributes:
        n: completions per problem, as written in the metric name mean@n: a number, or "n".
        accuracy: mean@n by training step, in [0, 1].
        reward: mean reward by training step; mean@n for a run of an earlier version, which recorded no reward.
        passes: pass@k of the last evaluation, by k.
    """

    n: str
    accuracy: Curve
    reward: Curve
    passes: dict[int, float]

    @property
    def scores(self) -> dict[str, float | None]:
        """Values of the last evaluation and area under the mean reward, by key of the metric in a report."""
        return {
            "reward": self.reward[max(self.reward)],
            "accuracy": self.accuracy[max(self.accuracy)],
            "area": area_under(list(self.reward), list(self.reward.values())),
            **{f"pass_at_{k}": value for k, value in self.passes.items()},
        }


@dataclass(frozen=True)
class VariantRunData(VariantRun):
    """A finished run with the data that a report uses.

    Attributes:
        settings: the run's config by dotted key.
        steps: number of the last step.
        sets: results by evaluation set; only the sets evaluated at the last step.
        entropy: `train/entropy` by step, nats per token.
        clipped: mean of `clip/active_fraction` over the steps.
        clipped_by_bin: clipped share of the tokens in each bin of π_old (`0.1 – 0.5`), over all steps of the run.
        token_share: each bin's share of all tokens.
        step_seconds: seconds of each step, without evaluations and checkpoints.
    """

    settings: dict[str, Any]
    steps: int
    sets: dict[str, Evaluations]
    entropy: Curve
    clipped: float | None
    clipped_by_bin: dict[str, float]
    token_share: dict[str, float]
    step_seconds: list[float]

    @property
    def final_entropy(self) -> float | None:
        """Mean of `train/entropy` over the last tenth of the steps, at least over the last step."""
        first = self.steps - max(1, self.steps // 10)
        values = [value for step, value in self.entropy.items() if step > first]
        return fmean(values) if values else None

    def score(self, key: str, sets: Sequence[str]) -> float | None:
        """Return the mean over `sets` of an entry of `Evaluations.scores`; None unless all sets have a value."""
        values = [value for label in sets if (value := self.sets[label].scores.get(key)) is not None]
        return fmean(values) if len(values) == len(sets) else None

    def accuracy(self, sets: Sequence[str]) -> Curve:
        """Return mean@n, averaged over `sets`, at the steps at which all of them were evaluated."""
        return self.curve("accuracy", sets)

    def curve(self, metric: Score, sets: Sequence[str]) -> Curve:
        """Return mean@n or the mean reward, averaged over `sets`, at the steps at which all of them were evaluated."""
        curves = [getattr(self.sets[label], metric) for label in sets]
        steps = sorted(set.intersection(*map(set, curves)))
        return {step: fmean(curve[step] for curve in curves) for step in steps}


Variants = Mapping[str, Sequence[VariantRunData]]
"""The runs of each variant, by name."""


def scores_of(runs: Iterable[VariantRunData]) -> Sequence[Score]:
    """Return what runs are compared by: the accuracy, and before it the reward if rewards are not just 0 and 1."""
    evaluated = [scores for run in runs for scores in run.sets.values()]
    nonbinary = any(scores.reward != scores.accuracy for scores in evaluated)
    return ("reward", "accuracy") if nonbinary else ("accuracy",)


@dataclass(frozen=True)
class ExcludedRun:
    """A run that is excluded from all metrics, and the reason. The fields are keys of `bandpo report --format json`."""

    run: str
    variant: str
    seed: int
    reason: str


def read_variant_run(run: VariantRun, start: int = 0) -> VariantRunData | ExcludedRun:
    """Return the data of `run` from step `start` on: the evaluation there, and the steps after it.

    Or why it is excluded: failed, unfinished, not evaluated, damaged or missing.
    """
    try:
        return _read_finished_run(run, start)
    except UserError as error:
        return ExcludedRun(run.folder.name, run.variant, run.seed, str(error))


def _read_finished_run(run: VariantRun, start: int) -> VariantRunData:
    """Return the data of `run`. Raise UserError with the reason if it has to be excluded."""
    if not run.folder.is_dir():
        raise UserError("its folder does not exist")
    settings = read_settings(run.folder)
    records = [record for record in _read_records(run.folder) if record["step"] >= start]
    last = records[-1]["step"] if records else 0
    _check_finished(run.folder, last, settings.get("steps"))
    if not (sets := _evaluations(records)):
        raise UserError(f"no evaluation at its last step, {last}")
    training = [record for record in records if record["step"] > start]
    clipped = series(training, "clip/active_fraction").values()
    clipped_tokens, tokens = {}, {}
    for name, text in probability_bins({name for record in training for name in record}):
        fractions = series(training, name)
        shares = series(training, name.replace("active_fraction", "token_share"))
        if steps := [step for step in fractions if step in shares]:
            clipped_tokens[text] = sum(shares[step] * fractions[step] for step in steps)
            tokens[text] = sum(shares[step] for step in steps)
    all_tokens = sum(tokens.values())
    return VariantRunData(
        **vars(run),
        settings=settings,
        steps=last,
        sets=sets,
        entropy=series(training, "train/entropy"),
        clipped=fmean(clipped) if clipped else None,
        clipped_by_bin={text: clipped_tokens[text] / share for text, share in tokens.items() if share > 0},
        token_share={text: share / all_tokens for text, share in tokens.items() if all_tokens > 0},
        step_seconds=[
            float(record["time/step"] - record.get("time/eval", 0.0) - record.get("time/checkpoint", 0.0))
            for record in training
            if "time/step" in record
        ],
    )


def _read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl by ascending step, of two of the same step the last one.

    NaN, infinities, numbers whose square overflows a float64 and texts are left out.
    """
    records: dict[int, dict[str, Any]] = {}
    try:
        for line in iterate_metrics(folder / "metrics.jsonl"):
            step = line["step"]
            if type(step) is not int or not 0 <= step < _MAX_STEPS:
                raise UserError(f"metrics.jsonl has a step {json.dumps(step)[:40]}")
            numbers = {key: value for key, value in line.items() if isinstance(value, int | float)}
            records[step] = {key: value for key, value in numbers.items() if abs(value) < _MAX_ABS_VALUE}
    except UserError as error:
        raise UserError(f"damaged: {str(error).replace(f'{folder}/', '')}") from None
    except OSError as error:
        raise UserError(f"metrics.jsonl: {error.strerror or error}") from None
    return [records[step] for step in sorted(records)]


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


def _evaluations(records: Sequence[Mapping[str, Any]]) -> dict[str, Evaluations]:
    """Return the sets that were evaluated at the last step, in the order of their keys in the last record."""
    last = records[-1] if records else {}
    scores = [match.group(1, 2, 3, 0) for match in map(SCORE.fullmatch, last) if match]
    means = [(label, n, key) for label, kind, n, key in scores if kind == "mean"]
    sets = {}
    for label, n, key in means:
        accuracy, reward = series(records, key), series(records, f"eval/{label}/reward")
        sets[label] = Evaluations(n, accuracy, reward if len(reward) == len(accuracy) else accuracy, {})
    for label, kind, k, key in scores:
        if kind == "pass" and label in sets and k.isdecimal():
            sets[label].passes[int(k)] = float(last[key])
    return sets
