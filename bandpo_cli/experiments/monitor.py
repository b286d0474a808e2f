"""Observers of a run: the dispatch of its events, the criteria of `stop`, advice on its steps, and a profiler trace.

A criterion ends a run once its metric was beyond its limit in a number of consecutive steps, and a budget with the step
that reaches it.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandpo_cli.callbacks import Callback, CallbackBase, Info, Report, Result, RunInfo, RunResult, StepReport
from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.task import DataTask
from bandpo_cli.errors import UserError, one_line
from bandpo_cli.metric_names import PROFILER_PREFIX
from bandpo_cli.registries import GRADERS, TEMPLATES
from bandpo_cli.storage.files import step_name

if TYPE_CHECKING:
    from torch.profiler import profile

Record = Mapping[str, Any]

_CRITERIA = {
    "entropy_below": ("train/entropy", " nats"),
    "gap_above": ("sampler/logprob_gap_mean", " nats"),
    "truncation_above": ("train/truncated_fraction", ""),
}
"""The metric of each limit in `stop`, and its unit; the name of the limit ends with the side on which a step counts."""

STEPS_WITHOUT_GRADIENT = 3
"""Steps in a row without a group of different rewards after which a run gives advice."""

_MASKED_SHARES = (
    "sampler/importance_masked_fraction",
    "clip/off_policy_masked_fraction",
    "clip/active_fraction",
    "train/truncated_fraction",
)
"""Metrics that explain why a step has no gradient."""

COMMON = 0.2
"""Share of completions, or of groups with a gradient, that decides whether advice mentions it; the console view flags
truncated and unreadable completions from the same share on."""

_LIVE_ENTROPY = 0.1
"""Nats per token below which a policy is nearly deterministic, so that its entropy may change by any factor."""

_SHORTEST_ANSWER = 256
"""Tokens that advice gives a completion at least: a worked answer to a school problem takes 100 to 300."""

ANSWER_FORMS = {"answer-line": "Answer: {}", "boxed": "\\boxed{{{}}}", "hashes": "#### {}"}
"""Final answers as the templates ask for them."""

_EXCERPT = 160  # characters of a completion that a warning quotes

_CALL = '<tool_call>{"name": ..., "arguments": {...}}</tool_call> (or the form of its response template)'
"""The forms of a call (`sampling.conversations`)."""


class Dispatcher(Callback[Info, Report, Result]):
    """Forward each event to several callbacks, in their order; `end` reaches all of them, also when one raises."""

    def __init__(self, callbacks: Sequence[Callback[Info, Report, Result]]) -> None:
        """Take callbacks; one need not be in a list. Raises UserError for what is no callback."""
        self._callbacks = callbacks if isinstance(callbacks, Sequence) else [callbacks]
        for callback in self._callbacks:
            if isinstance(callback, type) or not hasattr(callback, "phase"):
                raise UserError(f"callbacks: {callback!r:.80} is no object of a subclass of CallbackBase")

    def start(self, info: Info) -> None:
        for callback in self._callbacks:
            callback.start(info)

    def phase(self, name: str) -> None:
        for callback in self._callbacks:
            callback.phase(name)

    def step(self, report: Report) -> None:
        for callback in self._callbacks:
            callback.step(report)

    def end(self, result: Result) -> None:
        with ExitStack() as stack:
            for callback in reversed(self._callbacks):
                stack.callback(callback.end, result)


class StepMonitor:
    """The steps of a run so far, after the lines `records`: warnings about the last one, and the reason to end the run.

    `stop_requested` returns True once the user has asked the run to stop; None where nobody can. `requested` is the
    reason of a callback to end the run after the last step.
    """

    def __init__(
        self, config: RunConfig, records: Iterable[Record], stop_requested: Callable[[], bool] | None = None
    ) -> None:
        self._stop_requested = stop_requested
        self._config, self._recent = config, deque(records, maxlen=max(2, config.stop.steps))
        self._without_gradient, self._warned_of_calls, self._warned_of_masks = 0, False, False
        self._destroyed = ""
        self.requested: str | None = None
        self.reason: str | None = None

    def add(self, report: StepReport) -> list[str]:
        """Add a step, and return the warnings about it, one line each; those that give advice come once."""
        record, sample, steps = report.record, report.sample, self._config.stop.steps
        self._recent.append(record)
        warnings = []
        if not self._destroyed and (cause := destroyed_policy(self._config, [*self._recent][-2:])):
            self._destroyed = cause
            warnings.append(cause)
        if sample is not None and not self._warned_of_calls and _is_without_calls(self._config, record):
            self._warned_of_calls = True
            warnings.append(
                f"no completion of step {report.step} called a tool; one of them: "
                f"'{one_line(sample.text)[:_EXCERPT]}'; try a prompt that shows the model {_CALL}"
            )
        if not self._warned_of_masks and _is_all_masked(record):
            self._warned_of_masks = True
            shares = ", ".join(f"{name} {record[name]:.3g}" for name in _MASKED_SHARES if name in record)
            warnings.append(
                f"no token of step {report.step} has a gradient of the policy loss, although rewards differ "
                f"({shares}); widen the limits of objective.importance, objective.off_policy_mask or the method"
            )
        if sample is not None and self._without_gradient < STEPS_WITHOUT_GRADIENT:
            is_uniform = record["train/uniform_group_fraction"] == 1
            self._without_gradient = self._without_gradient + 1 if is_uniform else 0
            if self._without_gradient == STEPS_WITHOUT_GRADIENT:
                reward = record.get("train/reward")
                mean = f"mean reward {reward:.3g}" if reward is not None else "no completion has a reward"
                warnings.append(
                    f"nothing was learned in the last {STEPS_WITHOUT_GRADIENT} steps: the rewards of every group were "
                    f"equal (last step: {mean}, {100 * record['train/truncated_fraction']:.1f}% truncated, "
                    f"{100 * record['grade/malformed_fraction']:.1f}% without a readable answer); a completion: "
                    f"'{one_line(sample.text)[:_EXCERPT]}'; "
                    + (self._destroyed or f"try: {'; '.join(advice(self._config, record))}")
                )
        return warnings + [
            f"{text}; the run ends after {steps} such steps"
            for count, text in _steps_beyond(self._config, self._recent)
            if count == -(-steps // 2) < steps
        ]

    def is_over(self) -> bool:
        """Return whether the run is to end now: by a criterion or a callback, which sets `reason`, or by a request."""
        self.reason = stop_reason(self._config, self._recent) or self.requested
        return self.reason is not None or (self._stop_requested is not None and self._stop_requested())


def _is_all_masked(record: Record) -> bool:
    """Return whether masks have removed the gradient of all tokens in a step with advantages and no skipped update."""
    has_advantages = record.get("train/uniform_group_fraction", 1.0) < 1
    is_masked = record.get("gradient/zero_fraction", 1.0) == 1
    return has_advantages and is_masked and record.get("optim/skipped_updates") == 0


def stop_reason(config: RunConfig, records: Sequence[Record]) -> str | None:
    """Return the criterion or budget that ends a run after the last of `records`, in one line; None without."""
    if not records or records[-1]["step"] >= config.steps:
        return None
    if reached := config.stop.budget_reached(records[-1]):
        return reached
    counts = _steps_beyond(config, records)
    return next((text for count, text in counts if count >= config.stop.steps), None)


def _steps_beyond(config: RunConfig, records: Sequence[Record]) -> Iterator[tuple[int, str]]:
    """Yield the number of last steps beyond each limit that the last of `records` is beyond, and a description.

    A step that lacks the metric, or in which it is not finite, is not beyond the limit.
    """
    for name, (metric, unit) in _CRITERIA.items():
        limit, side = getattr(config.stop, name), name.rpartition("_")[2]
        if limit is None:
            continue
        sign = -1 if side == "below" else 1
        values = (record.get(metric) for record in reversed(records))
        is_beyond = [value is not None and sign * value > sign * limit for value in values]
        count = [*is_beyond, False].index(False)
        if count:
            steps = "in the last step" if count == 1 else f"in each of the last {count} steps"
            beyond = f"{metric} was {side} it {steps}"
            yield count, f"stop.{name} = {limit:g}: {beyond}, most recently {records[-1][metric]:.3g}{unit}"


def destroyed_policy(config: RunConfig, records: Iterable[Record]) -> str | None:
    """Return which learning rate has destroyed the policy, in which step and by which signs; None if none has.

    The updates of a step change the entropy of the next one: to a tenth, to a third while many more completions are
    truncated, or to that of noise. Signs of the step itself are ratios above 1,000, which means that log-probs changed
    by 7 nats, with many clipped tokens.
    """
    last, before, cut = 0, 0.0, 0.0
    for record in records:
        entropy, truncated = record.get("train/entropy"), record.get("train/truncated_fraction") or 0.0
        clipped, largest = record.get("clip/active_fraction") or 0.0, record.get("ratio/max") or 0.0
        least = before / (3 if truncated > cut + COMMON else 10)
        where = ""
        if (
            entropy is not None
            and before >= _LIVE_ENTROPY
            and not least <= entropy <= max(3 * before, before + 2)
        ):
            where = f"in step {last}, entropy {before:.3f} → {entropy:.3f} nats"
        elif clipped > COMMON and largest > 1000:
            where = f"in step {record['step']}, ratios up to {largest:,.0f}; {clipped:.0%} of the tokens were clipped"
        if where:
            named = {"model": {"path": config.model.path}, "task": config.task.model_dump(mode="json")}
            usual = resolve([named]).optim.lr * (1 if config.model.lora is None else 10)
            rate = f"({config.optim.lr:g}), for example to --lr {min(config.optim.lr / 10, usual):g}"
            return f"lower optim.lr {rate}: the policy was destroyed {where}"
        last, before, cut = record["step"], entropy or 0.0, truncated
    return None


def advice(config: RunConfig, metrics: Mapping[str, float]) -> list[str]:
    """Return the settings to try by the metrics of a step, each with its reason, the most likely cause first."""
    if cause := destroyed_policy(config, [{"step": 1, **metrics}]):
        return [cause]
    truncated, unreadable = metrics["train/truncated_fraction"], metrics["grade/malformed_fraction"]
    useful, accuracy = 1 - metrics["train/uniform_group_fraction"], metrics["train/accuracy"]
    lines = []
    if (ungraded := metrics["train/ungraded_fraction"]) > COMMON:
        late = metrics.get("grade/timeout_fraction", 0.0)
        repair = "a longer grading.deadline, or imports at the top of the file of the grader instead of in its body"
        lines.append(f"{repair if late else 'a repaired grader'}, since {ungraded:.1%} were not graded")
    if truncated > COMMON:
        tokens = max(_SHORTEST_ANSWER, 2 * config.sampling.max_tokens)
        cut = f"{truncated:.1%} of the completions are truncated at {config.sampling.max_tokens:,} tokens"
        lines.append(f"--max-tokens {tokens}, since {cut}")
    if unreadable > COMMON:
        form = "a model that knows the form of the answers, or another --task"
        if isinstance(config.task, DataTask):
            form = _form_advice(config.task)
        lines.append(f"{form}, since {unreadable:.1%} have no readable answer")
    if _is_without_calls(config, metrics):
        lines.append(f"a prompt that shows the model {_CALL}, since no completion called a tool")
    if useful <= COMMON and accuracy > 1 - COMMON:
        lines.append(f"harder problems, since {accuracy:.1%} of the completions are correct")
    elif useful <= COMMON and not lines:
        problems = "problems that the model solves sometimes, or a reward function with partial credit"
        samples = f"--set sampling.samples={2 * config.sampling.samples}"
        lines.append(f"{problems}, or {samples}, since {accuracy:.1%} of the completions are correct")
    if (clipped := metrics.get("clip/active_fraction", 0.0)) > COMMON:
        lines.append(f"--lr {config.optim.lr / 2:g}, since {clipped:.1%} of the tokens are clipped")
    if 0 < useful <= COMMON and not config.sampling.dynamic:
        share = f"only {useful:.1%} of the groups have different rewards"
        lines.append(f"--set sampling.dynamic=true, which samples more groups in a step, since {share}")
    return lines


def _form_advice(task: DataTask) -> str:
    """Return what helps against unreadable answers: a template that asks for their form, unless the task has one."""
    grader = task.answer_grader
    entry = GRADERS.get(grader) if grader is not None else None
    forms = (entry.templates if entry is not None else ()) or tuple(ANSWER_FORMS)
    text = TEMPLATES.get(task.template, task.template)
    if any(re.split("[ {]", ANSWER_FORMS[form])[0] in text for form in forms):
        return "a model that keeps to the form that the prompt asks for, or another --grader"
    return f"--template {forms[0]}, which asks for the form of the answer, or another --grader"


def _is_without_calls(config: RunConfig, metrics: Mapping[str, float]) -> bool:
    """Return whether the task has tools, and no completion of a step called one."""
    return bool(config.task.tools) and metrics.get("conversation/calls") == 0


@dataclass
class PhaseTime:
    """The time of a phase over all traced steps."""

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

    The numbers of the run do not change. The trace is in the format of Chrome's tracing.
    """

    def __init__(self, steps: int) -> None:
        self.trace = (
            Path()
        )  # `profile/step-000002.json.gz` in the run folder, named after the first traced step
        self.steps: list[int] = []  # those that were traced completely
        self.seconds = 0.0  # sum of `time/step` over these steps
        self.phases: dict[
            str, PhaseTime
        ] = {}  # by name, such as `update/backward`, once the trace is written
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
