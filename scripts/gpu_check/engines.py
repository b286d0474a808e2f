"""Checks with optional packages: the vLLM sampler, and the same work by TRL's GRPOTrainer."""

from __future__ import annotations

import math
import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from scripts.gpu_check.grader import SLOW_GRADER, grade
from scripts.gpu_check.results import Measured, Skipped
from scripts.gpu_check.training import (
    free_memory,
    is_missing,
    measured_run,
    memory_limits,
    step_limits,
    train_steps,
)
from scripts.gpu_check.work import RandomProblems, Work

if TYPE_CHECKING:
    from bandpo_cli.callbacks import StepReport
    from bandpo_cli.training.build import Components

SYNCS = 5
"""Number of syncs that the check of vLLM measures, the first load of the weights not counted."""
MEMORY_FRACTION = 0.3
MIN_FREED = 0.8
"""Smallest share of the engine's memory that sleeping frees."""
MAX_TIME_OVER_TRL = 1.0
"""Largest time of a step over that of TRL. An H100 missed it (1.06), with transformers' generate as 86% of the step."""


def check_vllm(work: Work) -> Measured:
    """Train with vLLM as the sampler: model runner, sleep and wake, CUDA graphs, memory, and the gaps of five syncs."""
    from bandpo_cli.experiments.memory_check import memory_report

    sampling = _vllm_settings(work)
    found: dict[str, Any] = {}
    gaps: list[float] = []

    def observe(components: Components, report: StepReport | None) -> None:
        sampler: Any = components.sampler
        if report is None:
            found.update(_engine_values(sampler))
            found["freed_by_sleep_gib"], found["wake_and_sync_s"] = _sleep_and_wake(components)
            gaps.append(sampler.check.gap)
            found["sync_s"], found["checked_sync_s"] = _sync_seconds(components)
            gaps.append(sampler.check.gap)
        else:
            gaps.append(sampler.check.gap)

    config = work.config("0.5b", sampling=sampling)
    run = train_steps(work, config, "vllm", observe)
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
        measured.add(memory_limits(run.peak_gib, memory_report(config).peak / 2**30))
    return measured


def _vllm_settings(work: Work) -> dict[str, Any]:
    """Return the settings of sampling with vLLM. Raise Skipped where it is not installed."""
    if is_missing("vllm"):
        raise Skipped("vllm is not installed")
    from bandpo_cli.config.sampling import VllmConfig

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


def check_trl(work: Work) -> Measured:
    """Compare the time of a step with two steps of TRL's GRPOTrainer on the same work, both with built-in samplers."""
    if is_missing("trl"):
        raise Skipped("trl is not installed")
    ours = measured_run(work, "0.5b")
    if work.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = _trl_seconds(work)
    peak = torch.cuda.max_memory_allocated() / 2**30 if work.on_gpu else 0.0
    free_memory()
    measured = Measured({"bandpo_s": ours.mean("time/step"), "trl_s": seconds})
    measured.values["time_over_trl"] = measured.values["bandpo_s"] / seconds
    if work.on_gpu:
        measured.values |= {"bandpo_peak_gib": ours.peak_gib, "trl_peak_gib": peak}
    if not work.tiny:
        measured.at_most("time_over_trl", MAX_TIME_OVER_TRL)
    return measured


def _trl_seconds(work: Work) -> float:
    """Train two batches and return the seconds of the second: as many completions, tokens and updates as here."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    size, config = work.size, work.config("0.5b")
    updates = config.optim.updates
    problems = RandomProblems(size).train_problems()
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % updates == 0:
                if work.on_gpu:
                    torch.cuda.synchronize()
                times.append(time.perf_counter())

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [float(grade(text, "", {})) for text in completions]

    completions = size.prompts * size.samples // updates
    micro = max(1, size.micro_batch_tokens // (size.prompt_chars + size.max_tokens))
    micro = max(item for item in range(1, min(micro, completions) + 1) if completions % item == 0)
    trainer = GRPOTrainer(
        model=str(work.model("0.5b")),
        reward_funcs=[reward],
        train_dataset=Dataset.from_list([{"prompt": problem.prompt} for problem in problems]),
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=str(work.folder / "trl"),
            use_cpu=not work.on_gpu,
            bf16=True,
            max_steps=2 * updates,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=completions // micro,
            steps_per_generation=updates * completions // micro,
            gradient_checkpointing=False,
            num_generations=size.samples,
            max_completion_length=size.max_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            loss_type="grpo",
            learning_rate=config.optim.lr,
            logging_steps=10**6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
    )
    trainer.train()
    seconds = [later - earlier for earlier, later in pairwise(times)]
    return statistics.fmean(seconds[1:])
