"""Dynamic sampling: the groups of a step and their order over its updates."""

import pytest

from bandpo_cli.training.rollout_batches import select_groups
from bandpo_cli.types import Completion, Grade, Group, Problem, Rollout


def group(name: str, *rewards: float) -> Group:
    problem = Problem(name, name, "", "test", "math")
    completion = Completion((1,), (-0.5,), "stop", 0)
    return Group(
        problem,
        tuple(
            Rollout(problem, name, (0,), completion, "", Grade(reward, False, "wrong")) for reward in rewards
        ),
    )


def test_60_of_256_groups_give_each_of_4_updates_15() -> None:
    """Three batches of 256 groups, of which every 13th has rewards that differ."""
    sampled = [group(f"{index}", 0.0, float(index % 13 == 0)) for index in range(3 * 256)]
    kept = {str(index) for index in range(0, 3 * 256, 13)}
    assert len(kept) == 60
    ordered = [select_group.problem.id for select_group in select_groups(sampled, 256, 4)]
    assert len(ordered) == len(set(ordered)) == 256
    updates = [ordered[start : start + 64] for start in range(0, 256, 64)]
    assert [len(kept.intersection(names)) for names in updates] == [15] * 4
    in_order = [name for names in updates for name in names if name in kept]
    assert in_order == sorted(in_order, key=int)


@pytest.mark.parametrize(
    ("sampled", "updates", "expected"),
    [
        ("ABCD", 2, "ABCD"),
        ("xAyB", 2, "AxBy"),
        ("ABCx", 2, "ABCx"),
        ("ABCxyz", 2, "ABxCyz"),
        ("xyzA", 4, "Axyz"),
        ("wxyz", 2, "wxyz"),
        ("ABCDEuvwxyza", 4, "ABuCvwDxyEza"),
        ("ABwx", 1, "ABwx"),
    ],
)
def test_the_order_of_groups_over_updates(sampled: str, updates: int, expected: str) -> None:
    """Capital letters are groups whose rewards differ."""
    groups = [group(name, 0.0, float(name.isupper())) for name in sampled]
    selected = select_groups(groups, len(groups), updates)
    assert "".join(item.problem.id for item in selected) == expected
