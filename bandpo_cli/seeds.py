"""Seeds of the random choices of a run: one per purpose, so that resuming restores no generator state."""

import hashlib


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed that depends on the seed of the run and on its purpose, e.g. `("sample", step)`."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
