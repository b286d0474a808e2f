"""Comparisons with TRL's GRPOTrainer on equal work: with the built-in samplers, and with vLLM on both sides.

With vLLM each side is a process, because a process can start only one engine with sleep. They train alternately
(bandpo, TRL, bandpo), so that a drift of the card's clock shows. Where there is room, both stay on the card, and the
side that waits has emptied its cache; else a side starts anew for each block.
"""

from __future__ import annotations

import math
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from scripts.gpu_check.grader import grade
from scripts.gpu_check.kernels import SMALL_CARD_BYTES
from scripts.gpu_check.results import Measured, Skipped
from scripts.gpu_check.training import free_memory, is_missing, measured_run, train_steps
from scripts.gpu_check.work import RandomProblems, Size, Work

if TYPE_CHECKING:
    from bandpo_cli.callbacks import StepReport
    from bandpo_cli.training.build import Components

MAX_TIME_OVER_TRL = 1.0
"""Largest time of a step over that of TRL. An H100 missed it (1.06), with transformers' generate as 86% of the step."""
ORDER = ("bandpo", "trl", "bandpo")
"""The sides of the race, block by block."""
STEPS = 4
"""Steps of a block; the first one, in which the caches fill again, is not counted."""
MEMORY_FRACTION = 0.2
"""Share of the card that each engine takes."""
END_S = 30.0
"""Seconds in which a side ends after its last step."""


@dataclass(frozen=True)
class RaceWork(Work):
    """The work of the race: 32 prompts × 8 completions × 256 tokens per step."""

    micro_batch_tokens: int = 16_384

    @property
    def size(self) -> Size:
        """Amounts of work."""
        size = super().size
        return size if self.tiny else replace(size, prompts=32, micro_batch_tokens=self.micro_batch_tokens)


class Lane:
    """The end of the pipe in the process of one side: it trains as many steps as it is asked for, and waits."""

    def __init__(self, pipe: Connection, on_gpu: bool) -> None:
        self._pipe, self._on_gpu = pipe, on_gpu
        self._seconds: list[float] = []
        self._phases: list[dict[str, float]] = []
        self._begin = 0.0

    def wait(self, answer: object = None) -> None:
        """Send an answer and wait for the next request."""
        if answer is not None:
            free_memory()
            self._pipe.send(answer)
        self._pipe.recv()
        self._begin = time.perf_counter()

    def end_step(self, phases: dict[str, float]) -> None:
        """Note the end of a step; after a block send its steps and wait, so that no side ends during a block."""
        if self._on_gpu:
            torch.cuda.synchronize()
        self._seconds.append(time.perf_counter() - self._begin)
        self._phases.append(phases)
        self._begin = time.perf_counter()
        if len(self._seconds) == STEPS:
            reserved = torch.cuda.max_memory_reserved() / 2**30 if self._on_gpu else 0.0
            block = {"seconds": self._seconds[1:], "phases": self._phases[1:], "reserved_gib": reserved}
            self._seconds, self._phases = [], []
            self.wait(block)


def run_bandpo(work: Work, shape: str, lane: Lane, blocks: int) -> None:
    """Train the blocks with bandpo."""
    from bandpo_cli.config.batch_and_sampling import VllmConfig

    last, on_cpu = STEPS * blocks, {"kv_cache_gb": 0.1, "eager": True}
    vllm = VllmConfig(**{"memory_fraction": MEMORY_FRACTION, "sleep": True} if work.on_gpu else on_cpu)
    sequences = work.size.prompts * work.size.samples
    sampling = {"engine": "vllm", "max_sequences": sequences, "vllm": vllm}
    config = work.config(shape, sampling=sampling, model={"gradient_checkpointing": False})
    config = config.model_copy(update={"steps": last + 1})  # a checkpoint follows the last step of a run

    def observe(components: Components, report: StepReport | None) -> None:
        if report is None:
            lane.wait("ready")
        else:
            lane.end_step({name: report.record[f"time/{name}"] for name in PHASES["bandpo"]})

    lane.wait()
    train_steps(work, config, f"race-{os.getpid()}", observe, last=last)


