"""Settings whose value `auto` depends on the device of the policy."""

from __future__ import annotations

from typing import Literal

from bandpo_cli.config.run import RunConfig

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
