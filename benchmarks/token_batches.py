"""Time that the trainer's Python code takes per million tokens, from the engine's completions to tensors and layouts.

    python benchmarks/token_batches.py [--groups P] [--samples G] [--rounds R]

Measured are the steps of an update that handle tokens outside of the model: completions from an engine's lists, pickled
and read again, as between ranks; rows and micro-batches of 16,384 tokens with the layouts that attention takes; and the
log-probs as one tensor. Prompts have 60 to 200 tokens, completions 20 to 600. To compare two checkouts, run the file of
one of them in both. Reported is the CPU time of the fastest round, in seconds per million tokens of the completions.
"""

from __future__ import annotations

import argparse
import pickle
import random
import time

import torch

from bandpo_cli.models.packing import batch_rows, collate, rows_from_groups
from bandpo_cli.training import experience
from bandpo_cli.types import Completion, Grade, Group, Problem, Rollout

try:
    flat_values = experience._flat
except AttributeError:  # in an earlier version it is elsewhere
    from bandpo_cli.training.old_policy import _flat as flat_values  # type: ignore[import-not-found,no-redef]

CPU = torch.device("cpu")
PROBLEM = Problem("1", "1+1", "2", "benchmark", "number")
MICRO_BATCH_TOKENS = 16_384


def engine_lists(groups: int, samples: int) -> list[tuple[list[int], list[tuple[list[int], list[float]]]]]:
    """Return a prompt and `samples` lists of token ids and log-probs for each group."""
    chance = random.Random(0)

    def ids(low: int, high: int) -> list[int]:
        return [chance.randrange(150_000) for _ in range(chance.randint(low, high))]

    made = []
    for _ in range(groups):
        answers = [ids(20, 600) for _ in range(samples)]
        made.append((ids(60, 200), [(answer, [-chance.random() for _ in answer]) for answer in answers]))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lists = engine_lists(options.groups, options.samples)
    tokens = sum(len(answer) for _, answers in lists for answer, _ in answers)
    phases: dict[str, list[float]] = {"completions, pickled": [], "rows and layouts": [], "log-probs": []}
    for _ in range(options.rounds):
        start = time.process_time()
        grade = Grade(0.0, correct=False, verdict="wrong")
        groups = [
            Group(
                PROBLEM,
                tuple(
                    Rollout(PROBLEM, "", tuple(prompt), Completion(ids, values, "stop", 0), "", grade)
                    for ids, values in answers
                ),
            )
            for prompt, answers in lists
        ]
        groups = pickle.loads(pickle.dumps(groups))
        phases["completions, pickled"].append(time.process_time() - start)

        start = time.process_time()
        for rows in batch_rows(rows_from_groups(groups), MICRO_BATCH_TOKENS):
            packing = collate(rows, CPU).packing
            assert packing.blocks
            assert len(packing.block_scatter_index)
        phases["rows and layouts"].append(time.process_time() - start)

        start = time.process_time()
        completions = [rollout.completion for group in groups for rollout in group.rollouts_G]
        assert len(flat_values(completions, lambda each: each.logprobs, CPU)) == tokens
        phases["log-probs"].append(time.process_time() - start)
    print(
        f"{tokens:,} tokens in {options.groups} groups of {options.samples}; seconds of CPU per million tokens"
    )
    for name, seconds in phases.items():
        print(f"{name:24}{min(seconds) / tokens * 1e6:8.3f}")
    print(f"{'sum':24}{sum(min(seconds) for seconds in phases.values()) / tokens * 1e6:8.3f}")


if __name__ == "__main__":
    main()
