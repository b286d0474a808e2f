"""Checks of training: a step by phase, peak memory against the estimate, checkpoint and resume."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pandas
import torch

from scripts.gpu_check.grader import GRADER
from scripts.gpu_check.results import Measured, Skipped
from scripts.gpu_check.work import RandomProblems, Work

if TYPE_CHECKING:
    from bandpo_cli.callbacks import StepReport
    from bandpo_cli.config.run import RunConfig
    from bandpo_cli.processes.ranks import Ranks
    from bandpo_cli.training.build import Components

LAST_STEP = 3
"""Last step that is trained; the first one is not timed."""
MAX_LOGPROB_GAP = 0.05
"""Largest mean difference between the log-probs of sampler and trainer, nats. In bfloat16 on a CPU it is 0.005."""
MIN_UTILISATION = 0.1
"""Smallest model FLOP utilisation of the updates of a card with a known peak; an H100 had 11% (0.5B) and 22% (1.5B)."""
MIN_EQUAL_COMPLETIONS = 0.95
"""Smallest share of completions that the engine process samples as the trainer's process does, on a GPU."""
MAX_OVER_ESTIMATE = 1.05
"""Largest measured peak memory over the estimate of `--dry-run`."""


@dataclass
class TrainedRun:
    """The result of some steps.

    Attributes:
        records: the lines of metrics.jsonl.
        peak_gib: peak of the memory that PyTorch allocated, GiB; 0 without a GPU.
    """

    folder: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    peak_gib: float = 0.0

    def mean(self, key: str) -> float:
        """Return the mean of a metric over the steps after the first, NaN where they do not have it."""
        values = [record[key] for record in self.records[1:] if record.get(key) is not None]
        return statistics.fmean(values) if values else math.nan

    def texts(self, step: int) -> list[tuple[str, str]]:
        """Return the problem and the text of each completion of a step."""
        table = pandas.read_parquet(self.folder / "samples" / f"step-{step:06d}.parquet")
        return [*zip(table["problem_id"], table["text"], strict=True)]


Observer = Callable[["Components", "StepReport | None"], object]
"""Called before the first step with None, and after each step."""


def train_steps(
    work: Work,
    config: RunConfig,
    name: str,
    observe: Observer = lambda *_: None,
    checkpoint: Path | None = None,
    ranks: Ranks | None = None,
    grader: str = GRADER,
    last: int = LAST_STEP,
) -> TrainedRun:
    """Train from the beginning or from a checkpoint up to step `last`, on the path of `bandpo train`.

    Args:
        ranks: the processes that train together; None for this process alone.
    """
    from bandpo_cli.processes.ranks import SINGLE
    from bandpo_cli.storage.run_folder import RunFolder
    from bandpo_cli.training.build import build_components
    from bandpo_cli.training.loop import train

    ranks = ranks or SINGLE
    folder = RunFolder.create(work.folder, name) if ranks.is_main else RunFolder(work.folder / name)
    run = TrainedRun(folder.path)

    free_memory()
    if work.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    components = build_components(config, RandomProblems(work.size, grader), ranks)
    try:
        first = 0
        if checkpoint is not None:
            first = components.resume_from(checkpoint).step + 1
        observe(components, None)
        steps = train(config, components, folder, first=first)
        with closing(steps):
            for report in steps:
                run.records.append(report.record)
                observe(components, report)
                if report.step == last:
                    break
    finally:
        components.close()
        del components
        free_memory()
    run.peak_gib = max(record.get("perf/peak_memory_gib", 0.0) for record in run.records)
    return run


