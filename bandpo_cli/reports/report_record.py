"""Record of the runs of a report, and a paragraph about their methods that is made from it.

The paragraph has no adjectives and no number that is not in the record. Values that differ between runs are a range.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bandpo_cli.config.layers import flatten
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import UserError, plural
from bandpo_cli.methods import METHODS
from bandpo_cli.paths import read_json_object
from bandpo_cli.registries import BUNDLED_MODELS
from bandpo_cli.reports.run_variants import (
    SAME_VARIANT,
    Settings,
    differing_settings,
    format_setting,
    is_within,
)

_SENTENCES = (
    "The policy was the model {model.path} ({model.dtype}), trained for {steps} steps",
    "The runs continued the checkpoint {fork}",
    "LoRA adapters had rank {model.lora.rank}",
    "The task was {task}",
    "A step sampled {sampling.samples} completions of at most {sampling.max_tokens} tokens for each of "
    "{sampling.prompts} prompts at temperature {sampling.temperature}",
    "Groups of completions with equal rewards were {dynamic} by those of further prompts",
    "The reward was {reward.correct} for a correct and {reward.wrong} for a wrong answer",
    "Policy loss: {bounds}",
    "Advantages had the estimator {objective.advantages}, the loss the aggregation {objective.aggregation}, and the "
    "reference KL the coefficient {objective.reference_kl}",
    "Further settings: {others}",
    "The completions of a step were split into {optim.updates} updates of AdamW with learning rate {optim.lr} "
    "({optim.schedule} after {optim.warmup_steps} updates of linear warm-up), betas {optim.betas}, epsilon {optim.eps} "
    "and weight decay {optim.weight_decay}; the gradient norm was clipped at {optim.max_grad_norm}",
    "Before the first step, every {evaluation.every} steps and after the last step, {evaluation.samples} completions "
    "were sampled for each of at most {evaluation.problems} held-out problems of {sets} at temperature "
    "{evaluation.temperature}",
    "The report has {runs} with {seeds}",
    "A run took {seconds} seconds without evaluations and checkpoints",
    "Hardware: {hardware}",
    "Software: {software}",
)
"""Sentences with settings, or values of `_facts`, in braces. A sentence is left out if no run has all of them."""

_FURTHER = ("objective", "reward", "sampling.max_lag", "sampling.stop")  # named where not the defaults
_MAX_CHARS = 60  # of a setting in a sentence; prompt templates are longer


@dataclass(frozen=True)
class RunRecord:
    """A run of a report. The fields are keys of `report.json`.

    Attributes:
        settings: the settings in which the runs differ, by dotted key, as in config.yaml.
        values: value of each metric, by its key.
        seconds: time of all steps, without evaluations and checkpoints; None where it was not recorded.
        environment: content of env.json: command, versions, commit, hardware; empty if it is missing or damaged.
    """

    run: str
    variant: str
    seed: int
    steps: int
    settings: Settings
    values: Mapping[str, float]
    seconds: float | None
    environment: Mapping[str, Any]


def record_runs(
    runs: pd.DataFrame, seconds: "pd.Series[float]", metrics: Sequence[str]
) -> tuple[dict[str, Any], tuple[RunRecord, ...]]:
    """Return the settings that all runs share, without those that have no effect on the results, and the runs.

    Args:
        runs: `RunTables.runs`.
        seconds: by variant, seed and step.
        metrics: keys of the metrics, which are columns of `runs`.
    """
    differing, records = differing_settings(runs["settings"]), []
    first: Settings = runs["settings"].iloc[0]
    shared = {
        key: value
        for key, value in first.items()
        if key not in differing and not is_within(key, SAME_VARIANT)
    }
    totals = seconds.groupby(level=["variant", "seed"]).sum(min_count=1).dropna().to_dict()
    for key, row in zip(runs.index.tolist(), runs.to_dict("records"), strict=True):
        environment: dict[str, Any] = {}
        with suppress(UserError):
            environment = read_json_object(row["folder"] / "env.json")
        settings = {name: row["settings"][name] for name in differing if name in row["settings"]}
        values = {name: row[name] for name in metrics if row[name] == row[name]}  # without NaN
        name, (variant, seed) = row["folder"].name, key
        record = RunRecord(name, variant, seed, row["steps"], settings, values, totals.get(key), environment)
        records.append(record)
    return shared, tuple(records)


def describe_methods(
    shared: Settings, runs: Sequence[RunRecord], sets: Sequence[str], statistics: str
) -> str:
    """Return the paragraph of methods; `statistics` is its sentences on intervals and tests."""
    seeds = sorted({run.seed for run in runs})
    listed = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    common = {"sets": ", ".join(sets), "runs": plural(len(runs), "run"), "seeds": listed}
    settings = [{**shared, **run.settings, **common} for run in runs]
    facts = [{**values, **_facts(values, run)} for values, run in zip(settings, runs, strict=True)]
    sentences = []
    for template in _SENTENCES:
        pieces = re.split(r"{([\w.]+)}", template)  # every second piece is a key
        keys = pieces[1::2]
        having = [run for run in facts if run.keys() >= {*keys}]
        if having:
            pieces[1::2] = [_text(run[key] for run in having) for key in keys]
            some = f" ({len(having)} of {len(runs)} runs)" if len(having) < len(runs) else ""
            sentences.append("".join(pieces) + some)
    return ". ".join([*sentences, statistics])


def _facts(settings: Settings, run: RunRecord) -> dict[str, Any]:
    """Return values of a run that are no single settings."""
    facts: dict[str, Any] = {} if run.seconds is None else {"seconds": round(run.seconds)}
    if task := BUNDLED_MODELS.get(str(settings.get("model.path"))):
        facts["model.path"] = f"bundled with bandpo for the task {task}"
    facts |= {"dynamic": "replaced"} if settings.get("sampling.dynamic") else {}
    for name, tag in (("task", "task.name"), ("bounds", "bounds.method")):
        if tag in settings:
            paper = getattr(METHODS.get(str(settings[tag])), "paper", "") if name == "bounds" else ""
            texts = {
                key.partition(".")[2]: format_setting(value)
                for key, value in settings.items()
                if key.startswith(f"{name}.") and key != tag and value not in (None, [])
            }
            details = [f"{key} {text}" for key, text in texts.items() if len(text) <= _MAX_CHARS]
            inside = "; ".join(filter(None, [", ".join(details), paper]))
            facts[name] = f"{settings[tag]}" + (f" ({inside})" if inside else "")
    usual, named = flatten(RunConfig().model_dump(mode="json"), expand_lists=True), "".join(_SENTENCES)
    others = [
        f"{key} {format_setting(value)}"
        for key, value in settings.items()
        if is_within(key, _FURTHER) and f"{{{key}}}" not in named and usual.get(key) != value
    ]
    facts |= {"others": ", ".join(others)} if others else {}
    hardware, versions, git = (run.environment.get(key) or {} for key in ("hardware", "versions", "git"))
    if hardware:
        gpus = [str(gpu.get("name")) for gpu in hardware.get("gpus") or ()]
        cores = f"{hardware.get('usable_cores')} cores of {hardware.get('cpu')}"
        facts["hardware"] = f"{len(gpus)} × {gpus[0]}" if gpus else cores
    if versions:
        commit = f", commit {git['commit'][:12]}{' with changes' if git.get('dirty') else ''}" if git else ""
        facts["software"] = ", ".join(f"{name} {version}" for name, version in versions.items()) + commit
    return facts


def _text(values: Iterable[Any]) -> str:
    """Return a value, the range of several numbers, or several texts."""
    texts = {format_setting(value): value for value in values}
    if len(texts) > 1 and all(isinstance(value, int | float) for value in texts.values()):
        return f"{format_setting(min(texts.values()))} to {format_setting(max(texts.values()))}"
    if all(isinstance(value, list) for value in texts.values()):
        return "; ".join(" and ".join(map(format_setting, value)) for value in texts.values())
    separator = "; " if any("," in text for text in texts) else ", "
    return separator.join("none" if value is None else text for text, value in texts.items())
