"""How many problems were solved how often."""

from __future__ import annotations

from collections.abc import Iterable

BINS = 10


def success_counts(shares: Iterable[float]) -> list[tuple[str, int]]:
    """Count problems by the share of their completions that is right, each bin under its name.

    Those that were never and always solved stand apart at the two ends: they are what pass@k turns on. Between them lie
    ten bins of a tenth each, with their lower ends (3 of 10 is in 0.3 – 0.4).
    """
    counts = [0] * (BINS + 2)
    for share in shares:
        if share in (0, 1):
            counts[0 if share == 0 else -1] += 1
        else:
            counts[1 + min(int(share * BINS), BINS - 1)] += 1
    between = [f"{bin_ / BINS:.1f} – {(bin_ + 1) / BINS:.1f}" for bin_ in range(BINS)]
    return list(zip(["never", *between, "always"], counts, strict=True))
