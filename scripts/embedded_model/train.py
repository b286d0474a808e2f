"""Makes the embedded model: some minutes of supervised learning on solved countdown problems.

    python -m scripts.embedded_model.train --out FOLDER

It ends on demonstrations of which a fifth are wrong, on purpose. The model then solves a quarter of the held-out
problems at the first try and nearly all within 16, and knows more than it shows, as pretrained models do: that
leaves reinforcement learning something to find and something to lose.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from bandpo_cli.config.task import CountdownTask
from bandpo_cli.grading.countdown import parse_expression
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.packing import Row, collate
from bandpo_cli.tasks.countdown import Countdown
from bandpo_cli.types import Problem
from scripts.embedded_model.build import build_model, build_tokenizer
from scripts.embedded_model.measure import Figures, measure

PROBLEMS, ANSWERS = 96, 4  # a step: 96 prompts, each computed once for its 4 answers
LEARNING_RATE = 2e-3
WARMUP_STEPS = 50
CLEAN_SHARE, WRONG_SHARE = 5 / 6, 0.2
HELDOUT_PROBLEMS = 512  # measured at the end


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
        solved.append((str(problem.prompt), table[given][int(problem.answer)]))
    return solved


Answer = Callable[[random.Random, str, Sequence[str]], str]
"""Draws an answer to imitate: from a source of chance, the prompt and all its right answers."""


def any_expression(rng: random.Random, prompt: str, operators: str) -> str:
    """The prompt's numbers in any order with any of these operators."""
    first, *others = rng.sample(numbers := prompt.partition("=")[0].split(), len(numbers))
    return first + "".join(rng.choice(operators) + number for number in others)


def partly_wrong(wrong_share: float) -> Answer:
    """One of the right answers, or, in a `wrong_share` of draws, any expression."""

    def draw(rng: random.Random, prompt: str, right: Sequence[str]) -> str:
        return rng.choice(right) if rng.random() >= wrong_share else any_expression(rng, prompt, "+-*")

    return draw


class Demonstrations:
    """Endless batches of problems with answers to imitate; what is drawn depends on the seed alone."""

    def __init__(self, tokenizer: Any, problems: Sequence[Problem], seed: int) -> None:
        self._tokenizer = tokenizer
        self._solved = solved_problems(problems)
        self._rng = random.Random(seed)

    def rows(self, answer: Answer) -> list[Row]:
        """Return `PROBLEMS` prompts with `ANSWERS` answers each."""
        drawn = self._rng.choices(self._solved, k=PROBLEMS)
        prompts = self._tokenizer([prompt for prompt, _ in drawn])["input_ids"]
        answers = self._tokenizer(
            [answer(self._rng, prompt, right) for prompt, right in drawn for _ in range(ANSWERS)]
        )["input_ids"]
        ended = [[*tokens, self._tokenizer.eos_token_id] for tokens in answers]
        return [Row(prompt, ended[i * ANSWERS : (i + 1) * ANSWERS]) for i, prompt in enumerate(prompts)]


def imitate(model: Any, batches: Iterable[Sequence[Row]], steps: int, learning_rate: float) -> None:
    """Train in place on one batch a step, and print a line each 50 steps.

    The learning rate rises for `WARMUP_STEPS` and falls in a line to zero at the last step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, (steps - step) / max(steps - WARMUP_STEPS, 1))
    )
    started = time.perf_counter()
    for step, rows in enumerate(itertools.islice(batches, steps), start=1):
        batch = collate(rows, model.device)
        loss = -token_logprobs(model, batch).logprobs.mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            seconds = time.perf_counter() - started
            print(f"step {step}/{steps}  loss {loss.item():.3f}  {seconds:.0f} s", flush=True)


def warm_start(model: Any, tokenizer: Any, problems: Sequence[Problem], steps: int, seed: int) -> None:
    """Teach a new model to solve problems, and in the last sixth of the steps to be wrong now and then.

    The model then knows more than it shows, as pretrained models do.
    """
    demonstrations = Demonstrations(tokenizer, problems, seed)
    clean, mixed = partly_wrong(0.0), partly_wrong(WRONG_SHARE)
    batches = (
        demonstrations.rows(mixed if step > steps * CLEAN_SHARE else clean) for step in itertools.count(1)
    )
    imitate(model, batches, steps, LEARNING_RATE)


def model_card(steps: int, seed: int, figures: Figures) -> str:
    """The README.md of the folder."""
    return f"""---
license: apache-2.0
library_name: transformers
---

# The embedded model of bandpo

Qwen2 architecture, a token a character. It answers countdown problems ("1 3 7 8=28:" with "3*7+8-1", say) and
is the model that bandpo trains when none is named. Made in the project by

    python -m scripts.embedded_model.train --out FOLDER --steps {steps} --seed {seed}

with torch {torch.__version__}, transformers {transformers.__version__}, CPU threads: {torch.get_num_threads()}.
That is {steps} supervised steps, each on {ANSWERS} random answers to each of {PROBLEMS} training problems of the
task's default settings; in the last sixth of the steps {WRONG_SHARE:.0%} of the answers are wrong.
On the first {HELDOUT_PROBLEMS} held-out problems, at temperature 1, 16 samples a problem:

| mean@16 | pass@16 | entropy, nats a token |
|---|---|---|
| {figures.mean_at_16:.3f} | {figures.pass_at_16:.3f} | {figures.entropy:.3f} |
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the folder: tokenizer, weights, model card."""
    parser = argparse.ArgumentParser(description="Make the embedded model: a warm start on countdown.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=1800, help="supervised steps")
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

    figures = measure(model, tokenizer, task.heldout_sets()[task.name][:HELDOUT_PROBLEMS], options.seed)
    print(f"held-out {figures}")
    card = model_card(options.steps, options.seed, figures)
    (options.out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
