"""Time of every divergence in milliseconds per million tokens, compared with a plain bisection and with memory traffic.

    python benchmarks/bounds.py [--tokens N] [--device DEVICE] [--rounds R] [--only NAME ...]

Log-probabilities are float32, two thirds of them above −0.1 with a tail down to −40, similar to those of a policy. The
bisection is the simplest implementation: float32, 50 halvings per bound, all tokens at once. Each value is the minimum
over the rounds. The rounds of both methods alternate, so that other load on the machine slows both alike.
"""

import time
from collections.abc import Callable

import torch
from shared import command_line

from bandpo_cli.bounds import band_bounds
from bandpo_cli.registries import DIVERGENCES

DELTA = 0.05
Elementwise = Callable[[torch.Tensor], torch.Tensor]
PLAIN: dict[str, Elementwise] = {
    "kl": lambda u: -u.log(),  # linear terms of f cancel in the sum, so the shortest form is used
    "reverse-kl": lambda u: u * u.log(),
    "tv": lambda u: 0.5 * (u - 1).abs(),
    "chi2": lambda u: (u - 1).square(),
    "neyman": lambda u: (u - 1).square() / u,
    "hellinger": lambda u: (u.sqrt() - 1).square(),
    "le-cam": lambda u: (u - 1).square() / (u + 1),
    "js": lambda u: 0.5 * (u * (2 * u / (1 + u)).log() + (2 / (1 + u)).log()),
}


def logprobs(count: int, device: str) -> torch.Tensor:
    """Return float32 log-probabilities of shape [count] on `device`."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(count, generator=generator)
    frequent = -0.1 * torch.rand(count, generator=generator)
    rare = -40.0 * torch.rand(count, generator=generator) ** 3
    return torch.where(uniform < 2 / 3, frequent, rare).to(device)


def bisection(old_logprobs: torch.Tensor, f: Elementwise) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both bounds, computed by 50 halvings of the interval of the ratio."""
    p = old_logprobs.exp()

    def is_inside(r: torch.Tensor) -> torch.Tensor:
        other = (1 - r * p) / (1 - p)
        return p * f(r) + (1 - p) * f(other) <= DELTA

    def halve(inner: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            middle = (inner + outer) / 2
            within = is_inside(middle)
            inner, outer = torch.where(within, middle, inner), torch.where(within, outer, middle)
        return inner

    one = torch.ones_like(p)
    return halve(one, torch.zeros_like(p)), halve(one, 1 / p)


def traffic(old_logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Read one tensor and write two, the memory traffic of any implementation."""
    return old_logprobs + 1.0, old_logprobs - 1.0


def milliseconds(work: Callable[[], object], device: str) -> float:
    """Return the wall time of one call of `work`."""
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    synchronize()
    begin = time.perf_counter()
    work()
    synchronize()
    return 1e3 * (time.perf_counter() - begin)


def main() -> None:
    """Parse the arguments and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=list(DIVERGENCES), default=list(DIVERGENCES))
    arguments = parser.parse_args()
    device, x = arguments.device, logprobs(arguments.tokens, arguments.device)
    scale = 1e6 / arguments.tokens

    print(
        f"{arguments.tokens:,} tokens, float32, delta {DELTA}, {device}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}; milliseconds per million tokens"
    )
    with torch.no_grad():
        copy = min(milliseconds(lambda: traffic(x), device) for _ in range(20)) * scale
        print(f"read one tensor, write two: {copy:.2f}")
        print(f"{'divergence':<12}{'band_bounds':>12}{'bisection':>12}{'faster':>9}{'x traffic':>11}")
        for name in arguments.only:
            f = PLAIN[name]
            band_bounds(x, name, DELTA)  # the first call builds the table of initial values
            band, plain = [], []
            for round_index in range(arguments.rounds):
                band += [
                    milliseconds(lambda name=name: band_bounds(x, name, DELTA), device) for _ in range(3)
                ]
                if round_index < 3:
                    plain.append(milliseconds(lambda f=f: bisection(x, f), device))
            best, slow = min(band) * scale, min(plain) * scale
            print(f"{name:<12}{best:>12.1f}{slow:>12.0f}{slow / best:>8.0f}×{best / copy:>10.0f}×")


if __name__ == "__main__":
    main()
