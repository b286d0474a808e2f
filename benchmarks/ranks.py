"""Throughput of two ranks with one thread each against one rank with two threads, on the same work on a CPU.

    python benchmarks/ranks.py [--rounds 3] [--steps 6] [--only default|long]

Two regimes: the default run of the embedded model, and a Qwen2 with 5 million random weights (4 layers, width 256,
vocabulary 8,192) with completions of 128 tokens. Each round trains the first steps of the same run twice, with one rank
and with two, so that a busy machine slows both; the first step of each is not counted. Reported are medians over all
steps of all rounds. The two runs are required to have the same accuracy, length and entropy at every step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import ModelConfig, RunConfig
from bandpo_cli.models.load import load_policy, save_policy
from bandpo_cli.ranks import connected, ranks_from_environment
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.base import build_task
from bandpo_cli.training import loop
from bandpo_cli.training.components import build_components

Records = list[dict[str, Any]]

COMMON = {
    "model": {"dtype": "float32", "device": "cpu"},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 0},
    "tracking": {"mlflow": False},
}
REGIMES: dict[str, dict[str, Any]] = {
    "default": {},
    "long": {"sampling": {"prompts": 16, "samples": 4, "max_tokens": 128}, "optim": {"updates": 2}},
}
PHASES = ("step", "sample", "grade", "logprobs", "update")
SAME = ("train/accuracy", "train/response_length", "train/entropy")
THREADS = 2
"""Threads of one rank, and ranks of one thread."""


def save_model(folder: Path) -> None:
    """Write a Qwen2 with random weights and the tokenizer of the embedded model; its completions seldom end early."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    embedded = load_policy(ModelConfig())
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=embedded.stop_ids[0],
        pad_token_id=embedded.pad_id,
    )
    save_policy(replace(embedded, model=Qwen2ForCausalLM(shape)), folder)


def configured(regime: str, steps: int, place: Path) -> RunConfig:
    """Return the settings of a regime."""
    path = {} if regime == "default" else {"model": {"path": str(place / "model")}}
    # One step more than is trained: the last one of a run writes a checkpoint.
    return resolve([COMMON, REGIMES[regime], {"steps": steps + 1, **path}, *([path] if path else [])])


def train_steps(regime: str, steps: int, place: Path) -> None:
    """Train the first steps on this rank; rank 0 writes the lines of metrics.jsonl as JSON to `place`."""
    ranks = ranks_from_environment()
    torch.set_num_threads(THREADS // ranks.size)
    config = configured(regime, steps, place)
    with connected(ranks, "cpu"), tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder), "run")
        components = build_components(config, build_task(config.task), ranks)
        with closing(components), closing(loop.train(config, components, run)) as reports:
            records = [report.record for report in islice(reports, steps)]
    if ranks.is_main:
        (place / f"{ranks.size}.json").write_text(json.dumps(records))


def run(regime: str, steps: int, place: Path, ranks: int) -> Records:
    """Train with one process or with torchrun's, and return the lines of metrics.jsonl."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    )
    command = [
        sys.executable,
        *launcher,
        __file__,
        "--train",
        regime,
        "--steps",
        str(steps),
        "--place",
        str(place),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": str(THREADS // ranks)}
    subprocess.run(command, check=True, env=env)
    records: Records = json.loads((place / f"{ranks}.json").read_text())
    return records


def check_equal(one: Records, two: Records) -> None:
    """Raise ValueError if the two runs did not do the same work."""
    for left, right in zip(one, two, strict=True):
        for key in SAME:
            if abs(left[key] - right[key]) > 1e-4:
                raise ValueError(
                    f"step {left['step']}: {key} is {left[key]} with one rank, {right[key]} with two"
                )


def measure(regime: str, rounds: int, steps: int, place: Path) -> None:
    """Measure a regime and print its table."""
    records: dict[int, Records] = {1: [], THREADS: []}
    ratios = []
    for number in range(rounds):
        order = (1, THREADS) if number % 2 == 0 else (THREADS, 1)
        found = {ranks: run(regime, steps, place, ranks) for ranks in order}
        check_equal(found[1], found[THREADS])
        for ranks in order:
            records[ranks] += found[ranks][1:]
        seconds = {
            ranks: statistics.median(each["time/step"] for each in found[ranks][1:]) for ranks in order
        }
        ratios.append(seconds[1] / seconds[THREADS])
        print(
            f"{regime}, round {number + 1}: {seconds[1]:.3f} s per step, {seconds[THREADS]:.3f} s", flush=True
        )
    count = len(records[1])
    print(f"\n{regime}: {rounds} rounds of {steps} steps, {count} steps of each counted; median seconds")
    print(f"{'':22}" + "".join(f"{phase:>10}" for phase in PHASES) + f"{'tokens/s':>10}")
    for ranks, name in ((1, f"1 rank, {THREADS} threads"), (THREADS, f"{THREADS} ranks, 1 thread")):
        seconds_by_phase = [
            statistics.median(each[f"time/{phase}"] for each in records[ranks]) for phase in PHASES
        ]
        speed = statistics.median(each["perf/sampled_tokens_per_s"] for each in records[ranks])
        print(f"{name:22}" + "".join(f"{value:10.3f}" for value in seconds_by_phase) + f"{speed:10,.0f}")
    print(
        f"steps per second, 2 ranks / 1 rank: median over rounds {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", choices=list(REGIMES))
    parser.add_argument("--train", choices=list(REGIMES), help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train_steps(options.train, options.steps, options.place)
        return
    with tempfile.TemporaryDirectory(prefix="bandpo-ranks-") as folder:
        save_model(Path(folder) / "model")
        for regime in [options.only] if options.only else REGIMES:
            measure(regime, options.rounds, options.steps, Path(folder))


if __name__ == "__main__":
    main()
