"""Checks of the vLLM sampler."""

from __future__ import annotations

import math
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from scripts.gpu_check.grader import SLOW_GRADER
from scripts.gpu_check.results import Measured, Skipped
from scripts.gpu_check.throughput import SEQUENCES, decode_values
from scripts.gpu_check.training import TrainedRun, is_missing, memory_limits, step_limits, train_steps
from scripts.gpu_check.work import Work

if TYPE_CHECKING:
    from bandpo_cli.callbacks import StepReport
    from bandpo_cli.config.run import RunConfig
    from bandpo_cli.training.build import Components

SYNCS = 5
"""Number of syncs that the check of vLLM measures, the first load of the weights not counted."""
MEMORY_FRACTION = 0.3
MIN_FREED = 0.8
"""Smallest share of the engine's memory that sleeping frees."""


@cache
def vllm_run(work: Work) -> tuple[TrainedRun, dict[str, Any], dict[str, float], list[float]]:
    """Return the run that two checks look at, the values and decoding steps of its engine, and the gap of each sync."""
    found: dict[str, Any] = {}
    decoding: dict[str, float] = {}
    gaps: list[float] = []

    def observe(components: Components, report: StepReport | None) -> None:
        sampler: Any = components.sampler
        if report is None:
            found.update(_engine_values(sampler))
            decoding.update(decode_values(work, sampler))
            found["freed_by_sleep_gib"], found["wake_and_sync_s"] = _sleep_and_wake(components)
            gaps.append(sampler.check.gap)
            found["sync_s"], found["checked_sync_s"] = _sync_seconds(components)
        gaps.append(sampler.check.gap)

    return train_steps(work, vllm_config(work), "vllm", observe), found, decoding, gaps


def vllm_config(work: Work) -> RunConfig:
    """Return the settings of the run, with an engine that takes all sequences of `decode_values`."""
    return work.config("0.5b", sampling=_vllm_settings(work) | {"max_sequences": max(SEQUENCES)})


def check_decode(work: Work) -> Measured:
    """Time vLLM's decoding steps by the number of sequences."""
    return Measured({**vllm_run(work)[2]})


def check_vllm(work: Work) -> Measured:
    """Train with vLLM as the sampler: model runner, sleep and wake, CUDA graphs, memory, and the gaps of five syncs."""
    from bandpo_cli.experiments.memory_check import memory_report

    run, found, _, gaps = vllm_run(work)
    measured = step_limits(work, run)
    measured.values |= found | {"syncs": len(gaps), "sync_gap_max": max(gaps), "sync_gaps": _listed(gaps)}
    measured.at_least("syncs", SYNCS)
    if not all(math.isfinite(gap) for gap in gaps):
        measured.shortfalls.append("a sync did not measure the gap of log-probs")
    if work.on_gpu:
        total = torch.cuda.get_device_properties(work.device).total_memory / 2**30
        measured.at_least("freed_by_sleep_gib", MIN_FREED * MEMORY_FRACTION * total)
        measured.values["cuda_graphs"] = found["cudagraph_mode"] != "NONE"
        measured.equal("cuda_graphs", True)
        measured.add(memory_limits(run.peak_gib, memory_report(vllm_config(work)).peak / 2**30))
    return measured


def _vllm_settings(work: Work) -> dict[str, Any]:
    """Return the settings of sampling with vLLM. Raise Skipped where it is not installed."""
    if is_missing("vllm"):
        raise Skipped("vllm is not installed")
    from bandpo_cli.config.batch_and_sampling import VllmConfig

    settings = {"memory_fraction": MEMORY_FRACTION} if work.on_gpu else {"kv_cache_gb": 0.1, "eager": True}
    return {"engine": "vllm", "vllm": VllmConfig(**settings)}


def check_early_grades(work: Work) -> Measured:
    """Train with vLLM and a grader that takes `SLOW_S` per answer, graded after and during sampling.

    A quarter of the completions is sampled at a time: random weights end no completion early, so that all would end in
    the same step.
    """
    measured, rewards = Measured(), []
    at_a_time = {"max_sequences": work.size.prompts * work.size.samples // 4}
    for early in (False, True):
        config = work.config(
            "0.5b",
            sampling=_vllm_settings(work) | at_a_time,
            grading={"while_sampling": early, "batch": work.size.samples},
        )
        run = train_steps(work, config, f"early-grades-{early}", grader=SLOW_GRADER)
        name = "during" if early else "after"
        measured.values[f"graded_{name}_s"] = run.mean("time/sample") + run.mean("time/grade")
        rewards.append([record["train/reward"] for record in run.records])
    measured.values["rewards_equal"] = rewards[0] == rewards[1]
    if not work.on_gpu:
        measured.equal("rewards_equal", True)
    return measured


def _listed(gaps: list[float]) -> str:
    return " ".join(f"{gap:.2g}" for gap in gaps)


def _engine_values(sampler: Any) -> dict[str, Any]:
    """Return vLLM's version, the class that runs the model, and the engine's mode of CUDA graphs."""
    described = sampler.describe()
    config = sampler._llm.llm_engine.vllm_config
    mode = config.compilation_config.cudagraph_mode
    return {
        "vllm": described["version"],
        "model_runner": described["model_runner"],
        "cudagraph_mode": getattr(mode, "name", str(mode)),
    }


def _sleep_and_wake(components: Components) -> tuple[float, float]:
    """Return the GiB that sleeping frees, and the seconds until the engine runs the weights again."""
    before = _used_gib()
    components.sampler.sleep()
    freed = before - _used_gib()
    begin = time.perf_counter()
    components.sampler.sync(components.policy.model, 0)
    return freed, time.perf_counter() - begin


def _sync_seconds(components: Components) -> tuple[float, float]:
    """Return the seconds of a sync that checks the version alone, and of one that is checked completely."""
    sampler: Any = components.sampler
    seconds = []
    for until_check in (1, 0):
        sampler.check._remaining = until_check
        begin = time.perf_counter()
        sampler.sync(components.policy.model, 0)
        seconds.append(time.perf_counter() - begin)
    return seconds[0], seconds[1]


def _used_gib() -> float:
    """Return the memory in use on the device by all processes, GiB; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30