def run_trl(work: Work, shape: str, lane: Lane, blocks: int) -> None:
    """Train the blocks with TRL; the engine is vLLM where it is installed."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from trl.generation import vllm_generation  # imports vLLM while the other side starts

    with_vllm = not is_missing("vllm")
    if with_vllm and not work.on_gpu:  # which would compile for minutes
        vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True)
    size, phases = work.size, dict.fromkeys(PHASES["trl"], 0.0)
    lane.wait()

    def end_step() -> None:
        lane.end_step({**phases})
        phases.update(dict.fromkeys(phases, 0.0))

    settings = {
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"}, "shuffle_dataset": False,
        "use_vllm": with_vllm, "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": MEMORY_FRACTION, "vllm_enable_sleep_mode": work.on_gpu,
        "vllm_max_model_length": size.prompt_chars + 24 + size.max_tokens,
        "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0,
    }  # fmt: skip
    trainer = grpo_trainer(work, shape, STEPS * blocks, end_step, **settings)
    if with_vllm:
        generation = trainer.vllm_generation
        if not work.on_gpu:  # vLLM packs the weights on a CPU, and loads other ones by its worker only
            load = partial(generation.llm.collective_rpc, "reload_weights")
            generation.sync_weights = lambda: load(
                kwargs={"weights_iterator": generation._iter_named_params()}
            )
        for name in phases:
            _add_time(generation, name, phases, work.on_gpu)
    lane.wait("ready")
    trainer.train()


SIDES: dict[str, Callable[[Work, str, Lane, int], None]] = {"bandpo": run_bandpo, "trl": run_trl}
PHASES = {"bandpo": ("sample", "logprobs", "update", "record", "sync"), "trl": ("generate", "sync_weights")}
"""Phases of a step that are measured; of TRL those of its vLLM."""


def _add_time(item: Any, name: str, seconds: dict[str, float], on_gpu: bool) -> None:
    """Replace a method by one that adds its time."""
    plain = getattr(item, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begin, result = time.perf_counter(), plain(*args, **kwargs)
        if on_gpu:
            torch.cuda.synchronize()
        seconds[name] += time.perf_counter() - begin
        return result

    setattr(item, name, call)


def run_side(side: str, work: Work, shape: str, blocks: int, pipe: Connection) -> None:
    """Train one side of the race; the entry of its process. An error is sent to the parent."""
    os.dup2(2, 1)  # vLLM prints to the standard output, which has the table
    try:
        SIDES[side](work, shape, Lane(pipe, work.on_gpu), blocks)
    except Exception as error:
        traceback.print_exc()
        pipe.send({"error": f"{type(error).__name__}: {error}"})
        raise


class Side:
    """The process of one side."""

    def __init__(self, side: str, work: Work, shape: str, blocks: int) -> None:
        self.name, context = side, get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run_side, args=(side, work, shape, blocks, theirs))
        self._process.start()
        theirs.close()

    def call(self) -> Any:
        """Let the side start its engine, or train its next block, and return its answer."""
        try:
            self._pipe.send(None)
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(END_S)
            raise RuntimeError(f"{self.name} ended with exit code {self._process.exitcode}") from None
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process, which may still be at work after an error."""
        self._process.terminate()
        self._process.join(END_S)
        self._process.kill()

    def finish(self) -> None:
        """Let the process end, and wait for it."""
        self._pipe.send(None)
        self._process.join(END_S)


def check_race(work: Work, shape: str = "0.5b") -> Measured:
    """Compare the time of a step with TRL's, both with vLLM in the trainer's process, float32 masters and sleep."""
    for package in ("trl", "vllm"):
        if is_missing(package):
            raise Skipped(f"{package} is not installed")
    small = work.on_gpu and torch.cuda.get_device_properties(work.device).total_memory < SMALL_CARD_BYTES
    together = shape == "0.5b" and not small
    micro_batch_tokens = 4096 if small else 16_384 if together else 8192
    race = RaceWork(work.device, work.tiny, work.folder, micro_batch_tokens)
    race.model(shape)
    blocks: list[tuple[str, dict[str, Any]]] = []
    for part in [ORDER] if together else [(name,) for name in ORDER]:
        with ExitStack() as stack:
            sides = {name: Side(name, race, shape, part.count(name)) for name in dict.fromkeys(part)}
            for side in sides.values():
                stack.enter_context(closing(side))
            for side in sides.values():  # one after another: an engine measures the memory that is free
                side.call()
            blocks += [(name, sides[name].call()) for name in part]
            for side in sides.values():
                side.finish()
    measured = Measured(race_values(blocks))
    tokens = race.size.prompts * race.size.samples * race.size.max_tokens
    measured.values["bandpo_tokens_per_s"] = tokens / measured.values["bandpo_s"]
    if not work.tiny:
        measured.at_most("time_over_trl", MAX_TIME_OVER_TRL)
    return measured


