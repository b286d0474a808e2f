"""An advantage estimator of your own: rewards less the median of the group.

    bandpo train --set objective.advantages=examples.custom_advantages:median_advantages

The function receives the rewards of a step in float64 and a mask of the completions that have one, [P, G] each.
"""

import torch


def median_advantages(rewards, has_reward):  # type: ignore[no-untyped-def]
    """Return the advantages, [P, G]; those of completions without a reward are not used."""
    known = rewards.masked_fill(~has_reward, torch.nan)
    return rewards - known.nanmedian(dim=1, keepdim=True).values
