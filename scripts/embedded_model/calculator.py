"""Training of the bundled model of the calculator task: minutes of supervised learning on conversations.

    python -m scripts.embedded_model.calculator --out FOLDER

A quarter of the demonstrations call the calculator and copy its result, some of them with a wrong expression. All
others answer at once, which a model of this size rarely does correctly. The trained model can use its tool and mostly
does not, which leaves room for reinforcement learning.
"""

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.grading.countdown import calculate
from bandpo_cli.models.packing import Row
from bandpo_cli.sampling.prompt_encoding import PromptEncoder
from bandpo_cli.tasks.task import build_task
from scripts.embedded_model.build import CALL, build_calculator_tokenizer, build_model
from scripts.embedded_model.train import imitate

PROBLEMS, ANSWERS = 64, 4
"""Per step: 64 prompts with 4 conversations each; each prompt is computed once."""
LEARNING_RATE = 3e-3
CALL_SHARE, WRONG_SHARE = 0.25, 0.3
"""Fraction of the demonstrations with a call, and fraction of the calls with a wrong expression."""
HIDDEN_SIZE, LAYERS = 64, 3

CARD = """---
license: apache-2.0
library_name: transformers
---

# The bundled model of bandpo for its calculator task

Qwen2 architecture, one token per character and two for the constant parts of a call. Trained in the project by

    python -m scripts.embedded_model.calculator --out FOLDER --steps {steps} --seed {seed}

with torch {torch}, transformers {transformers}, CPU threads: {threads}. These are {steps} supervised steps, each on
{answers} conversations for each of {problems} training problems of the task `calculator`. {calls:.0%} of them call the
calculator, {wrong:.0%} of these with a wrong expression; the others answer at once.
"""


def config() -> RunConfig:
    """Return the settings of the task."""
    return resolve([{"task": {"name": "calculator"}}])


def demonstrations(tokenizer: Any, seed: int) -> Iterator[list[Row]]:
    """Yield batches of conversations without end, which depend on the seed only."""
    rng, encoder = random.Random(seed), PromptEncoder.of_run(tokenizer, config())
    problems = build_task(config().task).train_problems()
    prompts = [prompt.token_ids for prompt in encoder.encode(problems)]

    def ended(text: str) -> list[int]:
        return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    def conversation(expression: str, answer: str) -> list[int]:
        if rng.random() >= CALL_SHARE:
            return ended(answer)
        if rng.random() < WRONG_SHARE:
            expression = with_error(rng, expression)
        result = str(calculate(expression))
        inserted = encoder.turn_ids([{"role": "tool", "content": result}])
        return [*ended(expression.join(CALL)), *(~token for token in inserted), *ended(result)]

    while True:
        chosen = rng.choices(range(len(problems)), k=PROBLEMS)
        yield [
            Row(prompts[i], [conversation(*question(problems[i])) for _ in range(ANSWERS)]) for i in chosen
        ]


def question(problem: Any) -> tuple[str, str]:
    """Return the expression and the answer of a problem."""
    return problem.prompt[0].content.removesuffix("="), problem.answer


def with_error(rng: random.Random, expression: str) -> str:
    """Return an expression with another digit or operator in one place."""
    place = rng.randrange(len(expression))
    kind = "123456789" if expression[place].isdigit() else "+-*"
    other = rng.choice([character for character in kind if character != expression[place]])
    return expression[:place] + other + expression[place + 1 :]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the model and write its folder: tokenizer, weights, model card."""
    parser = argparse.ArgumentParser(description="Train the bundled model of the task calculator.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=1000, help="number of supervised steps")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the initial weights and of the order of the data"
    )
    options = parser.parse_args(arguments)

    tokenizer = build_calculator_tokenizer()
    torch.manual_seed(options.seed)
    model = build_model(tokenizer, HIDDEN_SIZE, LAYERS)
    batches = itertools.islice(demonstrations(tokenizer, options.seed), options.steps)
    imitate(model, batches, options.steps, LEARNING_RATE)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    card = CARD.format(
        steps=options.steps, seed=options.seed, torch=torch.__version__, transformers=transformers.__version__,
        threads=torch.get_num_threads(), problems=PROBLEMS, answers=ANSWERS, calls=CALL_SHARE, wrong=WRONG_SHARE,
    )  # fmt: skip
    (options.out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
