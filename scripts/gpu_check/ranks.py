"""Checks of training on two GPUs: `--nproc 2` against one rank, the processes that torchrun starts for it.

    python -m torch.distributed.run --nproc-per-node 2 -m scripts.gpu_check.ranks JOB

trains the runs of the file JOB, which `check_ranks` writes, and writes the results beside it. On a CPU the ranks
communicate by gloo, which tests this code.
"""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_check.results import Measured, Skipped
from scripts.gpu_check.training import (
    TrainedRun,
    difference,
    is_missing,
    largest_difference,
    measured_run,
    phase_values,
    step_limits,
    train_steps,
)
from scripts.gpu_check.work import Work

RANKS = 2
SHAPE = "0.5b"
LIMIT_S = 400.0
"""Seconds after which the ranks are killed: one of them waits for another."""
MIN_EQUAL = 0.95
"""Smallest share of equal completions of the first step on GPUs. The batch of a rank has another size, and its products
are rounded in another way: a token changes where its random number is that close to the boundary of two tokens."""
MAX_DIFFERENCE = 0.1
"""Largest difference of loss, gradient norm and metrics of the first step on GPUs, where completions may differ."""
MIN_SPEEDUP = 1.0
"""Smallest ratio of the seconds per step of one GPU and of two. Two cards have not been measured yet."""


@dataclass(frozen=True)
class Job:
    """Runs for the ranks to train, one after another.

    Attributes:
        work: the device, the shapes, and the model folders that have been written.
        runs: the settings that differ from those of `Work.config`, by section, for each run by name.
        result: the file for what each run has left.
    """

    work: Work
    runs: Mapping[str, Mapping[str, Any]]
    result: Path


def check_ranks(work: Work) -> Measured:
    """Compare two ranks with one: completions, loss, gradient norm, a checkpoint resumed by one rank, throughput."""
    cards = torch.cuda.device_count() if work.on_gpu else RANKS
    if cards < RANKS:
        raise Skipped(f"this machine has {cards} GPU; the checks of several ranks need {RANKS}")
    exact = {"model": {"dtype": "float32"}, "checkpoint": {"every": 2, "keep_best": 0}}
    runs: dict[str, Mapping[str, Any]] = {"float32": exact, "bfloat16": {}}
    if work.on_gpu and not is_missing("vllm"):
        runs["vllm"] = {"sampling": {"engine": "vllm"}}
    found = run_on_ranks(work, runs)
    two = found["float32"]
    checkpoint = two.folder / "checkpoints" / "step-000002"
    one = train_steps(work, work.config(SHAPE, **exact), "one-rank")
    resumed = train_steps(work, work.config(SHAPE, **exact), "resumed-by-one", checkpoint=checkpoint)
    measured = compare(work, one, two, resumed)
    add_throughput(work, measured, measured_run(work, SHAPE), found["bfloat16"])
    if "vllm" in found:
        engine = step_limits(work, found["vllm"])
        measured.values |= {f"vllm {name}": value for name, value in engine.values.items()}
        measured.shortfalls += [f"vllm {shortfall}" for shortfall in engine.shortfalls]
    return measured


def compare(work: Work, one: TrainedRun, two: TrainedRun, resumed: TrainedRun) -> Measured:
    """Return how far two ranks are from one in float32, and one rank that resumes from their checkpoint from them."""
    first_one, first_two, last = one.records[0], two.records[0], two.records[-1]
    measured = Measured(
        {
            "completions_equal": equal_share(one.texts(1), two.texts(1)),
            "loss_difference": difference(first_one["optim/loss"], first_two["optim/loss"]),
            "grad_norm_difference": difference(first_one["optim/grad_norm"], first_two["optim/grad_norm"]),
            "resumed_completions_equal": equal_share(two.texts(3), resumed.texts(3)),
            "resumed_metrics_difference": largest_difference(last, resumed.records[-1]),
        }
    )
    exact = not work.on_gpu
    for name in ("completions_equal", "resumed_completions_equal"):
        measured.at_least(name, 1.0 if exact else MIN_EQUAL)
    for name in ("loss_difference", "grad_norm_difference", "resumed_metrics_difference"):
        measured.at_most(name, 1e-4 if exact else MAX_DIFFERENCE)
    return measured


def add_throughput(work: Work, measured: Measured, one: TrainedRun, two: TrainedRun) -> None:
    """Add the phases of the run of two ranks, and how much faster it was than one."""
    measured.values |= {f"two ranks {name}": value for name, value in phase_values(two).items()}
    measured.values["speedup"] = one.mean("time/step") / two.mean("time/step")
    if not work.tiny:
        measured.at_least("speedup", MIN_SPEEDUP)


def equal_share(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Return the share of equal completions; NaN where their numbers differ."""
    if len(one) != len(other) or not one:
        return math.nan
    return sum(left == right for left, right in zip(one, other, strict=True)) / len(one)


def run_on_ranks(work: Work, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, TrainedRun]:
    """Train the runs on two ranks and return what rank 0 recorded, by name."""
    result = work.folder / "ranks.pickle"
    job = work.folder / "ranks-job.pickle"
    work.model(SHAPE)
    job.write_bytes(pickle.dumps(Job(work, runs, result)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["-m", "scripts.gpu_check.ranks", str(job)]
    threads = str(max(1, torch.get_num_threads() // RANKS))
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": threads}, stdout=2)
    try:
        if process.wait(LIMIT_S) or not result.exists():
            raise RuntimeError(f"the ranks ended with exit code {process.returncode}")
    finally:
        process.terminate()  # the launcher ends the ranks
        process.wait()
    found: dict[str, TrainedRun] = pickle.loads(result.read_bytes())
    return found


def main() -> None:
    """Train the runs of a job on this rank."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    from bandpo_cli.processes.ranks import connected, ranks_from_environment

    job: Job = pickle.loads(Path(sys.argv[1]).read_bytes())
    work, ranks = job.work, ranks_from_environment()
    found = {}
    with connected(ranks, "cuda" if work.on_gpu else "cpu"):
        for name, sections in job.runs.items():
            found[name] = train_steps(work, work.config(SHAPE, **sections), f"ranks-{name}", ranks=ranks)
    if ranks.is_main:
        job.result.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
