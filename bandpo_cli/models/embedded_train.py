"""Makes the embedded model: a few minutes of supervised learning on solved countdown problems.

    python -m bandpo_cli.models.embedded_train --out FOLDER --steps 600 --seed 0

It stops early on purpose. A model that solves a quarter of the held-out problems at the first try, and nearly
all within 16 tries, leaves reinforcement learning something to find and something to lose.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy

from bandpo_cli.config.task import CountdownTask
from bandpo_cli.models.embedded_build import build_model, build_tokenizer
from bandpo_cli.models.embedded_measure import Figures, measure
from bandpo_cli.tasks.countdown import Countdown
from bandpo_cli.tasks.expression import parse_expression
from bandpo_cli.types import Problem

BATCH_SIZE = 256
LEARNING_RATE = 2e-3
WARMUP_STEPS = 50
HELDOUT_PROBLEMS = 512  # measured at the end
IGNORED = -100  # what cross_entropy leaves out


def solutions(numbers: Sequence[int]) -> dict[int, list[str]]:
    """All expressions without parentheses over these numbers, by value; equal ones appear once."""
    by_value: dict[int, set[str]] = defaultdict(set)
    for order in set(itertools.permutations(map(str, numbers))):
        for signs in itertools.product("+-*", repeat=len(order) - 1):
            text = order[0] + "".join(sign + number for sign, number in zip(signs, order[1:], strict=True))
            by_value[parse_expression(text).value].add(text)
    return {value: sorted(texts) for value, texts in by_value.items()}


def solved_problems(problems: Sequence[Problem]) -> list[tuple[str, list[str]]]:
    """Each prompt with all its answers."""
    table: dict[str, dict[int, list[str]]] = {}
    solved = []
    for problem in problems:
        given = str(problem.extra["numbers"])
        if given not in table:
            table[given] = solutions([int(number) for number in given.split()])
        solved.append((problem.prompt, table[given][int(problem.answer)]))
    return solved


def supervised_batch(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, (pairs, tokens), padded on the right; only the answer and its end have labels."""
    prompts = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    answers = tokenizer([answer for _, answer in pairs])["input_ids"]
    width = max(len(prompt) + len(answer) + 1 for prompt, answer in zip(prompts, answers, strict=True))
    tokens = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), width), IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
        tokens[row, : len(ids)] = ids
        labels[row, len(prompt) : len(ids)] = ids[len(prompt) :]
    return tokens, labels


def warm_start(model: Any, tokenizer: Any, problems: Sequence[Problem], steps: int, seed: int) -> None:
    """Train in place on random answers to random problems, and print a line each 50 steps.

    The learning rate rises for `WARMUP_STEPS` and falls in a line to zero at the last step.
    """
    rng = random.Random(seed)
    solved = solved_problems(problems)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, (steps - step) / max(steps - WARMUP_STEPS, 1))
    )
    model.train()
    started = time.perf_counter()
    for step in range(1, steps + 1):
        pairs = [(prompt, rng.choice(answers)) for prompt, answers in rng.choices(solved, k=BATCH_SIZE)]
        tokens, labels = supervised_batch(tokenizer, pairs)
        logits = model(input_ids=tokens).logits  # causal, so padding on the right needs no mask
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            print(
                f"step {step}/{steps}  loss {loss.item():.3f}  {time.perf_counter() - started:.0f} s",
                flush=True,
            )


def model_card(steps: int, seed: int, figures: Figures) -> str:
    """The README.md of the folder."""
    return f"""---
license: apache-2.0
library_name: transformers
---

# The embedded model of bandpo

Qwen2 architecture, a token a character. It answers countdown problems ("1 3 7 8=28:" with "3*7+8-1", say) and
is the model that bandpo trains when none is named. Made in the project by

    python -m bandpo_cli.models.embedded_train --out FOLDER --steps {steps} --seed {seed}

with torch {torch.__version__}, transformers {transformers.__version__}, CPU threads: {torch.get_num_threads()}.
That is {steps} supervised steps of batch {BATCH_SIZE} on random answers to the training problems of the task's
default settings. On the first {HELDOUT_PROBLEMS} held-out problems, at temperature 1, 16 samples a problem:

| mean@16 | pass@16 | entropy, nats a token |
|---|---|---|
| {figures.mean_at_16:.3f} | {figures.pass_at_16:.3f} | {figures.entropy:.3f} |
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the folder: tokenizer, weights, model card."""
    parser = argparse.ArgumentParser(description="Make the embedded model: a short warm start on countdown.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=600, help="supervised steps")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the initial weights and the order of the data"
    )
    options = parser.parse_args(arguments)

    task = Countdown(CountdownTask())
    tokenizer = build_tokenizer()
    torch.manual_seed(options.seed)
    model = build_model(tokenizer)
    warm_start(model, tokenizer, task.train_problems(), options.steps, options.seed)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)

    figures = measure(model, tokenizer, task, task.heldout_problems()[:HELDOUT_PROBLEMS], options.seed)
    print(f"held-out {figures}")
    card = model_card(options.steps, options.seed, figures)
    (options.out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
