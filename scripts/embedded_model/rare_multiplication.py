"""Base model for experiments on rare tokens: the bundled model, trained to rarely multiply.

    python -m scripts.embedded_model.rare_multiplication --out FOLDER

Two minutes of supervised learning on answers without `*`: correct ones with + and - if there are any, else any
expression with + and -. A fraction `TIMES_SHARE` of the answers are correct ones of any kind. The trained model can
still multiply but rarely does, as a pretrained model may have a strategy that it rarely uses. Targets over 36 cannot be
reached without `*` (four numbers up to 9), so correct answers to them contain a rare token.
"""

import argparse
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bandpo_cli.config.task import CountdownTask
from bandpo_cli.models.load import embedded_model_path
from bandpo_cli.tasks.task import countdown
from scripts.embedded_model.measure import measure
from scripts.embedded_model.train import AnswerSampler, Demonstrations, any_expression, imitate

LEARNING_RATE = 5e-4
TIMES_SHARE = 0.03
FIRST_PRODUCT_TARGET = 37
"""Smallest target that needs a `*`."""
HELDOUT_PROBLEMS = 256
"""Problems of the evaluation at the end."""


def rarely_multiplying(times_share: float) -> AnswerSampler:
    """Return a sampler of answers without `*`, correct ones if there are any.

    With probability `times_share` it samples from all correct answers instead.
    """

    def sample_answer(rng: random.Random, prompt: str, correct: Sequence[str]) -> str:
        if rng.random() < times_share:
            return rng.choice(correct)
        sums = [answer for answer in correct if "*" not in answer]
        return rng.choice(sums) if sums else any_expression(rng, prompt, "+-")

    return sample_answer


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the model and write its folder: tokenizer and weights."""
    parser = argparse.ArgumentParser(
        description="Train the bundled model to rarely multiply and write its folder."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=150, help="number of supervised steps")
    parser.add_argument(
        "--times-share", type=float, default=TIMES_SHARE, help="fraction of the answers that may multiply"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the data")
    options = parser.parse_args(arguments)

    base = embedded_model_path()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    torch.manual_seed(options.seed)
    demonstrations = Demonstrations(tokenizer, countdown(CountdownTask()).train_problems(), options.seed)
    sample_answer = rarely_multiplying(options.times_share)
    batches = (demonstrations.rows(sample_answer) for _ in itertools.count())
    imitate(model, batches, options.steps, LEARNING_RATE)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)

    task = countdown(CountdownTask(min_target=FIRST_PRODUCT_TARGET))
    metrics = measure(model, tokenizer, task.heldout_sets()[task.name][:HELDOUT_PROBLEMS], options.seed)
    print(f"held-out targets from {FIRST_PRODUCT_TARGET}: {metrics}")


if __name__ == "__main__":
    main()
