"""Memory of a training run: the estimate before it starts, and the error when it was too much."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bandpo_cli.config.hardware import dtype_on
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.sampling import resolve_engine
from bandpo_cli.errors import RunError, UserError, find_out_of_memory, first_line
from bandpo_cli.registries import ENGINES

if TYPE_CHECKING:
    from bandpo_cli.models.memory import MemoryEstimate

GIB = 2**30
_MAX_USED_SHARE = 0.95
"""Largest share of the memory that an estimate may take and still count as fitting."""


@dataclass(frozen=True)
class MemoryReport:
    """The memory that a run takes, against the memory of the device; with several ranks, that of one rank.

    Attributes:
        estimate: bytes by part.
        engine: bytes of the vLLM engine; 0 where the policy's own weights are sampled from.
        device: name of the GPU, or of this machine where there is none.
        available: bytes of its memory; without a GPU, the share of one rank.
        peak: the greatest number of bytes in use at one time.
        on_gpu: the device is a CUDA GPU.
    """

    estimate: MemoryEstimate
    engine: int
    device: str
    available: int
    peak: int
    on_gpu: bool

    @property
    def fits(self) -> bool:
        """Whether the peak leaves some memory free."""
        return self.peak < _MAX_USED_SHARE * self.available


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
    if on_gpu:
        try:
            gpu = torch.cuda.get_device_properties("cuda" if name == "auto" else name)
        except (RuntimeError, AssertionError, ValueError) as error:
            raise UserError(
                f"model.device = {name!r}: not usable on this machine: {first_line(error)}"
            ) from None
        device, available = gpu.name, gpu.total_memory
    else:
        share = "" if ranks == 1 else f" / {ranks} ranks"
        device = f"this machine{share} (no GPU)"
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    return memory_report_on(config, device, available, on_gpu, ranks)


def memory_report_on(
    config: RunConfig, device: str, available: int, on_gpu: bool, ranks: int = 1
) -> MemoryReport:
    """Estimate the memory of a run on a device with `available` bytes, which need not be at hand. Imports torch.

    Args:
        ranks: number of ranks; each has such a device.

    Raises:
        UserError: the model's architecture cannot be read.
    """
    from bandpo_cli.models.memory import estimate_memory

    shares_weights = ENGINES[resolve_engine(config.sampling.engine, on_gpu)].shares_weights
    estimate = estimate_memory(config, shares_weights, "cuda" if on_gpu else "cpu", ranks)
    engine = 0 if shares_weights else _engine_bytes(config, available, on_gpu)
    report = MemoryReport(estimate, engine, device, available, _peak(estimate, config, engine), on_gpu)
    if report.fits or not config.checkpoint.background:
        return report
    # A run that lacks the memory for the copy of a checkpoint takes no copy.
    checkpoint = config.checkpoint.model_copy(update={"background": False})
    without = config.model_copy(update={"checkpoint": checkpoint})
    return memory_report_on(without, device, available, on_gpu, ranks)


def with_all_weights(config: RunConfig) -> RunConfig:
    """Return the settings of a run without LoRA, which trains all weights."""
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": None})})


def _engine_bytes(config: RunConfig, available: int, on_gpu: bool) -> int:
    vllm = config.sampling.vllm
    return int(available * vllm.memory_fraction) if on_gpu else int(vllm.kv_cache_gb * GIB)


def _peak(estimate: MemoryEstimate, config: RunConfig, engine: int) -> int:
    """Return the peak in bytes: a sleeping engine frees its memory for the update, another one does not."""
    if engine and config.sampling.vllm.sleep:
        sending = sum(estimate.sampling.values())
        return sum(estimate.always.values()) + max(estimate.updating, engine + sending)
    return estimate.peak + engine


def memory_saving_settings(config: RunConfig, on_gpu: bool, training: bool = True) -> str:
    """Return flags that lower the memory, those that cost least first, as the end of an error message.

    Args:
        on_gpu: the policy is on a CUDA GPU; with it follows which engine `sampling.engine: auto` is.
        training: False for an evaluation, which has no updates.
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
    found += _engine_settings(config, on_gpu, training)
    found.append(f"sampling.max_tokens={max(1, config.sampling.max_tokens // 2)}")
    if training and config.model.lora is None:
        found.append("model.lora.rank=16")
    return "for less memory, in this order: " + ", ".join(f"--set {setting}" for setting in found)


def _engine_settings(config: RunConfig, on_gpu: bool, training: bool) -> list[str]:
    """Return the settings that lower the memory of the engine that the run uses."""
    engine, vllm = ENGINES[resolve_engine(config.sampling.engine, on_gpu)], config.sampling.vllm
    if engine.shares_weights:
        return [f"sampling.max_sequences={max(1, config.sampling.max_sequences // 4)}"]
    if not on_gpu:
        return [f"sampling.vllm.kv_cache_gb={vllm.kv_cache_gb / 2:g}"]
    sleep = ["sampling.vllm.sleep=true"] if training and not vllm.sleep else []
    return [*sleep, f"sampling.vllm.memory_fraction={vllm.memory_fraction / 2:g}"]


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

        advice = memory_saving_settings(config, is_on_cuda(config.model), training)
        raise RunError(f"out of memory ({_requested_size(failed)}); {advice}") from error


def _requested_size(error: BaseException) -> str:
    """Return the requested size as the error states it, without the allocator's advice and its file names."""
    text = first_line(error, max_chars=1000)
    return text.rsplit("] ", 1)[-1].split(". GPU", 1)[0].strip()
