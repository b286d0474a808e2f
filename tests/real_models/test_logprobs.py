"""Log-probs of the transformers engine and of packed rows against one ordinary forward pass per sequence."""

import pytest
import torch

from bandpo_cli.config.run import ModelConfig
from bandpo_cli.models.load import load_policy
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.packing import Row, collate
from bandpo_cli.sampling.sampler import TransformersSampler
from tests.real_models.pretrained import (
    check_logprobs,
    completion_logprobs,
    encoded_prompts,
    plain_model,
    reported_logprobs,
    short_answers,
)

pytestmark = pytest.mark.real_models


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_and_packed_log_probs_are_those_of_the_model(folder, dtype):
    """Completions end at different lengths, and some at the limit; prompts differ in length."""
    policy = load_policy(ModelConfig(path=str(folder), device="cpu", dtype=dtype))
    prompts, params = encoded_prompts(folder, dtype), short_answers(policy)
    groups = TransformersSampler(policy.model, policy.pad_id).sample(prompts, params, seed=1)
    if dtype == "float32":
        assert {completion.finish_reason for group in groups for completion in group} == {"stop", "length"}
    rows = [
        Row(prompt, [completion.token_ids for completion in group])
        for prompt, group in zip(prompts, groups, strict=True)
    ]
    with torch.no_grad():
        packed = token_logprobs(policy.model, collate(rows, policy.device)).logprobs.double()
    alone = in_float32 = completion_logprobs(plain_model(folder), prompts, groups)
    if dtype == "bfloat16":
        alone = completion_logprobs(plain_model(folder, torch.bfloat16), prompts, groups)
    check_logprobs(reported_logprobs(groups), alone, dtype, in_float32)
    check_logprobs(packed, alone, dtype, in_float32)
