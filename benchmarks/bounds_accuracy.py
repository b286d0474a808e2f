"""Largest relative error of the bounds of every divergence, compared with roots in 60-digit arithmetic.

    python benchmarks/bounds_accuracy.py [--points N] [--only NAME ...]

log p is sampled from [−80, −1e-9] (half log-uniform towards 0, half uniform), δ from [1e-4, 2]. Both implementations
are measured: for single tokens, and for a batch that is large enough for tables.

Errors that no method can avoid in the type are reported separately. A lower bound close to 0 is a difference of nearly
equal numbers, and one rounding of p = exp(log p) in the type of the computation changes it by its condition number
|∂log r/∂log p| times 1e-16. A point counts as `ill` if that number exceeds 1000; its error is reported in its own
column, divided by the condition number. Bounds below the type's smallest normal number (lower bounds of kl) and above
its largest number are excluded.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import mpmath as mp
import numpy as np
import torch
from shared import command_line

from bandpo_cli.bounds import band_bounds
from bandpo_cli.bounds.band import find_divergence
from bandpo_cli.bounds.solver import MIN_TOKENS_FOR_TABLE
from bandpo_cli.registries import DIVERGENCES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.bounds.oracle import oracle, rounding_change  # the package `tests` is not installed

BATCH = {True: 4096, False: MIN_TOKENS_FOR_TABLE}
"""Tokens of a batch that is large enough for tables, by whether the divergence has a closed form (as kl has)."""


def computed(logp: float, name: str, delta: float, dtype: torch.dtype, batch: bool) -> tuple[float, float]:
    """Return both bounds of one token, computed alone or in a batch."""
    count = BATCH[find_divergence(name).closed_form is not None] if batch else 1
    bounds = band_bounds(torch.full((count,), logp, dtype=dtype), name, delta)
    return bounds.lower[0].item(), bounds.upper[0].item()


def points(count: int) -> Iterator[tuple[float, float]]:
    """Yield (log p, δ): the ends of the range, then `count` random points."""
    random = np.random.default_rng(0)
    deltas = (1e-4, 0.05, 2.0)
    yield from ((logp, delta) for logp in (-80.0, -1e-9) for delta in deltas)
    # Lower bounds of kl, about exp(−δ/p), slightly above the smallest normal number of either type.
    yield from ((math.log(delta / depth), delta) for depth in (80.0, 600.0, 690.0) for delta in deltas)
    for index in range(count):
        logp = -(10 ** random.uniform(-9, np.log10(80))) if index % 2 else -random.uniform(0, 80)
        yield logp, deltas[index % 3] if index % 4 else 10 ** random.uniform(-4, np.log10(2))


def measure(name: str, dtype: torch.dtype, count: int) -> str:
    """Return one line of the table."""
    info, worst, ill, ill_points, used = torch.finfo(dtype), {"lower": 0.0, "upper": 0.0}, 0.0, 0, 0
    for exact_logp, delta in points(count):
        logp = torch.tensor(exact_logp, dtype=dtype).item()
        truth = oracle(name, logp, delta)
        for batch in (False, True):
            results = computed(logp, name, delta, dtype, batch)
            for side, want, got in zip(("lower", "upper"), truth, results, strict=True):
                if not (want == 0 or info.tiny <= want <= info.max):
                    continue
                used += 1
                error = float(abs(got - want) / want) if want else (0.0 if got == 0 else float("inf"))
                limit = 1e-12 if dtype == torch.float64 else 1e-6
                # The condition number is slow to compute, so it is computed for large errors only.
                has_number = error > limit and side == "lower" and want != 0
                number = rounding_change(name, logp, delta)[0] * mp.mpf(10) ** 16 if has_number else mp.mpf(0)
                if number > 1000:
                    ill, ill_points = max(ill, float(error / number)), ill_points + 1
                else:
                    worst[side] = max(worst[side], error)
    typename = str(dtype).removeprefix("torch.")
    return f"{name:<12}{typename:<10}{worst['lower']:>10.1e}{worst['upper']:>10.1e}{used:>8}{ill_points:>6}{ill:>12.1e}"


def main() -> None:
    """Parse the arguments and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--points", type=int, default=60, help="random points per divergence and type")
    parser.add_argument("--only", nargs="*", choices=list(DIVERGENCES), default=list(DIVERGENCES))
    arguments = parser.parse_args()
    mp.mp.dps = 60
    print(
        f"{'divergence':<12}{'type':<10}{'lower':>10}{'upper':>10}{'bounds':>8}{'ill':>6}{'ill/number':>12}"
    )
    for name in arguments.only:
        for dtype in (torch.float32, torch.float64):
            print(measure(name, dtype, arguments.points), flush=True)


if __name__ == "__main__":
    main()
