"""Which runs of a sweep are not worth their time any more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from bandpo_cli.sweeps.folder import SweepRun
from bandpo_cli.sweeps.states import RunState

FROM = 0.5
"""The share of its steps that a run may take before it is judged: early curves cross."""


def hopeless(runs: Sequence[SweepRun], states: Mapping[str, RunState], margin: float) -> dict[str, str]:
    """Return the running runs to stop, with the reason in a line.

    A run is hopeless when at its latest evaluation, half-way or later, its held-out accuracy is more than `margin`
    below that of another arm at the same step (the mean over that arm's runs that have been there). What is stopped is
    missing from the report, and the arms that are left are those that did well: for finding a good setting, not for a
    comparison.
    """
    at: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for step, accuracy in states[run.name].evaluations.items():
            at[step][run.arm].append(accuracy)
    found = {}
    for run in runs:
        state = states[run.name]
        if state.status != "running" or not state.evaluations:
            continue
        step = max(state.evaluations)
        others = {arm: fmean(values) for arm, values in at[step].items() if arm != run.arm}
        if step < FROM * state.steps or not others:
            continue
        best = max(others, key=lambda arm: others[arm])
        if others[best] - state.evaluations[step] > margin:
            found[run.name] = (
                f"held-out accuracy {state.evaluations[step]:.3f} at step {step}, {best} had {others[best]:.3f}"
            )
    return found
