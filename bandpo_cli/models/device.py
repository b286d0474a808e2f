"""Device of the policy: resolution of `model.device` and the dtype, and release of cached memory."""

from __future__ import annotations

import gc

import torch

from bandpo_cli.config.hardware import dtype_on, with_dtype
from bandpo_cli.config.run import ModelConfig, RunConfig


def is_on_cuda(config: ModelConfig) -> bool:
    """Return whether `model.device` is a CUDA GPU on this machine."""
    return torch.cuda.is_available() and config.device.partition(":")[0] in ("auto", "cuda")


def dtype_here(config: ModelConfig) -> torch.dtype:
    """Return what `model.dtype` is on this machine."""
    dtype: torch.dtype = getattr(torch, dtype_on(config.dtype, is_on_cuda(config)))
    return dtype


def with_dtype_here(config: RunConfig) -> RunConfig:
    """Return the settings with what `model.dtype` is on this machine: running them again gives the same run."""
    return with_dtype(config, is_on_cuda(config.model))


def release_cached_memory() -> None:
    """Return unused GPU memory from torch's caching allocator to the driver; do nothing without a CUDA context.

    An engine with an allocator of its own, as vLLM's for sleep and wake, cannot use what torch has cached. Objects in
    reference cycles, such as tracebacks, hold tensors until garbage collection.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        torch.cuda.empty_cache()
