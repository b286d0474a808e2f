"""The inverse question: at which radius is a Band as wide, at one probability, as a given ratio?"""

from __future__ import annotations

import math

import numpy as np

from bandpo_cli.bounds.divergences import divergence_at, find
from bandpo_cli.bounds.values import Tokens
from bandpo_cli.errors import ConfigError


def matching_delta(name: str, prob: float, upper: float) -> float | None:
    """The δ whose Band has this upper bound at p = `prob`; None where no Band has it.

    None has it where upper > 1/p, which the simplex forbids, and where upper = 1/p and f(0) is infinite (kl, neyman),
    which only an infinite radius allows. Raises ConfigError for p outside (0, 1) or upper ≤ 1, and for `name` as
    `find` does.
    """
    if not 0.0 < prob < 1.0:
        raise ConfigError(f"p must be in (0, 1) for its upper bound to say anything, not {prob!r}")
    if not upper > 1.0:
        raise ConfigError(f"the upper bound to match must be > 1, not {upper!r}")
    if upper * prob > 1.0:
        return None
    with np.errstate(all="ignore"):
        delta = divergence_at(find(name), Tokens(np.log([prob])), upper)
    return delta if math.isfinite(delta) and delta > 0.0 else None
