"""Every random choice of a run has a seed of its own, so no generator's state has to be saved for a resume."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed that depends on the run's seed and on what it is for, e.g. `("sample", step)`."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
