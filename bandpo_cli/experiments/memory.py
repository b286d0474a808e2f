"""Memory of a training run: the estimate before it starts, and the error when it was too much."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from bandpo_cli.config.hardware import dtype_on, engine_cards, trainer_cards
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.sampling import resolve_engine
from bandpo_cli.errors import EngineMemoryError, RunError, UserError, find_out_of_memory, first_line
from bandpo_cli.rank_process import local_rank_count, rank_count
from bandpo_cli.registries import ENGINES

if TYPE_CHECKING:
    from bandpo_cli.models.memory import MemoryEstimate

GIB = 2**30
_MAX_USED_SHARE = 0.95
"""Largest share of the memory that an estimate may take and still count as fitting."""


class EngineGpu(NamedTuple):
    """A GPU on which nothing runs but the engine process of a rank (`sampling.max_lag`).

    Attributes:
        device: its name for torch, such as `cuda:1`; with several ranks those of all of them.
        name: the name of the card.
        available: bytes of its memory.
    """

    device: str
    name: str
    available: int


@dataclass(frozen=True)
class MemoryReport:
    """The memory that a run takes, against the memory of the device; with several ranks, that of one rank.

    Attributes:
        estimate: bytes of the trainer, by component.
        engine: bytes of the vLLM engine; 0 where the policy's own weights are sampled from.
        device: name of the GPU, or of this machine where there is none.
        available: bytes of its memory; without a GPU, the share of one rank.
        peak: the greatest number of bytes in use at one time, on the device of the trainer.
        on_gpu: the device is a CUDA GPU.
        process: bytes of the engine process beside those of a vLLM engine, by component; empty without `max_lag`.
        engine_gpu: the GPU of the engine process; None without `max_lag`, or where it uses the memory of the trainer.
    """

    estimate: MemoryEstimate
    engine: int
    device: str
    available: int
    peak: int
    on_gpu: bool
    process: dict[str, int] = field(default_factory=dict)
    engine_gpu: EngineGpu | None = None

    @property
    def engine_peak(self) -> int:
        """Bytes of the engine, with those of its process; it holds them during the complete run with `max_lag`."""
        return self.engine + sum(self.process.values())

    @property
    def trainer_fits(self) -> bool:
        """Whether the peak leaves some memory free on the device of the trainer."""
        return self.peak < _MAX_USED_SHARE * self.available

    @property
    def engine_fits(self) -> bool:
        """Whether the engine leaves some memory free on a GPU of its own; True where it has none."""
        return self.engine_gpu is None or self.engine_peak < _MAX_USED_SHARE * self.engine_gpu.available

    @property
    def fits(self) -> bool:
        """Whether every peak leaves some memory free."""
        return self.trainer_fits and self.engine_fits


def memory_report(config: RunConfig, ranks: int = 1) -> MemoryReport:
    """Estimate the memory of a run on its GPU, or on this machine where there is none. Imports torch.

    Args:
        ranks: number of ranks, each with a GPU of its own, or all on this machine without one.

    Raises:
        UserError: the model's architecture cannot be read, or this machine has no such GPU.
    """
    import torch

    from bandpo_cli.models.device import is_on_cuda

    name = config.model.device
    on_gpu = is_on_cuda(config.model)
    engine_gpu = None
    if on_gpu:
        try:
            gpu = torch.cuda.get_device_properties("cuda" if name == "auto" else name)
            engine_gpu = _engine_gpu(config, local_rank_count() if rank_count() > 1 else ranks)
        except (RuntimeError, AssertionError, ValueError) as error:
            raise UserError(
                f"model.device = {name!r}: not usable on this machine: {first_line(error)}"
            ) from None
        device, available = gpu.name, gpu.total_memory
    else:
        share = "" if ranks == 1 else f" / {ranks} ranks"
        device = f"this machine{share} (no GPU)"
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    return memory_report_on(config, device, available, on_gpu, ranks, engine_gpu)


def _engine_gpu(config: RunConfig, local_ranks: int) -> EngineGpu | None:
    """Return the GPU of the engine process of the first rank if it is not that of the trainer; else None.

    Args:
        local_ranks: number of ranks on this machine.
    """
    if not config.sampling.max_lag:
        return None
    import torch

    device = config.model.device
    trainers = trainer_cards(0 if device == "auto" else torch.device(device).index or 0, local_ranks)
    cards = engine_cards(trainers, torch.cuda.device_count())
    if cards == trainers:
        return None
    gpu = torch.cuda.get_device_properties(cards[0])
    return EngineGpu(", ".join(f"cuda:{card}" for card in cards), gpu.name, gpu.total_memory)


def memory_report_on(
    config: RunConfig,
    device: str,
    available: int,
    on_gpu: bool,
    ranks: int = 1,
    engine_gpu: EngineGpu | None = None,
) -> MemoryReport:
    """Estimate the memory of a run on a device with `available` bytes, which need not be at hand. Imports torch.

    Args:
        ranks: number of ranks; each has such a device.
        engine_gpu: with `max_lag`, the GPU of the engine process where it is not that of the trainer.

    Raises:
        UserError: the model's architecture cannot be read.
    """
    from bandpo_cli.models.memory import engine_process_bytes, estimate_memory

    samples_weights = ENGINES[resolve_engine(config.sampling.engine, on_gpu)].shares_weights
    device_type, has_process = "cuda" if on_gpu else "cpu", config.sampling.max_lag > 0
    estimate = estimate_memory(config, samples_weights and not has_process, device_type, ranks)
    process = engine_process_bytes(config, samples_weights, device_type, ranks) if has_process else {}
    on_card = available if engine_gpu is None else engine_gpu.available
    engine = 0 if samples_weights else _engine_bytes(config, on_card, on_gpu)
    beside = 0 if engine_gpu is not None else engine + sum(process.values())
    peak = _peak(estimate, config, beside)
    report = MemoryReport(estimate, engine, device, available, peak, on_gpu, process, engine_gpu)
    if report.fits or not config.checkpoint.background:
        return report
    # A run that lacks the memory for the copy of a checkpoint takes no copy.
    checkpoint = config.checkpoint.model_copy(update={"background": False})
    without = config.model_copy(update={"checkpoint": checkpoint})
    return memory_report_on(without, device, available, on_gpu, ranks, engine_gpu)


def with_all_weights(config: RunConfig) -> RunConfig:
    """Return the settings of a run without LoRA, which trains all weights."""
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": None})})


def _engine_bytes(config: RunConfig, available: int, on_gpu: bool) -> int:
    vllm = config.sampling.vllm
    return int(available * vllm.memory_fraction) if on_gpu else int(vllm.kv_cache_gb * GIB)


def _peak(estimate: MemoryEstimate, config: RunConfig, engine: int) -> int:
    """Return the peak in bytes: a sleeping engine frees its memory for the update, another one does not.

    An engine process (`max_lag`) samples during the update, so that it does not sleep.
    """
    if engine and config.sampling.vllm.sleep and not config.sampling.max_lag:
        sending = sum(estimate.sampling.values())
        return sum(estimate.always.values()) + max(estimate.updating, engine + sending)
    return estimate.peak + engine


def memory_saving_settings(
    config: RunConfig, on_gpu: bool, training: bool = True, engine_has_gpu: bool = False
) -> str:
    """Return flags that lower the memory, those that cost least first, as the end of an error message.

    Args:
        on_gpu: the policy is on a CUDA GPU; with it follows which engine `sampling.engine: auto` is.
        training: False for an evaluation, or a GPU that only samples, which have no updates.
        engine_has_gpu: the engine process (`max_lag`) has a GPU to itself, so that the trainer's has more memory.
    """
    longest = config.sampling.max_prompt_tokens + config.sampling.max_tokens
    less = max(config.optim.micro_batch_tokens // 2, longest)
    found = []
    if training and less < config.optim.micro_batch_tokens:
        found.append(f"optim.micro_batch_tokens={less}")
    if training and not config.model.gradient_checkpointing:
        found.append("model.gradient_checkpointing=true")
    if dtype_on(config.model.dtype, on_gpu) == "float32":
        found.append("model.dtype=bfloat16")
    found += _engine_settings(config, on_gpu, alternates=training and not engine_has_gpu)
    found.append(f"sampling.max_tokens={max(1, config.sampling.max_tokens // 2)}")
    if training and config.model.lora is None:
        found.append("model.lora.rank=16")
    return "for less memory, in this order: " + ", ".join(f"--set {setting}" for setting in found)


def _engine_settings(config: RunConfig, on_gpu: bool, alternates: bool) -> list[str]:
    """Return the settings that lower the memory of the engine that the run uses.

    Args:
        alternates: sampling and updates use the same memory, so that it helps if they do so one after the other.
    """
    engine, vllm = ENGINES[resolve_engine(config.sampling.engine, on_gpu)], config.sampling.vllm
    lag = ["sampling.max_lag=0"] if alternates and config.sampling.max_lag else []
    if engine.shares_weights:
        return [*lag, f"sampling.max_sequences={max(1, config.sampling.max_sequences // 4)}"]
    if not on_gpu:
        return [*lag, f"sampling.vllm.kv_cache_gb={vllm.kv_cache_gb / 2:g}"]
    sleep = ["sampling.vllm.sleep=true"] if alternates and not vllm.sleep else []
    return [*lag, *sleep, f"sampling.vllm.memory_fraction={vllm.memory_fraction / 2:g}"]


@contextmanager
def out_of_memory_errors(config: RunConfig, training: bool = True) -> Iterator[None]:
    """Raise RunError with the settings to change in place of an out-of-memory error of torch, vLLM or Python.

    Args:
        training: False for an evaluation, which has no updates.
    """
    try:
        yield
    except Exception as error:
        failed = find_out_of_memory(error)
        if failed is None:
            raise
        from bandpo_cli.models.device import is_on_cuda

        on_gpu = is_on_cuda(config.model)
        has_gpu = training and on_gpu and _engine_gpu(config, local_rank_count()) is not None
        if has_gpu and isinstance(failed, EngineMemoryError):
            training = False  # the settings of updates do not help a GPU that only samples
        advice = memory_saving_settings(config, on_gpu, training, has_gpu)
        raise RunError(f"out of memory ({_requested_size(failed)}); {advice}") from error


def _requested_size(error: BaseException) -> str:
    """Return the requested size as the error states it, without the allocator's advice and its file names.

    What precedes the file names in brackets is kept: it says that the engine process has failed.
    """
    head, _, text = first_line(error, max_chars=1000).rpartition("] ")
    return f"{head.partition('[')[0]}{text.split('. GPU', 1)[0]}".strip()