def free_memory() -> None:
    """Free what earlier work has left on the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@cache
def measured_run(work: Work, shape: str) -> TrainedRun:
    """Return the run of the built-in sampler that two checks look at."""
    return train_steps(work, work.config(shape), f"step-{shape}")


@cache
def short_run(work: Work) -> TrainedRun:
    """Return the run of `short_config`, whose time two checks compare with."""
    return train_steps(work, short_config(work), "short")


def short_config(
    work: Work, sampling: Mapping[str, Any] = MappingProxyType({}), **sections: Any
) -> RunConfig:
    """Return the settings of a run with short completions."""
    return work.config("0.5b", sampling={"max_tokens": work.size.short_tokens, **sampling}, **sections)


def phase_values(run: TrainedRun) -> dict[str, Any]:
    """Return seconds per step and phase, throughput and memory, means of the steps after the first."""
    keys = [key for key in run.records[-1] if key.startswith(("time/", "perf/"))]
    values = {key: run.mean(key) for key in keys if key != "time/checkpoint"}
    return values | {"sampler/logprob_gap_mean": run.mean("sampler/logprob_gap_mean")}


def check_step(work: Work, shape: str) -> Measured:
    """Train with the built-in sampler and report the time of each phase."""
    return step_limits(work, measured_run(work, shape))


def step_limits(work: Work, run: TrainedRun) -> Measured:
    """Return the times of a run, with the limits that hold for all engines."""
    measured = Measured(phase_values(run))
    measured.at_most("sampler/logprob_gap_mean", MAX_LOGPROB_GAP)
    losses = [record.get("optim/loss") for record in run.records]
    norms = [record.get("optim/grad_norm") for record in run.records]
    measured.values["finite_updates"] = all(
        value is not None and math.isfinite(value) for value in [*losses, *norms]
    )
    measured.equal("finite_updates", True)
    measured.values["grad_norm"] = run.mean("optim/grad_norm")
    measured.at_least("grad_norm", 1e-12)
    if "perf/model_flop_utilisation" in measured.values and not work.tiny:
        measured.at_least("perf/model_flop_utilisation", MIN_UTILISATION)
    return measured


def check_memory(work: Work, shape: str) -> Measured:
    """Compare the peak memory of the run of `check_step` with the estimate of `--dry-run`."""
    from bandpo_cli.experiments.memory_check import memory_report

    estimate = memory_report(work.config(shape)).peak / 2**30
    if not work.on_gpu:
        raise Skipped(f"the estimate is {estimate:.3g} GiB; the peak is measured on a GPU only")
    return memory_limits(measured_run(work, shape).peak_gib, estimate)


def memory_limits(peak_gib: float, estimate_gib: float) -> Measured:
    """Require the estimate to be an upper limit of the peak."""
    measured = Measured({"peak_gib": peak_gib, "estimate_gib": estimate_gib})
    measured.values["peak_over_estimate"] = peak_gib / estimate_gib
    measured.at_least("peak_gib", 1e-9)
    measured.at_most("peak_over_estimate", MAX_OVER_ESTIMATE)
    return measured


def check_resume(work: Work) -> Measured:
    """Compare the state after a resume with the state that was saved, and the next step with the uninterrupted one.

    On a CPU all numbers are equal. On a GPU the backward pass adds in an order that changes from call to call, so that
    only the state and the completions that are sampled from it are equal.
    """
    config = short_config(work, checkpoint={"every": 2, "keep_best": 0})
    states: dict[str, Mapping[str, int]] = {}

    def note(name: str) -> Observer:
        def observe(components: Components, report: StepReport | None) -> None:
            step = 2 if report is None else report.step
            if step >= 2:
                states[f"{name}-{step}"] = fingerprints(components)

        return observe

    saved = train_steps(work, config, "resume-saved", note("saved"))
    checkpoint = saved.folder / "checkpoints" / "step-000002"
    resumed = train_steps(work, config, "resume-again", note("resumed"), checkpoint)
    measured = Measured(
        {
            "state_equal": states["saved-2"] == states["resumed-2"],
            "completions_equal": saved.texts(3) == resumed.texts(3),
            "next_state_equal": states["saved-3"] == states["resumed-3"],
            "metrics_difference": largest_difference(saved.records[-1], resumed.records[-1]),
            "checkpoint_s": sum(record.get("time/checkpoint", 0.0) for record in saved.records),
        }
    )
    measured.equal("state_equal", True)
    measured.equal("completions_equal", True)
    if work.on_gpu:
        measured.at_most("metrics_difference", 0.05)
    else:
        measured.equal("next_state_equal", True)
        measured.at_most("metrics_difference", 0.0)
    return measured


def check_deterministic(work: Work) -> Measured:
    """Train twice with deterministic kernels, and compare all bits after each step; report what the kernels cost.

    The engine is the built-in sampler. On a CPU the states also equal those of ordinary kernels.
    """
    from bandpo_cli.models.load import deterministic_kernels

    states: dict[str, list[Mapping[str, int]]] = {}
    runs: dict[str, TrainedRun] = {}
    for name in ("first", "second") if work.on_gpu else ("first", "second", "ordinary"):
        kept = states.setdefault(name, [])
        config = short_config(work)
        config = config.model_copy(update={"deterministic": name != "ordinary"})

        def keep(components: Components, _: StepReport | None, kept: list[Any] = kept) -> None:
            kept.append(fingerprints(components))

        with deterministic_kernels(config) if config.deterministic else nullcontext():
            runs[name] = train_steps(work, config, f"deterministic-{name}", keep)
    measured = Measured({"states_equal": all(states[name] == states["first"] for name in states)})
    measured.values["metrics_difference"] = max(
        largest_difference(one, other)
        for one, other in zip(runs["first"].records, runs["second"].records, strict=True)
    )
    measured.values["completions_equal"] = all(
        runs[name].texts(step) == runs["first"].texts(step)
        for name in runs
        for step in range(1, LAST_STEP + 1)
    )
    ordinary = short_run(work).mean("time/step")
    measured.values["time_over_ordinary"] = runs["second"].mean("time/step") / ordinary
    for name in ("states_equal", "completions_equal"):
        measured.equal(name, True)
    measured.at_most("metrics_difference", 0.0)
    return measured


def fingerprints(components: Components) -> dict[str, int]:
    """Return a number per tensor of the weights and of the optimizer's state that any changed bit changes."""
    from bandpo_cli.sampling.vllm_worker import fingerprint

    tensors = {f"model.{name}": tensor for name, tensor in components.policy.model.state_dict().items()}
    tensors |= {f"optimizer.{name}": tensor for name, tensor in components.optimizer.state().items()}
    numbers = {
        name: int(fingerprint(tensor.reshape(-1), (tensor.numel(),))) for name, tensor in tensors.items()
    }
    return numbers | {"position": components.stream.position, "update": components.optimizer.update}


