"""Comparison of each variant with the controls of a report: does its gain over the initial evaluation exceed theirs?

A control is a variant that trains on a reward that says little of what is correct (`GraderEntry.is_control`), or whose
method clips nothing (`none`). A gain that a control has too is no effect of what the control lacks.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bandpo_cli.config.layers import nest
from bandpo_cli.evaluation.verdicts import MARGIN, conclude, holm
from bandpo_cli.registries import GRADERS
from bandpo_cli.reports.compare_variants import Metric, paired_test
from bandpo_cli.reports.run_tables import RUN, RunTables

_GAIN = Metric("gain", "gain", "held-out accuracy less that of the initial evaluation", smallest=-1.0)


def is_control(settings: Mapping[str, Any]) -> bool:
    """Return whether a run with these settings, by dotted key, is a control."""
    return settings.get("bounds.method") == "none" or any(map(_is_control_reward, _rewards(settings)))


def evaluated_rewards(settings: Mapping[str, Any]) -> str:
    """Return the rewards of a run's evaluations as a text that differs where they do; '' for the answers' grader."""
    kept = [reward for reward in _rewards(settings) if not _is_control_reward(reward)]
    return str(kept) if any(reward.get("weight") for reward in kept) else ""


def _rewards(settings: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Return the settings of each of `task.rewards`."""
    given = {key: value for key, value in settings.items() if key.startswith("task.rewards.")}
    rewards: dict[str, Any] = nest(given).get("task", {}).get("rewards", {})
    return rewards.values()


def _is_control_reward(reward: Mapping[str, Any]) -> bool:
    name = reward.get("grader")
    return name is not None and name in GRADERS and GRADERS[name].is_control


def control_notes(tables: RunTables, margin: float = MARGIN) -> list[str]:
    """Return a sentence per variant that is no control; none if all variants are controls, or no variant is.

    The gains are paired over the seeds, and the p-values are adjusted over all pairs of a variant and a control.

    Args:
        tables: the runs with their means over the evaluation sets.
        margin: margin of equivalence.
    """
    settings = tables.runs["settings"].groupby(level="variant", sort=False).first()
    controls = [str(name) for name, of_variant in settings.items() if is_control(of_variant)]
    others = [str(name) for name in settings.index if name not in controls]
    first = tables.steps["accuracy"].groupby(level=RUN, sort=False).head(1).droplevel("step")
    if (
        controls and others and first.isna().any()
    ):  # of forks: gains from a later evaluation would be too small
        return ["No gain is compared with that of a control: the runs have no evaluation where they begin."]
    gains = (tables.runs["accuracy"] - first).unstack("seed")
    mean_gains = {name: _GAIN.text(float(gains.loc[name].mean()), sign=True) for name in gains.index}
    changes = {
        (name, control): gains.loc[name] - gains.loc[control] for name in others for control in controls
    }
    tests = {pair: paired_test(change) for pair, change in changes.items()}
    tested = {pair: test.p for pair, test in tests.items() if test is not None and test.p is not None}
    adjusted = dict(zip(tested, holm([*tested.values()]), strict=True))

    def compared(name: str, control: str) -> tuple[bool, str]:
        """Return whether the gain exceeds that of the control, and the evidence."""
        gain, test = f"{control} {mean_gains[control]}", tests[name, control]
        if test is None:
            return False, f"{gain} (no common seed)"
        words, p = ("exceeded", "not reached"), adjusted.get((name, control))
        values = np.asarray(changes[name, control].dropna(), dtype=np.float64)
        verdict = conclude(values, p, margin, words=words, family=len(tested)).verdict
        interval = _GAIN.interval(test.change, sign=True)
        about = f"difference {_GAIN.text(test.change.mean, sign=True)}"
        about += f", 95% interval {interval} over {test.change.n} seeds" if interval else ""
        return verdict.startswith("exceeded"), f"{gain} ({verdict}; {about})"

    notes = []
    for name in others if controls else ():
        results = [compared(name, control) for control in controls]
        exceeds = "exceeds" if all(result for result, _ in results) else "is not shown to exceed"
        gain = f"The gain of {name} over the initial evaluation, {mean_gains[name]},"
        notes.append(f"{gain} {exceeds} that of each control: {', '.join(text for _, text in results)}.")
    return notes
