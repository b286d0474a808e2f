"""Log-probs of the vLLM engine with a pretrained model against one ordinary forward pass per sequence."""

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("vllm")

from bandpo_cli.config.run import ModelConfig, RunConfig
from bandpo_cli.models.load import load_policy
from bandpo_cli.sampling.vllm_sampler import VllmSampler
from tests.real_models.pretrained import (
    check_logprobs,
    completion_logprobs,
    encoded_prompts,
    plain_model,
    reported_logprobs,
    short_answers,
)

pytestmark = [pytest.mark.real_models, pytest.mark.vllm]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_log_probs_are_those_of_the_model(folder, dtype):
    """Before and after a change of the tied embedding, with the prompts in the prefix cache."""
    policy = load_policy(ModelConfig(path=str(folder), device="cpu", dtype=dtype))
    prompts, params = encoded_prompts(folder, dtype), short_answers(policy)
    vllm = {"kv_cache_gb": 0.1, "eager": True}
    sampling = {"max_prompt_tokens": 100, "max_tokens": params.max_tokens, "max_sequences": 16, "vllm": vllm}
    sampler = VllmSampler(RunConfig.model_validate({"sampling": sampling}).sampling, policy)
    try:
        before = sampler.sample(prompts, params, seed=1)
        double_embedding(policy.model)
        sampler.sync(policy.model, 1)
        after = sampler.sample(prompts, params, seed=1)
    finally:
        sampler.close()
    exact = plain_model(folder)
    # The first weights give other log-probs, so that a stale engine would be found.
    stale = completion_logprobs(exact, prompts, after)
    assert (reported_logprobs(after) - stale).abs().mean() > 0.1
    if dtype == "float32":
        assert {completion.finish_reason for group in before for completion in group} == {"stop", "length"}
        alone = completion_logprobs(exact, prompts, before)
        check_logprobs(reported_logprobs(before), alone, dtype, alone)
    double_embedding(exact)
    alone = in_float32 = completion_logprobs(exact, prompts, after)
    if dtype == "bfloat16":
        plain = plain_model(folder, torch.bfloat16)
        double_embedding(plain)
        alone = completion_logprobs(plain, prompts, after)
    check_logprobs(reported_logprobs(after), alone, dtype, in_float32)


@torch.no_grad()
def double_embedding(model: PreTrainedModel) -> None:
    """Double the embedding, which is the output layer too; that is exact in bfloat16, and the text stays a text."""
    embedding = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is embedding
    embedding.mul_(2.0)
