"""Memory and time of log-probs and entropy by tiles, beside the plain way that makes the matrix of all logits.

    python benchmarks/logprobs.py [--tokens N ...] [--vocabulary V] [--hidden H] [--rounds R] [--threads T]

Forward and backward, float32, on the CPU, with gradients into hidden states and weights; the shape is the output layer
of Qwen2.5-0.5B. Plain: logits = hidden·weightᵀ, log_softmax, gather, and the entropy from the log-probs without
gradient. Memory: the process's peak resident set in a process for each figure, above inputs, weights and their
gradients. Time: both ways in one process in turn, medians of the rounds. A line reads `-` where the plain way does
not fit in the memory that is free (it takes 2.6 such matrices).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bandpo_cli.models.logprobs import linear_logprobs

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
PLAIN_MATRICES, SPARE_MB = 2.6, 4000  # matrices that it holds at its peak; what is left for others


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, upstream: torch.Tensor) -> None:
    """The plain way; nothing is kept longer than autograd needs it."""
    log_p = torch.log_softmax(hidden @ weight.t(), dim=-1)
    with torch.no_grad():
        -(log_p.exp() * log_p).sum(dim=-1)
    chosen = log_p.gather(1, targets[:, None]).squeeze(1)
    del log_p
    (chosen * upstream).sum().backward()


def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, upstream: torch.Tensor) -> None:
    """The package's way."""
    chosen, _ = linear_logprobs(hidden, weight, None, targets, 1.0, with_entropy=True)
    (chosen * upstream).sum().backward()


WAYS: dict[str, Callable[..., None]] = {"plain": plain, "ours": ours}


def make_inputs(tokens: int, vocabulary: int, width: int) -> Inputs:
    """Hidden states, weights, targets, and the gradient that comes in; no token's is zero."""
    torch.manual_seed(0)
    hidden = torch.empty(tokens, width).normal_().requires_grad_()
    weight = torch.empty(vocabulary, width).normal_(std=0.05).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,)), torch.empty(tokens).normal_()


def peak_mb() -> float:
    """The process's peak resident set so far, MB (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure_memory(way: str, inputs: Inputs) -> float:
    """Return MB above what was there and above the gradients. The peak cannot be reset: one call a process."""
    hidden, weight, targets, upstream = inputs
    # The libraries' own buffers and code come first; 64 tokens and a piece of the vocabulary do that.
    small = [tensor.detach()[:64].clone().requires_grad_() for tensor in (hidden, weight)]
    WAYS[way](*small, targets[:64] % 64, upstream[:64])
    before = peak_mb()
    WAYS[way](*inputs)
    return peak_mb() - before - 4 * (hidden.numel() + weight.numel()) / 1e6


def measure_time(ways: list[str], inputs: Inputs, rounds: int) -> dict[str, float]:
    """Return median seconds; a first round of each is left out."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way in ways:
            inputs[0].grad = inputs[1].grad = None
            started = time.perf_counter()
            WAYS[way](*inputs)
            seconds[way].append(time.perf_counter() - started)
    return {way: statistics.median(values[1:]) for way, values in seconds.items()}


def free_mb() -> float:
    """Memory that a new process can have, MB."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit("/proc/meminfo names no MemAvailable")


def in_a_process(arguments: argparse.Namespace, tokens: int, job: str) -> object:
    """Run one measurement in a process of its own."""
    command = [
        sys.executable, __file__, "--job", job, "--tokens", str(tokens), "--vocabulary", str(arguments.vocabulary),
        "--hidden", str(arguments.hidden), "--rounds", str(arguments.rounds), "--threads", str(arguments.threads),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    if arguments.job:
        kind, *ways = arguments.job.split(":")
        inputs = make_inputs(arguments.tokens[0], arguments.vocabulary, arguments.hidden)
        found = (
            measure_memory(ways[0], inputs)
            if kind == "memory"
            else measure_time(ways, inputs, arguments.rounds)
        )
        print(json.dumps(found))
        return

    print(
        f"{'tokens':>7} {'plain MB':>9} {'ours MB':>8} {'fraction':>9} {'plain s':>8} {'ours s':>7} {'ratio':>6}"
    )
    for tokens in arguments.tokens:
        needed = PLAIN_MATRICES * 4e-6 * tokens * arguments.vocabulary + SPARE_MB
        ways = ["plain", "ours"] if needed < free_mb() else ["ours"]
        memory = {way: in_a_process(arguments, tokens, f"memory:{way}") for way in ways}
        seconds = in_a_process(arguments, tokens, ":".join(["time", *ways]))
        mb, s = memory["ours"], seconds["ours"]
        if "plain" in ways:
            their_mb, their_s = memory["plain"], seconds["plain"]
            print(
                f"{tokens:7d} {their_mb:9.0f} {mb:8.0f} {mb / their_mb:9.4f} "
                f"{their_s:8.2f} {s:7.2f} {s / their_s:6.2f}",
                flush=True,
            )
        else:
            print(f"{tokens:7d} {'-':>9} {mb:8.0f} {'-':>9} {'-':>8} {s:7.2f} {'-':>6}", flush=True)


if __name__ == "__main__":
    main()