def check_ahead(work: Work) -> Measured:
    """Train with rollouts sampled one step ahead by the built-in sampler in a process of its own.

    The times are reported beside those of the same steps without a lag; with two GPUs the process has its own.
    """
    run = train_steps(work, short_config(work, sampling={"max_lag": 1}), "ahead")
    before = short_run(work)
    measured = Measured(phase_values(run))
    measured.values["lags"] = " ".join(f"{record['sampler/lag']:g}" for record in run.records)
    updates = work.config("0.5b").optim.updates
    measured.equal("lags", f"0 {updates} {updates}")
    pairs = [*zip(run.texts(1), before.texts(1), strict=True)]
    measured.values["first_completions_equal"] = sum(one == other for one, other in pairs) / len(pairs)
    measured.at_least("first_completions_equal", MIN_EQUAL_COMPLETIONS if work.on_gpu else 1.0)
    measured.values["time_over_no_lag"] = run.mean("time/step") / before.mean("time/step")
    return measured


def check_engine_weights(work: Work) -> Measured:
    """Measure weight syncs with an engine process, through memory of the host and, on a GPU, of the GPU.

    The engine is the built-in sampler; its completions after a sync must not depend on the path of the weights.
    """
    from bandpo_cli.models.load import load_policy
    from bandpo_cli.sampling.engine_process import EngineProcess
    from bandpo_cli.sampling.sampler import SamplingParams

    policy = load_policy(work.config("1.5b").model)
    gigabytes = policy.model.num_parameters() * policy.dtype.itemsize / 1e9
    params = SamplingParams(samples=4, temperature=1.0, max_tokens=32, stop_ids=())
    measured, sampled = Measured({"gigabytes": gigabytes}), []
    if not work.on_gpu:
        measured.values["cuda-ipc_left_out"] = "it needs a GPU"
    for path in ("host", "cuda-ipc") if work.on_gpu else ("host",):
        config = work.config("1.5b", sampling={"max_lag": 1, "weight_transfer": path})
        with closing(EngineProcess(config, policy)) as engine:
            seconds = []
            for version in range(1, 4):
                begin = time.perf_counter()
                engine.sync(policy.model, version)
                seconds.append(time.perf_counter() - begin)
            sampled.append(engine.sample([(5, 6, 7)], params, 0))
        measured.values[f"{path}_gb_per_s"] = gigabytes / statistics.median(seconds)
    measured.values["completions_equal"] = all(item == sampled[0] for item in sampled)
    measured.equal("completions_equal", True)
    return measured


def largest_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the largest difference of two lines; infinite if their keys differ.

    Without the clock, and without the totals of a run: those of a resume in another folder begin anew.
    """
    from bandpo_cli.metric_names import without_clock

    lines = (without_clock(line).items() for line in (one, other))
    left, right = ({key: item for key, item in line if not key.startswith("compute/")} for line in lines)
    if left.keys() != right.keys():
        return math.inf
    return max(difference(left[key], right[key]) for key in left if left[key] is not None)


def difference(one: float, other: float) -> float:
    """Return the difference, of values larger than 1 relative to them: a loss is a sum that is almost 0."""
    return abs(one - other) / max(1.0, abs(one), abs(other))


def is_missing(package: str) -> bool:
    """Return whether a package is not installed."""
    return find_spec(package) is None
