"""Prompts, short answers and plain forward passes of a pretrained model.

These helpers are not in conftest.py, which pytest-xdist also imports in the process that runs no test.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bandpo_cli.config.run import ModelConfig
from bandpo_cli.models.load import Policy, load_tokenizer
from bandpo_cli.sampling.prompt_encoding import PromptEncoder
from bandpo_cli.sampling.sampler import SamplingParams
from bandpo_cli.tasks.task import build_prompt
from bandpo_cli.types import Completion, Problem

TEMPLATE = "{question} Answer with the number only."
QUESTIONS = [
    "Anna has 4 apples and gets 3 more. How many apples does Anna have?",
    "Ben reads 12 pages on Monday and 9 pages on Tuesday. How many pages does Ben read?",
    "A café sells 15 teas at 2 € each. How many euros does the café earn?",
    "Tom runs 5 km. Mia runs twice as far. How many km do they run together?",
]


def problems(template: str = TEMPLATE, system: str | None = None) -> list[Problem]:
    """Return `QUESTIONS` as problems."""
    return [
        Problem(f"q/{i}", build_prompt(text, template, system), "7", "q", "gsm8k-flexible")
        for i, text in enumerate(QUESTIONS)
    ]


def encoded_prompts(folder: Path, dtype: str = "float32") -> list[tuple[int, ...]]:
    """Return prompts whose answers may end within a few tokens; half of them for bfloat16, which few CPUs have."""
    encoder = PromptEncoder(load_tokenizer(ModelConfig(path=str(folder))))
    prompts = [prompt.token_ids for prompt in encoder.encode(problems("{question}"))]
    return prompts if dtype == "float32" else prompts[:2]


def plain_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model as transformers alone loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def plain_logprobs(
    model: PreTrainedModel, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> torch.Tensor:
    """Return the log-probs of a completion by one ordinary forward pass of one sequence, float64 [n]."""
    ids, last = torch.tensor([[*prompt_ids, *token_ids]]), len(token_ids) + 1
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=last).logits
    logprobs = torch.log_softmax(logits[0, :-1].double(), dim=-1)
    return logprobs.gather(1, torch.tensor(token_ids)[:, None]).squeeze(1)


@torch.no_grad()
def completion_logprobs(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Completion]]
) -> torch.Tensor:
    """Return `plain_logprobs` of all completions, float64 [N]."""
    pairs = [(prompt, item) for prompt, group in zip(prompts, groups, strict=True) for item in group]
    return torch.cat([plain_logprobs(model, prompt, item.token_ids) for prompt, item in pairs])


def reported_logprobs(groups: Sequence[Sequence[Completion]]) -> torch.Tensor:
    """Return the log-probs that an engine reported, float64 [N]."""
    return torch.tensor([logprob for group in groups for c in group for logprob in c.logprobs]).double()


def check_logprobs(found: torch.Tensor, plain: torch.Tensor, dtype: str, exact: torch.Tensor) -> None:
    """Require the log-probs of a plain forward pass: each one in float32, all without a bias in bfloat16.

    In bfloat16 two passes in another order differ in each log-prob by as much as a pass differs from float32.

    Args:
        plain: of a plain forward pass in `dtype`.
        exact: of a plain forward pass of the same weights in float32.
    """
    if dtype == "float32":
        assert (found - plain).abs().max() <= 1e-4
        return
    assert (found - plain).mean().abs() <= 0.02
    assert (found - exact).abs().mean() <= 1.5 * (plain - exact).abs().mean()


def short_answers(policy: Policy) -> SamplingParams:
    """Return sampling parameters with which completions end at different lengths, some of them at the limit.

    A small model at temperature 1 seldom ends its turn within a few tokens, so a full stop ends a completion too.
    """
    full_stops = policy.tokenizer([".", " 7."], add_special_tokens=False)["input_ids"]
    stop_ids = (*policy.stop_ids, *{ids[-1] for ids in full_stops})
    return SamplingParams(3, 1.0, max_tokens=12, stop_ids=stop_ids)
