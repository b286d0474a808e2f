"""GRPO with Band-clipped updates in plain PyTorch: one model, one prompt at a time, no trainer.

    python examples/grpo_loop.py

Only `band_bounds` and the shipped model come from bandpo; everything else is what any GRPO loop has.
"""

from __future__ import annotations

import argparse
import random
import re

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from bandpo_cli.bounds import band_bounds
from bandpo_cli.models.load import embedded_model_path

SAMPLES, MAX_TOKENS, UPDATES = 32, 8, 4


def reward(prompt: str, answer: str) -> float:
    """Return 1 if the answer adds up the numbers of the prompt to its target (`2 3 4 1=10:` -> `2+3+4+1`), else 0."""
    numbers, target = prompt.rstrip(":").split("=")
    if not re.fullmatch(r"\d([+-]\d)*", answer):
        return 0.0
    terms = re.findall(r"[+-]?\d", answer)
    uses_each_once = sorted(t.strip("+-") for t in terms) == sorted(numbers.split())
    return float(uses_each_once and sum(map(int, terms)) == int(target))


def token_logprobs(model: PreTrainedModel, ids: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Return log π of each completion token, nats, float32 [samples, tokens]."""
    logits = model(input_ids=ids).logits[:, prompt_length - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[:, prompt_length:, None]).squeeze(-1)


def train(steps: int, seed: int = 0) -> list[float]:
    """Train on random sums and return the mean reward per step."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    history: list[float] = []
    for step in range(steps):
        numbers = [rng.randint(1, 9) for _ in range(4)]
        prompt = f"{' '.join(map(str, numbers))}={sum(numbers)}:"
        prompt_ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        length = prompt_ids.shape[1]
        ids = model.generate(
            input_ids=prompt_ids, attention_mask=torch.ones_like(prompt_ids), do_sample=True,
            num_return_sequences=SAMPLES, max_new_tokens=MAX_TOKENS, top_k=0,
        )  # fmt: skip
        answers = tokenizer.batch_decode(ids[:, length:], skip_special_tokens=True)
        rewards = torch.tensor([reward(prompt, answer) for answer in answers])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        is_end = (ids[:, length:] == tokenizer.eos_token_id).long()
        mask = is_end.cumsum(1) - is_end == 0  # the tokens up to the first end token, which is included
        with torch.no_grad():
            old = token_logprobs(model, ids, length)
        lower, upper = band_bounds(old, divergence="kl", delta=0.05, max_ratio=10.0)
        for _ in range(UPDATES):
            ratio = (token_logprobs(model, ids, length) - old).exp()
            gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(lower, upper) * advantages[:, None])
            loss = -((gain * mask).sum(1) / mask.sum(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history.append(rewards.mean().item())
        print(f"step {step + 1:3}  reward {history[-1]:.2f}  {prompt}{answers[0]}")
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    train(parser.parse_args().steps)
