"""Small models with random weights and vLLM engines of them.

These helpers are not in conftest.py, which pytest-xdist also imports in the process that runs no test.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from bandpo_cli.config.run import RunConfig
from bandpo_cli.models.load import Policy
from bandpo_cli.sampling.vllm_sampler import VllmSampler
from tests.conftest import random_model

SHAPE = {
    "vocab_size": 150, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
SAMPLING: dict[str, Any] = {
    "max_prompt_tokens": 100, "max_tokens": 24, "vllm": {"kv_cache_gb": 0.1, "eager": True},
}  # fmt: skip


@dataclass
class Running:
    """An engine, the policy that it samples from, and the version of the last sync."""

    policy: Policy
    sampler: VllmSampler
    version: int = 0

    def sync(self) -> None:
        """Sync the policy's weights as the next version."""
        self.version += 1
        self.sampler.sync(self.policy.model, self.version)


def random_policy(kind: str) -> Policy:
    """Return a policy with random weights, far from uniform: tied in float32 (Qwen2), or untied in bfloat16 (Llama)."""
    model = random_model(kind, 3, 2.5, **SHAPE)
    no_tokenizer: Any = None  # tokens in, tokens out
    dtype = torch.bfloat16 if kind == "llama" else torch.float32
    return Policy(model.to(dtype), no_tokenizer, (2, 3), 0)


def perturb(model: PreTrainedModel) -> None:
    """Change all weights, including norms and biases, as much as many updates would."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def start(policy: Policy, **sampling: Any) -> VllmSampler:
    config = RunConfig.model_validate({"sampling": SAMPLING | sampling})
    return VllmSampler(config.sampling, policy)


@contextmanager
def silent() -> Iterator[None]:
    """Check that the block writes nothing to standard error."""
    original = os.dup(2)
    with tempfile.TemporaryFile() as file, open(2, "w", closefd=False) as stderr, redirect_stderr(stderr):
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            stderr.flush()
            os.dup2(original, 2)
            os.close(original)
        file.seek(0)
        assert file.read() == b""


def process_state() -> tuple[object, ...]:
    """Return threads, cores, signals, torch's random state and the environment: an engine must not change them."""
    return (
        torch.get_num_threads(), torch.set_num_threads, os.sched_getaffinity(0), os.environ.get("LD_PRELOAD"),
        signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), torch.get_rng_state().tolist(),
    )  # fmt: skip
