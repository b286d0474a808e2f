"""Profiler trace of the steps of a training run, and the time of each phase in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandpo_cli.callbacks import CallbackBase, RunInfo, RunResult, StepReport
from bandpo_cli.errors import UserError
from bandpo_cli.metric_names import PROFILER_PREFIX
from bandpo_cli.storage.files import step_name

if TYPE_CHECKING:
    from torch.profiler import profile


@dataclass
class PhaseTime:
    """The time of a phase over all traced steps.

    Attributes:
        gpu_seconds: time of the kernels that it launched; 0 without a GPU.
        calls: number of times that it began.
    """

    seconds: float = 0.0
    gpu_seconds: float = 0.0
    calls: int = 0


def check_profile_steps(steps: int, first_step: int, last_step: int) -> None:
    """Raise UserError if a run from step `first_step` to `last_step` is too short to trace `steps` after its first."""
    count = last_step - max(1, first_step) + 1
    if not 1 <= steps < count:
        allowed = f"give 1 to {count - 1} or more --steps"
        raise UserError(f"--profile {steps}: the first step is not traced; {allowed}")


class ProfileCallback(CallbackBase):
    """Traces some steps with torch's profiler, after the first one, which compiles kernels and allocates memory.

    The numbers of the run do not change.

    Attributes:
        trace: `profile/step-000002.json.gz` in the run folder, named after the first traced step; in the format of
            Chrome's tracing.
        steps: the steps that were traced completely.
        seconds: sum of `time/step` over these steps.
        phases: by name, once the trace is written; `update/backward` is the part `backward` of the phase `update`.
    """

    def __init__(self, steps: int) -> None:
        self.trace, self.seconds = Path(), 0.0
        self.steps: list[int] = []
        self.phases: dict[str, PhaseTime] = {}
        self._wanted = steps
        self._profiler: profile | None = None

    def start(self, info: RunInfo) -> None:
        self.trace = info.folder / "profile"

    def step(self, report: StepReport) -> None:
        """Start the profiler after the first step, and write the trace after the last traced one."""
        if report.step == 0 or self.phases:
            return
        if self._profiler is None:
            import torch
            from torch.profiler import ProfilerActivity, profile

            # Otherwise it writes to standard error, into the live view.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._profiler.start()
            return
        self.steps.append(report.step)
        self.seconds += report.record["time/step"]
        if len(self.steps) == self._wanted:
            self._finish()

    def end(self, result: RunResult) -> None:
        if self._profiler is not None:
            self._finish()

    def _finish(self) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        if self.steps:
            self.trace.mkdir(exist_ok=True)
            self.trace /= f"{step_name(self.steps[0])}.json.gz"
            self._profiler.export_chrome_trace(str(self.trace))
            self.phases = phase_times(self._profiler)
        self._profiler = None


def phase_times(profiler: profile) -> dict[str, PhaseTime]:
    """Return the time per phase in a stopped profiler; the phases are in the order in which they first began."""
    times: dict[str, PhaseTime] = {}
    recorded: list[Any] = profiler.events() or []  # type: ignore[no-untyped-call]
    labels = [event for event in recorded if event.name.startswith(PROFILER_PREFIX)]
    for event in sorted(labels, key=lambda event: event.time_range.start):
        if event.device_type.name != "CPU":  # the same label again, on the line of the GPU
            continue
        names: list[str] = []  # of the phase, after the phases that it is part of
        part = event
        while part is not None:
            if part.name.startswith(PROFILER_PREFIX):
                names.insert(0, part.name.removeprefix(PROFILER_PREFIX))
            part = part.cpu_parent
        phase = times.setdefault("/".join(names), PhaseTime())
        phase.seconds += event.time_range.elapsed_us() / 1e6
        phase.gpu_seconds += event.device_time_total / 1e6
        phase.calls += 1
    return times
