"""Evaluation of the bundled model: mean@16, pass@16 and entropy on countdown problems."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bandpo_cli.grading.countdown import grade_countdown
from bandpo_cli.types import Problem

SAMPLES = 16
MAX_ANSWER_TOKENS = 8  # four digits, three operators, end of sequence
PROBLEMS_PER_BATCH = 64


@dataclass(frozen=True)
class Metrics:
    """Metrics of a model on countdown problems.

    Attributes:
        mean_at_16: fraction of correct answers.
        pass_at_16: fraction of problems with at least one correct answer among 16.
        entropy: mean entropy per sampled token, in nats.
    """

    mean_at_16: float
    pass_at_16: float
    entropy: float


@torch.no_grad()
def measure(model: Any, tokenizer: Any, problems: Sequence[Problem], seed: int) -> Metrics:
    """Sample 16 answers per problem at temperature 1 and grade them. Sets torch's seed."""
    model.eval()
    torch.manual_seed(seed)
    correct, entropies = [], []
    for start in range(0, len(problems), PROBLEMS_PER_BATCH):
        chunk = problems[start : start + PROBLEMS_PER_BATCH]
        answers, entropy = _sample(model, tokenizer, [str(problem.prompt) for problem in chunk])
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        correct += [grade_countdown(chunk[row // SAMPLES], text).correct for row, text in enumerate(texts)]
        entropies.append(entropy[answers != tokenizer.pad_token_id])
    by_problem = torch.tensor(correct).view(len(problems), SAMPLES)
    return Metrics(
        mean_at_16=by_problem.float().mean().item(),
        pass_at_16=by_problem.any(dim=1).float().mean().item(),
        entropy=torch.cat(entropies).mean().item(),
    )


def _sample(model: Any, tokenizer: Any, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return answers and the entropy at each of their tokens, both [prompts · 16, tokens], padded on the right."""
    inputs = tokenizer(prompts, padding=True, return_tensors="pt")
    sampled = model.generate(
        **inputs,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_ANSWER_TOKENS,
        num_return_sequences=SAMPLES,
        return_dict_in_generate=True,
        output_logits=True,
    )
    answers = sampled.sequences[:, inputs["input_ids"].shape[1] :]
    logprobs = torch.stack(sampled.logits, dim=1).log_softmax(dim=-1)
    return answers, -(logprobs.exp() * logprobs).sum(dim=-1)
