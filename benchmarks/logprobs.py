"""Memory and time of log-probs and entropy by tiles, compared with the direct computation from all logits.

    python benchmarks/logprobs.py [--tokens N ...] [--vocabulary V] [--hidden H] [--rounds R] [--threads T]

Forward and backward, float32, on the CPU, with gradients into hidden states and weights; the shape is the output layer
of Qwen2.5-0.5B. Direct: logits = hidden·weightᵀ, log_softmax, gather, and the entropy from the log-probs without
gradient. Memory: peak resident set of a separate process per measurement, minus inputs, weights and their gradients.
Time: both implementations alternate in one process; medians of the rounds. `-` means that the direct computation does
not fit into the free memory (it needs 2.6 matrices of all logits).
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from shared import command_line

from bandpo_cli.models.logprobs import linear_logprobs

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
DIRECT_MATRICES = 2.6
"""Matrices of all logits that the direct computation holds at its peak."""
SPARE_MB = 4000
"""Memory that is left for other processes."""


def direct(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, upstream: torch.Tensor) -> None:
    """Run the direct computation; every tensor is freed as soon as autograd allows."""
    log_p = torch.log_softmax(hidden @ weight.t(), dim=-1)
    with torch.no_grad():
        -(log_p.exp() * log_p).sum(dim=-1)
    chosen = log_p.gather(1, targets[:, None]).squeeze(1)
    del log_p
    (chosen * upstream).sum().backward()


def tiled(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, upstream: torch.Tensor) -> None:
    """Run the package's computation by tiles."""
    chosen = linear_logprobs(hidden, weight, None, targets, 1.0, with_entropy=True).logprobs
    (chosen * upstream).sum().backward()


IMPLEMENTATIONS: dict[str, Callable[..., None]] = {"direct": direct, "tiled": tiled}


def make_inputs(tokens: int, vocabulary: int, width: int) -> Inputs:
    """Return hidden states, weights, targets and the upstream gradient, which is zero for no token."""
    torch.manual_seed(0)
    hidden = torch.empty(tokens, width).normal_().requires_grad_()
    weight = torch.empty(vocabulary, width).normal_(std=0.05).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, (tokens,)), torch.empty(tokens).normal_()


def peak_mb() -> float:
    """Return the process's peak resident set so far in MB (Linux reports KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure_memory(name: str, inputs: Inputs) -> float:
    """Return the additional peak memory in MB without the gradients. The peak cannot be reset: one call per process."""
    hidden, weight, targets, upstream = inputs
    # A small call first (64 tokens, 64 vocabulary entries) loads the libraries' code and buffers.
    small = [tensor.detach()[:64].clone().requires_grad_() for tensor in (hidden, weight)]
    IMPLEMENTATIONS[name](*small, targets[:64] % 64, upstream[:64])
    before = peak_mb()
    IMPLEMENTATIONS[name](*inputs)
    return peak_mb() - before - 4 * (hidden.numel() + weight.numel()) / 1e6


def measure_time(rounds: int, names: list[str], inputs: Inputs) -> dict[str, float]:
    """Return median seconds per implementation, without a first warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds + 1):
        for name in names:
            inputs[0].grad = inputs[1].grad = None
            started = time.perf_counter()
            IMPLEMENTATIONS[name](*inputs)
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def free_mb() -> float:
    """Return the memory in MB that a new process can use."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit("/proc/meminfo has no MemAvailable")


def run_in_process(
    arguments: argparse.Namespace, tokens: int, function: Callable[..., Any], *rest: Any
) -> Any:
    """Call a function with inputs in a process of its own, because the peak of the memory cannot be reset."""
    shape = (tokens, arguments.vocabulary, arguments.hidden)
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(with_inputs, arguments.threads, shape, function, *rest).result()


def with_inputs(threads: int, shape: tuple[int, int, int], function: Callable[..., Any], *rest: Any) -> Any:
    """Return the result of a function for inputs of this shape."""
    torch.set_num_threads(threads)
    return function(*rest, make_inputs(*shape))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    print(
        f"{'tokens':>7} {'direct MB':>9} {'tiled MB':>8} {'fraction':>9} {'direct s':>8} {'tiled s':>7} {'ratio':>6}"
    )
    for tokens in arguments.tokens:
        needed = DIRECT_MATRICES * 4e-6 * tokens * arguments.vocabulary + SPARE_MB
        names = ["direct", "tiled"] if needed < free_mb() else ["tiled"]
        memory = {name: run_in_process(arguments, tokens, measure_memory, name) for name in names}
        seconds = run_in_process(arguments, tokens, measure_time, arguments.rounds, names)
        mb, s = memory["tiled"], seconds["tiled"]
        if "direct" in names:
            direct_mb, direct_s = memory["direct"], seconds["direct"]
            print(
                f"{tokens:7d} {direct_mb:9.0f} {mb:8.0f} {mb / direct_mb:9.4f} "
                f"{direct_s:8.2f} {s:7.2f} {s / direct_s:6.2f}",
                flush=True,
            )
        else:
            print(f"{tokens:7d} {'-':>9} {mb:8.0f} {'-':>9} {'-':>8} {s:7.2f} {'-':>6}", flush=True)


if __name__ == "__main__":
    main()
