"""Deterministic kernels (`deterministic: true`): the same bits in every run on the same GPU and software."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.sampling import resolve_engine
from bandpo_cli.errors import UserError, first_line
from bandpo_cli.models.load import is_on_cuda

# transformers passes the second on to FlashAttention's backward pass. NVLS is NCCL's sum within the NVLink switch.
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1", "NCCL_NVLS_ENABLE": "0",
}  # fmt: skip
"""Environment variables of a run on a GPU. Each rank sets them, and an engine process inherits them."""
# vLLM 0.32 sets the same values in the trainer's process, but after cuBLAS has read its environment.
SHARED_GPU = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
_NONE = "does not have a deterministic implementation"


@contextmanager
def deterministic_kernels(config: RunConfig, training: bool = True) -> Iterator[None]:
    """Use deterministic kernels in the block if `deterministic` is set; enter it before torch uses the GPU.

    Raises:
        UserError: this process already uses other kernels, vLLM has no such kernels here, or torch has none for an
            operation of the model or of custom code.
    """
    if not config.deterministic:
        yield
        return
    _prepare(config, training)
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)  # not `warn_only`, with which attention stays non-deterministic
    try:
        yield
    except RuntimeError as error:
        if _NONE not in str(error):
            raise
        operation = first_line(error).partition(" does not")[0]
        raise UserError(f"deterministic = true: {operation} {_NONE}; set deterministic=false") from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _prepare(config: RunConfig, training: bool) -> None:
    """Set the environment variables of a GPU; raise UserError where the results would not be deterministic."""
    on_gpu, shares = is_on_cuda(config.model), not config.sampling.max_lag
    with_vllm, problem = resolve_engine(config.sampling.engine, on_gpu) == "vllm", None
    if on_gpu:
        variables = VARIABLES | ({"VLLM_BATCH_INVARIANT": "1"} if with_vllm else {})
        variables |= SHARED_GPU if with_vllm and shares else {}
        is_late = torch.cuda.is_initialized() or "vllm" in sys.modules  # type: ignore[no-untyped-call]
        for name in ("VLLM_BATCH_INVARIANT", *SHARED_GPU) if is_late else ():
            if name in variables and os.environ.get(name) != variables[name]:
                set_late = f"this process has used the GPU or vLLM without {name}={variables[name]}"
                raise UserError(f"deterministic = true: {set_late}; start a new one")
        os.environ.update(variables)
        # On GPUs of compute capability 8, vLLM replaces torch's matrix products by kernels without a gradient.
        least = 9 if training and shares else 8
        if with_vllm and torch.cuda.get_device_capability()[0] < least:
            where = "in the trainer's process " if least == 9 else ""
            problem = f"vLLM {where}needs a GPU of compute capability {least}.0 or more"
    elif with_vllm and (config.task.functions or config.grading.while_sampling):
        problem = (
            "on a CPU, vLLM's results depend on its batches, and they on the time that tools and graders take"
        )
    if problem is not None:
        raise UserError(
            f"deterministic = true: {problem}; use --sampler transformers, or leave out deterministic"
        )
