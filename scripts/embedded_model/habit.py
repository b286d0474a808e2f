"""Makes a base for experiments on rare tokens: the embedded model, out of the habit of multiplying.

    python -m scripts.embedded_model.habit --out FOLDER

Two minutes of supervised learning on answers that avoid `*`: right ones with + and - where there are some, else any
expression with + and -. One answer in `1 / TIMES_SHARE` is a right one of any kind. What comes out still knows how to
multiply and hardly ever starts to, as a pretrained model can know a strategy that it never uses. Targets over 36
cannot be reached without `*` (four numbers up to 9), so there the good answers begin with a rare token.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bandpo_cli.config.task import CountdownTask
from bandpo_cli.models.load import embedded_model_path
from bandpo_cli.tasks.countdown import Countdown
from scripts.embedded_model.measure import measure
from scripts.embedded_model.train import Answer, Demonstrations, any_expression, imitate

LEARNING_RATE = 5e-4
TIMES_SHARE = 0.03
BEYOND_SUMS = 37  # the first target that needs a *
HELDOUT_PROBLEMS = 256  # measured at the end


def hardly_times(times_share: float) -> Answer:
    """An answer without `*`, right where one can be; in a `times_share` of draws any right answer."""

    def draw(rng: random.Random, prompt: str, right: Sequence[str]) -> str:
        if rng.random() < times_share:
            return rng.choice(right)
        sums = [answer for answer in right if "*" not in answer]
        return rng.choice(sums) if sums else any_expression(rng, prompt, "+-")

    return draw


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the folder: tokenizer and weights."""
    parser = argparse.ArgumentParser(description="Make a base that hardly ever multiplies.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=150, help="supervised steps")
    parser.add_argument("--times-share", type=float, default=TIMES_SHARE, help="answers that may multiply")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the data")
    options = parser.parse_args(arguments)

    start = embedded_model_path()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    torch.manual_seed(options.seed)
    demonstrations = Demonstrations(tokenizer, Countdown(CountdownTask()).train_problems(), options.seed)
    answer = hardly_times(options.times_share)
    imitate(model, (demonstrations.rows(answer) for _ in itertools.count()), options.steps, LEARNING_RATE)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)

    task = Countdown(CountdownTask(min_target=BEYOND_SUMS))
    figures = measure(model, tokenizer, task.heldout_sets()[task.name][:HELDOUT_PROBLEMS], options.seed)
    print(f"held-out targets from {BEYOND_SUMS}: {figures}")


if __name__ == "__main__":
    main()
