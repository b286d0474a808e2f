"""Dynamic sampling (DAPO, arXiv 2503.14476): the groups that a step trains on, and their order over its updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from bandpo_cli.objective.advantages import has_reward_spread
from bandpo_cli.types import Group

T = TypeVar("T")


def select_groups(sampled: Sequence[Group], wanted: int, updates: int) -> list[Group]:
    """Return the groups of a step: the first ones whose rewards differ, filled up with the first of the others.

    Groups whose rewards are all equal have no gradient. They keep the size of each update where too few groups are left
    after the last batch, and are spread evenly over the updates.

    Args:
        sampled: all groups sampled in the step, in order; at least `wanted`.
        wanted: number of groups that the step trains on, a multiple of `updates`.
        updates: number of updates of the step; each trains on `wanted / updates` consecutive groups of the result.

    Returns:
        `wanted` groups.
    """
    kept = [group for group in sampled if has_reward_spread(group)][:wanted]
    fill = [group for group in sampled if not has_reward_spread(group)][: wanted - len(kept)]
    return spread_over_updates(kept, fill, updates)


def spread_over_updates(kept: Sequence[T], fill: Sequence[T], updates: int) -> list[T]:
    """Return `kept` and `fill` in an order in which each update has its share of `kept`, in their order, first.

    With all of `kept` first, the last updates would have no gradient, and AdamW would move the weights by its momentum
    alone.

    Args:
        kept: groups with a gradient.
        fill: groups without one.
        updates: number of updates, which divides `len(kept) + len(fill)`.

    Returns:
        All groups. The numbers of kept groups of two updates differ by at most 1; earlier updates have more.
    """
    size = (len(kept) + len(fill)) // updates
    shares = [len(kept) // updates + (number < len(kept) % updates) for number in range(updates)]
    remaining_kept, remaining_fill = iter(kept), iter(fill)
    ordered: list[T] = []
    for share in shares:
        ordered += [next(remaining_kept) for _ in range(share)]
        ordered += [next(remaining_fill) for _ in range(size - share)]
    return ordered
