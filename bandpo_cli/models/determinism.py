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

VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",  # transformers passes it on to FlashAttention's backward pass
    "NCCL_NVLS_ENABLE": "0",  # sums within the NVLink switch
}
"""Environment variables of a run on a GPU. Each rank sets them, and an engine process inherits them."""
VLLM_VARIABLES = {"VLLM_BATCH_INVARIANT": "1"}
SHARED_VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""With vLLM in the trainer's process: vLLM 0.32 sets the same ones, but after cuBLAS has read its environment."""
READ_ONCE = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "VLLM_BATCH_INVARIANT")
"""Variables that have no effect after the first use of the GPU, or after the import of vLLM."""
_ADVICE = "use --sampler transformers, or leave out deterministic"
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
    on_gpu, lag = is_on_cuda(config.model), bool(config.sampling.max_lag)
    with_vllm = resolve_engine(config.sampling.engine, on_gpu) == "vllm"
    if not on_gpu:
        waits = config.task.functions or config.task.environment or config.grading.while_sampling
        if with_vllm and waits:
            raise UserError(
                "deterministic = true: vLLM's batches depend on the time that tools and graders take, and it has no "
                f"batch-invariant kernels for a CPU; {_ADVICE}"
            )
        return
    variables = (
        VARIABLES
        | (VLLM_VARIABLES if with_vllm else {})
        | (SHARED_VARIABLES if with_vllm and not lag else {})
    )
    started = torch.cuda.is_initialized() or "vllm" in sys.modules  # type: ignore[no-untyped-call]
    for name, value in variables.items() if started else ():
        if name in READ_ONCE and os.environ.get(name) != value:
            raise UserError(
                f"deterministic = true: this process has used the GPU or vLLM without {name}={value}; start a new one"
            )
    os.environ.update(variables)
    # On GPUs of compute capability 8, vLLM replaces torch's matrix products by kernels without a gradient.
    least = 9 if training and not lag else 8
    if with_vllm and torch.cuda.get_device_capability()[0] < least:
        raise UserError(
            f"deterministic = true: vLLM in {'the trainer' if least == 9 else 'a'} process needs a GPU of compute "
            f"capability {least}.0 or more; {_ADVICE}"
        )
