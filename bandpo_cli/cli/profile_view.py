"""Table of a profiled run: the time per phase of a step, and how to open the trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bandpo_cli.cli.console import make_table, print_line

if TYPE_CHECKING:
    from bandpo_cli.experiments.profile import PhaseTime, StepProfile

LABELS = {
    "sample": "sampling",
    "grade": "grading",
    "logprobs": "old log-probs",
    "update": "updates",
    "update/forward": "forward",
    "update/backward": "backward",
    "update/optimizer": "optimizer",
    "sync": "weight sync",
    "record": "metrics and completions",
    "eval": "evaluation",
    "checkpoint": "checkpoint",
}
"""Text of the phases and their parts; parts that are not here have no row."""


def print_profile(console: Console, profile: StepProfile) -> None:
    """Print seconds and share per phase, the mean of the traced steps, and where to open the trace."""
    console.print(profile_table(profile), highlight=False)
    print_line(console, f"{profile.trace}; open it at https://ui.perfetto.dev (Open trace file)", "trace")


def profile_table(profile: StepProfile) -> Table:
    """Return the table. Parts of a phase are indented; `other` is the time of a step outside of all phases."""
    steps = profile.steps
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    on_gpu = any(each.gpu_seconds for each in profile.phases.values())
    table = make_table(span, ">s/step", ">share", *([">GPU s/step"] if on_gpu else []), ">calls/step")

    def add(label: str, seconds: float, phase: PhaseTime | None = None) -> None:
        gpu = [f"{phase.gpu_seconds / len(steps):.3f}" if phase else ""] if on_gpu else []
        calls = f"{phase.calls / len(steps):g}" if phase else ""
        table.add_row(label, f"{seconds / len(steps):.3f}", f"{seconds / profile.seconds:.1%}", *gpu, calls)

    for key, label in LABELS.items():
        if key in profile.phases:
            phase = profile.phases[key]
            add("  " * key.count("/") + label, phase.seconds, phase)
    inside = sum(phase.seconds for key, phase in profile.phases.items() if "/" not in key)
    add("other", max(0.0, profile.seconds - inside))
    add("a step", profile.seconds)
    return table
