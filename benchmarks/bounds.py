"""Milliseconds per million tokens for every divergence, beside a plain bisection and beside mere memory traffic.

    python benchmarks/bounds.py [--tokens N] [--device DEVICE] [--rounds R] [--only NAME ...]

Log-probabilities are float32, two thirds of them above −0.1 and a tail down to −40, as a policy's are. The
bisection is what one writes first: float32, 50 halvings for each bound, all tokens at once. Each figure is the
least of the rounds, and the rounds of all are interleaved, so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from bandpo_cli.bounds import band_bounds
from bandpo_cli.registries import DIVERGENCES

DELTA = 0.05
Elementwise = Callable[[torch.Tensor], torch.Tensor]
PLAIN: dict[str, Elementwise] = {
    "kl": lambda u: -u.log(),  # the linear parts of f cancel in the sum, so the shortest form is taken
    "reverse-kl": lambda u: u * u.log(),
    "tv": lambda u: 0.5 * (u - 1).abs(),
    "chi2": lambda u: (u - 1).square(),
    "neyman": lambda u: (u - 1).square() / u,
    "hellinger": lambda u: (u.sqrt() - 1).square(),
    "le-cam": lambda u: (u - 1).square() / (u + 1),
    "js": lambda u: 0.5 * (u * (2 * u / (1 + u)).log() + (2 / (1 + u)).log()),
}


def logprobs(count: int, device: str) -> torch.Tensor:
    """Float32 log-probabilities of shape (count,)."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand(count, generator=generator)
    frequent, rare = (
        -0.1 * torch.rand(count, generator=generator),
        -40.0 * torch.rand(count, generator=generator) ** 3,
    )
    return torch.where(draw < 2 / 3, frequent, rare).to(device)


def bisection(old_logprobs: torch.Tensor, f: Elementwise) -> tuple[torch.Tensor, torch.Tensor]:
    """Both bounds by 50 halvings of the ratio's interval."""
    p = old_logprobs.exp()

    def inside(r: torch.Tensor) -> torch.Tensor:
        other = (1 - r * p) / (1 - p)
        return p * f(r) + (1 - p) * f(other) <= DELTA

    def halve(inner: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            middle = (inner + outer) / 2
            within = inside(middle)
            inner, outer = torch.where(within, middle, inner), torch.where(within, outer, middle)
        return inner

    one = torch.ones_like(p)
    return halve(one, torch.zeros_like(p)), halve(one, 1 / p)


def traffic(old_logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Read one tensor, write two."""
    return old_logprobs + 1.0, old_logprobs - 1.0


def milliseconds(work: Callable[[], object], device: str) -> float:
    """Wall time of one call."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    wait()
    begin = time.perf_counter()
    work()
    wait()
    return 1e3 * (time.perf_counter() - begin)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=list(DIVERGENCES), default=list(DIVERGENCES))
    arguments = parser.parse_args()
    device, x = arguments.device, logprobs(arguments.tokens, arguments.device)
    scale = 1e6 / arguments.tokens

    print(
        f"{arguments.tokens:,} tokens, float32, delta {DELTA}, {device}, {torch.get_num_threads()} threads, ",
        end="",
    )
    print(f"torch {torch.__version__}; milliseconds per million tokens")
    with torch.no_grad():
        copy = min(milliseconds(lambda: traffic(x), device) for _ in range(20)) * scale
        print(f"read one tensor, write two: {copy:.2f}")
        print(f"{'divergence':<12}{'band_bounds':>12}{'bisection':>12}{'faster':>9}{'x traffic':>11}")
        for name in arguments.only:
            f = PLAIN[name]
            band_bounds(x, name, DELTA)  # makes the table of starts, which later calls with this delta share
            band, plain = [], []
            for turn in range(arguments.rounds):
                band += [
                    milliseconds(lambda name=name: band_bounds(x, name, DELTA), device) for _ in range(3)
                ]
                if turn < 3:
                    plain.append(milliseconds(lambda f=f: bisection(x, f), device))
            best, slow = min(band) * scale, min(plain) * scale
            print(f"{name:<12}{best:>12.1f}{slow:>12.0f}{slow / best:>8.0f}×{best / copy:>10.0f}×")


if __name__ == "__main__":
    main()
