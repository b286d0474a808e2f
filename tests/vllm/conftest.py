"""Engines that start once per module: each start takes seconds, and a process can have one engine at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from bandpo_cli.config.run import RunConfig
from bandpo_cli.models.load import Policy
from bandpo_cli.sampling import sync_check
from bandpo_cli.sampling.vllm_sampler import VllmSampler

SHAPE = {
    "vocab_size": 150, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
SAMPLING: dict[str, Any] = {
    "max_prompt_tokens": 100, "max_tokens": 24, "vllm": {"kv_cache_gb": 0.5, "eager": True},
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
    """Return a float32 policy with random weights, far from uniform; Qwen2 ties its embeddings, Llama does not."""
    torch.manual_seed(3)
    model: PreTrainedModel = (
        LlamaForCausalLM(LlamaConfig(**SHAPE))
        if kind == "llama"
        else Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.5)
    no_tokenizer: Any = None  # tokens in, tokens out
    return Policy(model.eval(), no_tokenizer, (2, 3), 0)


def perturb(model: PreTrainedModel) -> None:
    """Change all weights, including norms and biases, as much as many updates would."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def start(policy: Policy, **sampling: Any) -> VllmSampler:
    config = RunConfig.model_validate({"sampling": SAMPLING | sampling})
    return VllmSampler(config.sampling, policy)


@pytest.fixture(scope="module", autouse=True)
def every_sync_is_checked_completely() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync_check, "CHECK_EVERY", 1)
        yield


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Start the engine of `qwen2` or `llama`, by an indirect parameter."""
    policy = random_policy(request.param)
    sampler = start(policy)
    yield Running(policy, sampler)
    sampler.close()
