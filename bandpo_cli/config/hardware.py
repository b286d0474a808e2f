"""Settings that depend on the hardware: `auto` on a GPU, several ranks, GPUs of engine processes, torch's allocator."""

import os
from typing import Literal

from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.sampling import check_tensor_parallel
from bandpo_cli.errors import ConfigError, plural

Dtype = Literal["float32", "bfloat16"]


def dtype_on(dtype: Literal["auto"] | Dtype, on_gpu: bool) -> Dtype:
    """Return what `model.dtype` is: for `auto` bfloat16 on a CUDA GPU and float32 elsewhere."""
    if dtype == "auto":
        return "bfloat16" if on_gpu else "float32"
    return dtype


def with_dtype(config: RunConfig, on_gpu: bool) -> RunConfig:
    """Return the settings with the dtype that `model.dtype` is on the device of the policy."""
    model = config.model.model_copy(update={"dtype": dtype_on(config.model.dtype, on_gpu)})
    return config.model_copy(update={"model": model})


def check_ranks(config: RunConfig, count: int, training: bool = True) -> None:
    """Raise ConfigError where a run or an evaluation cannot be divided among `count` processes.

    `model.device` must not be one GPU, an engine not be spread over several, and a step must have enough prompts.
    """
    device, prompts = config.model.device, config.sampling.prompts
    if count > 1 and ":" in device:
        raise ConfigError(f"model.device = '{device}': one GPU for {count} ranks; use CUDA_VISIBLE_DEVICES")
    check_tensor_parallel(config.sampling.vllm.tensor_parallel, count)
    if training and prompts < count:
        most = plural(prompts, "rank")
        raise ConfigError(f"sampling.prompts = {prompts}: too few for {count} ranks; start at most {most}")


def engine_cards(card: int, ranks: int, cards: int) -> list[int]:
    """Return the number of the GPU on which the engine process of each rank runs (`sampling.max_lag`).

    They are GPUs that train nothing if there is one for the engine of every rank, else the GPUs of the ranks.

    Args:
        card: the GPU of the policy, which a single rank may choose (`model.device`); several ranks use the first ones.
        ranks, cards: numbers of ranks and of visible GPUs on this machine.
    """
    trainers = [card] if ranks == 1 else [*range(ranks)]
    free = [card for card in range(cards) if card not in trainers]
    return free[:ranks] if len(free) >= ranks else trainers


_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables of torch's GPU allocator. The first is the older one, which every version of torch and vLLM
reads."""


def use_expandable_segments(config: RunConfig) -> None:
    """Make torch's GPU allocator grow its segments, unless the environment has settings for it.

    Trainer and engine release and take their memory in turn, which leaves segments that are too small for the next
    large tensor. torch reads the variable at its first allocation on a GPU. vLLM turns the setting off for the memory
    that its sleep mode releases (since 0.20.1, `use_memory_pool` in its cumem.py). An engine process
    (`sampling.max_lag`) does not sleep.
    """
    if not config.sampling.max_lag and not any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        os.environ[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