def race_values(blocks: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the seconds per step of both sides, their ratio with its spread, phases and memory.

    The spread is from the fastest step of bandpo over the slowest one of TRL to the slowest over the fastest.
    """
    seconds = {
        name: [s for side, block in blocks if side == name for s in block["seconds"]] for name in SIDES
    }
    values: dict[str, Any] = {f"{name}_s": statistics.median(steps) for name, steps in seconds.items()}
    ours, theirs = seconds["bandpo"], seconds["trl"]
    values["time_over_trl"] = values["bandpo_s"] / values["trl_s"]
    values["time_over_trl_low"] = min(ours) / max(theirs)
    values["time_over_trl_high"] = max(ours) / min(theirs)
    for name in SIDES:
        of_side = [block for side, block in blocks if side == name]
        steps = [" ".join(f"{s:.3f}" for s in block["seconds"]) for block in of_side]
        values[f"{name}_steps_s"] = " | ".join(steps)
        phases = [step for block in of_side for step in block["phases"]]
        values |= {f"{name}_{key}_s": statistics.fmean(step[key] for step in phases) for key in PHASES[name]}
        if reserved := max(block["reserved_gib"] for block in of_side):
            values[f"{name}_reserved_gib"] = reserved
    return values


def check_trl(work: Work) -> Measured:
    """Compare the time of a step with two steps of TRL's GRPOTrainer on the same work, both with built-in samplers."""
    if is_missing("trl"):
        raise Skipped("trl is not installed")
    if not is_missing("vllm"):
        raise Skipped("trl-vllm compares both with vLLM")
    ours = measured_run(work, "0.5b")
    if work.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = [math.nan]

    def end_step() -> None:
        if work.on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    grpo_trainer(work, "0.5b", 2, end_step).train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if work.on_gpu else 0.0
    free_memory()
    measured = Measured({"bandpo_s": ours.mean("time/step"), "trl_s": times[-1] - times[-2]})
    measured.values["time_over_trl"] = measured.values["bandpo_s"] / measured.values["trl_s"]
    if work.on_gpu:
        measured.values |= {"bandpo_peak_gib": ours.peak_gib, "trl_peak_gib": peak}
    if not work.tiny:
        measured.at_most("time_over_trl", MAX_TIME_OVER_TRL)
    return measured


def grpo_trainer(work: Work, shape: str, steps: int, end_step: Callable[[], None], **settings: Any) -> Any:
    """Return TRL's trainer of as many completions, tokens and updates per step as here.

    Args:
        end_step: called when the updates of a step are done.
        settings: of GRPOConfig.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    size, config = work.size, work.config(shape)
    updates = config.optim.updates
    problems = RandomProblems(size).train_problems()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % updates == 0:
                end_step()

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [float(grade(text, "", {})) for text in completions]

    completions = size.prompts * size.samples // updates
    most = max(1, size.micro_batch_tokens // (size.prompt_chars + size.max_tokens))
    micro = max(item for item in range(1, min(most, completions) + 1) if completions % item == 0)
    arguments = {
        "output_dir": str(work.folder / "trl"), "use_cpu": not work.on_gpu, "bf16": True,
        "max_steps": steps * updates, "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": completions // micro,
        "steps_per_generation": updates * completions // micro, "gradient_checkpointing": False,
        "num_generations": size.samples, "max_completion_length": size.max_tokens, "temperature": 1.0,
        "top_p": 1.0, "top_k": 0, "beta": 0.0, "loss_type": "grpo", "learning_rate": config.optim.lr,
        "logging_steps": 10**6, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return GRPOTrainer(
        model=str(work.model(shape)),
        reward_funcs=[reward],
        train_dataset=Dataset.from_list([{"prompt": problem.prompt} for problem in problems]),
        callbacks=[Clock()],
        args=GRPOConfig(**arguments | settings),
    )
