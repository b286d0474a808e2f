"""Names of metrics, and the prefix of profiler labels."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from bandpo_cli.errors import UserError

CLOCK_PREFIXES = ("time/", "perf/")
"""Metrics with these prefixes depend on the machine and its load. Two runs of one configuration are equal if all other
metrics are: comparisons of runs leave these out."""

PROFILER_PREFIX = "bandpo/"
"""Prefix of the labels that a profiler trace has for the phases of a step."""

PHASES = {
    "sample": "sampling", "grade": "grading", "logprobs": "old log-probs", "update": "updates",
    "update/forward": "forward", "update/backward": "backward", "update/optimizer": "optimizer", "sync": "weight sync",
    "record": "metrics and completions", "eval": "evaluation", "checkpoint": "checkpoint",
}  # fmt: skip
"""Text of the phases of a step, by their names under `time/`, and of their parts in a profile."""

SCORE = re.compile(r"eval/(.+)/(mean|pass)_at_(\d+|n)")
"""The name of mean@n or pass@k of an evaluation set: the set, the kind, and n or k."""

HELDOUT_ACCURACY = re.compile(r"eval/.+/mean_at_(\d+|n)")
HELDOUT_REWARD = re.compile(r"eval/.+/reward")

SAMPLED_TOKENS = "compute/sampled_tokens"
TRAINED_TOKENS = "compute/trained_tokens"
FLOPS = "compute/flops"
TOTAL_SECONDS = "time/total"
TOTALS = (SAMPLED_TOKENS, TRAINED_TOKENS, FLOPS, TOTAL_SECONDS)
"""Cumulative metrics: what a run has taken up to the end of a step, evaluations and checkpoints not included."""


class Label(NamedTuple):
    """What people read in place of the key of a metric of a step, and its unit."""

    name: str
    unit: Literal["", "nats", "%"] = ""

    def text(self, value: float) -> str:
        """Return a value with its unit: `0.353 nats`, `0.39%`."""
        return f"{value:.2%}" if self.unit == "%" else f"{value:.3f} {self.unit}".rstrip()


LABELS = {
    "train/reward": Label("training reward"),
    "train/accuracy": Label("training accuracy"),
    "train/entropy": Label("entropy", "nats"),
    "clip/active_fraction": Label("clip fraction", "%"),
    "clip/upper_fraction": Label("clip fraction, positive advantage", "%"),
    "clip/lower_fraction": Label("clip fraction, negative advantage", "%"),
    "clip/outside_fraction": Label("outside the interval", "%"),
    "ratio/max": Label("largest ratio"),
    "train/response_length": Label("tokens per completion"),
}
"""The labels of metrics on the terminal, in plots, pages and reports."""


class Axis(NamedTuple):
    """What a curve can be plotted over: a value of `--x`, a key of metrics.jsonl that never decreases, and its name."""

    name: str
    key: str
    label: str

    def text(self, value: float) -> str:
        """Return a value with its unit: `812 seconds of training`, `1.23e6 sampled tokens`."""
        number = f"{value:,.0f}" if value < 1e6 else f"{value:.3g}".replace("e+0", "e").replace("e+", "e")
        return f"{number} {self.label}"

    def missing(self, folder: Path, step: int) -> UserError:
        """Return the error for a run whose line of this step does not have the metric."""
        return UserError(
            f"--x {self.name}: the record of {folder} has no {self.key} at step {step}, since verl or an earlier "
            "version of bandpo wrote it; use --x step"
        )

    def by_step(self, records: Iterable[Mapping[str, Any]], folder: Path) -> dict[float, float]:
        """Return what a run has taken by step. Raise UserError if a line of its record does not have the metric."""
        amounts: dict[float, float] = {}
        for record in records:
            if not isinstance(amount := record.get(self.key), int | float):
                raise self.missing(folder, record["step"])
            amounts[record["step"]] = amount
        return amounts


STEP = Axis("step", "step", "step")
AXES = {
    axis.name: axis
    for axis in (
        STEP,
        Axis("tokens", SAMPLED_TOKENS, "sampled tokens"),
        Axis("flops", FLOPS, "model FLOPs"),
        Axis("seconds", TOTAL_SECONDS, "seconds of training"),
    )
}
"""The axes by the values of `--x`."""

_CLIP_BIN = re.compile(r"clip/active_fraction/p_([\d.e-]+)_([\d.e-]+)")

Value = TypeVar("Value")


def probability_bins(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (name, `0.1 – 0.5`) of the metrics `clip/active_fraction/p_0.1_0.5` in `names`, by probability."""
    matches = sorted(filter(None, map(_CLIP_BIN.fullmatch, names)), key=lambda match: float(match[1]))
    return [(match[0], f"{match[1]} – {match[2]}") for match in matches]


def heldout_mean(record: Mapping[str, Any], name: re.Pattern[str]) -> float | None:
    """Return the mean over the evaluation sets of a metric; None without an evaluation, or if a value is None."""
    values = [value for key, value in record.items() if name.fullmatch(key)]
    return sum(values) / len(values) if values and None not in values else None


def heldout_score(record: Mapping[str, Any]) -> float | None:
    """Return the mean held-out reward; in a record of verl, which has none, the held-out accuracy."""
    reward = heldout_mean(record, HELDOUT_REWARD)
    return heldout_mean(record, HELDOUT_ACCURACY) if reward is None else reward


def has_nonbinary_rewards(record: Mapping[str, Any]) -> bool:
    """Return whether a mean reward of a step shows other rewards than 1 for a correct answer and 0 for any other.

    `train/reward` is the mean over the completions with a reward, `train/accuracy` the mean over all completions.
    """
    if heldout_score(record) != heldout_mean(record, HELDOUT_ACCURACY):
        return True
    reward, accuracy = record.get("train/reward"), record.get("train/accuracy")
    without = record.get("train/ungraded_fraction", 0.0) + record.get("grade/not_applicable_fraction", 0.0)
    if reward is None or accuracy is None:
        return False
    return not math.isclose(reward * (1 - without), accuracy, abs_tol=1e-9)


def is_clock_metric(key: str) -> bool:
    """Return whether the metric `key` depends on the machine and its load."""
    return key.startswith(CLOCK_PREFIXES)


def without_clock(record: Mapping[str, Value]) -> dict[str, Value]:
    """Return a line of metrics.jsonl or of summary.json without the metrics that depend on the clock."""
    return {key: value for key, value in record.items() if not is_clock_metric(key)}
