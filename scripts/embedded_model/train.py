"""Training of the bundled model: about ten minutes of supervised learning on solved countdown problems.

    python -m scripts.embedded_model.train --out FOLDER

In the last sixth of the steps a fifth of the demonstrations are wrong on purpose. The trained model solves a quarter of
the held-out problems with one sample and nearly all within 16 samples. Its accuracy is therefore below its ability, as
for pretrained models, which leaves room for reinforcement learning to improve it and to reduce its diversity.
"""

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
from bandpo_cli.grading.countdown import evaluate_expression
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.packing import Row, collate
from bandpo_cli.tasks.task import countdown
from bandpo_cli.types import Problem
from scripts.embedded_model.build import build_model, build_tokenizer
from scripts.embedded_model.measure import Metrics, measure

PROBLEMS, ANSWERS = 96, 4
"""Per step: 96 prompts with 4 answers each; each prompt is computed once."""
LEARNING_RATE = 2e-3
WARMUP_STEPS = 50
CLEAN_SHARE, WRONG_SHARE = 5 / 6, 0.2
"""Fraction of the steps with correct answers only, and fraction of wrong answers in the other steps."""
HELDOUT_PROBLEMS = 512
"""Problems of the evaluation at the end."""


def solutions(numbers: Sequence[int]) -> dict[int, list[str]]:
    """Return all expressions without parentheses over these numbers, by value, without duplicates."""
    by_value: dict[int, set[str]] = defaultdict(set)
    for order in set(itertools.permutations(map(str, numbers))):
        for signs in itertools.product("+-*", repeat=len(order) - 1):
            text = order[0] + "".join(sign + number for sign, number in zip(signs, order[1:], strict=True))
            value, _ = evaluate_expression(text) or (0, [])
            by_value[value].add(text)
    return {value: sorted(texts) for value, texts in by_value.items()}


def solved_problems(problems: Sequence[Problem]) -> list[tuple[str, list[str]]]:
    """Return each problem's prompt with all its correct answers."""
    solutions_by_numbers: dict[str, dict[int, list[str]]] = {}
    solved = []
    for problem in problems:
        numbers = str(problem.extra["numbers"])
        if numbers not in solutions_by_numbers:
            solutions_by_numbers[numbers] = solutions([int(number) for number in numbers.split()])
        solved.append((str(problem.prompt), solutions_by_numbers[numbers][int(problem.answer)]))
    return solved


AnswerSampler = Callable[[random.Random, str, Sequence[str]], str]
"""Samples an answer to imitate, given a random number generator, the prompt and all its correct answers."""


def any_expression(rng: random.Random, prompt: str, operators: str) -> str:
    """Return a random expression: the prompt's numbers in any order with any of these operators."""
    first, *others = rng.sample(numbers := prompt.partition("=")[0].split(), len(numbers))
    return first + "".join(rng.choice(operators) + number for number in others)


def partly_wrong(wrong_share: float) -> AnswerSampler:
    """Return a sampler of correct answers that returns any expression with probability `wrong_share`."""

    def sample_answer(rng: random.Random, prompt: str, correct: Sequence[str]) -> str:
        return rng.choice(correct) if rng.random() >= wrong_share else any_expression(rng, prompt, "+-*")

    return sample_answer


class Demonstrations:
    """Unlimited batches of problems with answers to imitate; they depend only on the seed."""

    def __init__(self, tokenizer: Any, problems: Sequence[Problem], seed: int) -> None:
        self._tokenizer = tokenizer
        self._solved = solved_problems(problems)
        self._rng = random.Random(seed)

    def rows(self, sample_answer: AnswerSampler) -> list[Row]:
        """Return `PROBLEMS` prompts with `ANSWERS` answers each."""
        chosen = self._rng.choices(self._solved, k=PROBLEMS)
        prompts = self._tokenizer([prompt for prompt, _ in chosen])["input_ids"]
        answers = self._tokenizer(
            [sample_answer(self._rng, prompt, correct) for prompt, correct in chosen for _ in range(ANSWERS)]
        )["input_ids"]
        ended = [[*tokens, self._tokenizer.eos_token_id] for tokens in answers]
        return [Row(prompt, ended[i * ANSWERS : (i + 1) * ANSWERS]) for i, prompt in enumerate(prompts)]


def imitate(model: Any, batches: Iterable[Sequence[Row]], steps: int, learning_rate: float) -> None:
    """Train the model in place on one batch per step, and print a line every 50 steps.

    The learning rate rises linearly for `WARMUP_STEPS` and falls linearly to zero at the last step.
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
    """Train a new model on correct answers, and in the last sixth of the steps also on wrong ones.

    The wrong answers lower the model's accuracy but not its ability, as for pretrained models.
    """
    demonstrations = Demonstrations(tokenizer, problems, seed)
    clean, mixed = partly_wrong(0.0), partly_wrong(WRONG_SHARE)
    batches = (
        demonstrations.rows(mixed if step > steps * CLEAN_SHARE else clean) for step in itertools.count(1)
    )
    imitate(model, batches, steps, LEARNING_RATE)


def model_card(steps: int, seed: int, metrics: Metrics) -> str:
    """Return the text of the model folder's README.md."""
    return f"""---
license: apache-2.0
library_name: transformers
---

# The bundled model of bandpo

Qwen2 architecture, one token per character. It answers countdown problems ("1 3 7 8=28:" with "3*7+8-1", for
example) and is the model that bandpo trains by default. Trained in the project by

    python -m scripts.embedded_model.train --out FOLDER --steps {steps} --seed {seed}

with torch {torch.__version__}, transformers {transformers.__version__}, CPU threads: {torch.get_num_threads()}.
These are {steps} supervised steps, each on {ANSWERS} random answers to each of {PROBLEMS} training problems of the
task's default settings; in the last sixth of the steps {WRONG_SHARE:.0%} of the answers are wrong.
On the first {HELDOUT_PROBLEMS} held-out problems, at temperature 1, 16 samples per problem:

| mean@16 | pass@16 | entropy, nats per token |
|---|---|---|
| {metrics.mean_at_16:.3f} | {metrics.pass_at_16:.3f} | {metrics.entropy:.3f} |
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the model and write its folder: tokenizer, weights, model card."""
    parser = argparse.ArgumentParser(
        description="Train the bundled model on solved countdown problems and write its folder."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=1800, help="number of supervised steps")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the initial weights and of the order of the data"
    )
    options = parser.parse_args(arguments)

    task = countdown(CountdownTask())
    tokenizer = build_tokenizer()
    torch.manual_seed(options.seed)
    model = build_model(tokenizer)
    warm_start(model, tokenizer, task.train_problems(), options.steps, options.seed)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)

    metrics = measure(model, tokenizer, task.heldout_sets()[task.name][:HELDOUT_PROBLEMS], options.seed)
    print(f"held-out: {metrics}")
    card = model_card(options.steps, options.seed, metrics)
    (options.out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
