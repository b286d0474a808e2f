"""What ranks exchange, and how work is split among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.ranks import SINGLE, Ranks, ranks_from_environment
from tests.training.several_ranks import run_ranks


@given(st.integers(0, 40), st.integers(1, 7))
def test_shares_are_all_items_in_order_and_of_equal_numbers(count: int, size: int) -> None:
    items = [*range(count)]
    shares = [Ranks(rank, size).share(items) for rank in range(size)]
    assert [item for share in shares for item in share] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for rank, share in enumerate(shares):
        assert [*share] == items[Ranks(rank, size).share_start(count) :][: len(share)]


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 5))
def test_shares_by_cost_are_all_items_in_order_and_of_similar_cost(costs: list[int], size: int) -> None:
    slices = [Ranks(rank, size).share_by_cost(costs) for rank in range(size)]
    assert [i for each in slices for i in range(each.start, each.stop)] == [*range(len(costs))]
    for each in slices:
        # An item is never cut, so a share is off by at most half an item at each end.
        assert abs(sum(costs[each]) - sum(costs) / size) <= max(costs, default=0)


def test_the_environment_of_torchrun_gives_the_rank() -> None:
    assert ranks_from_environment({}) == SINGLE
    assert ranks_from_environment({"WORLD_SIZE": "2"}) == SINGLE  # set by a cluster, without torchrun
    assert ranks_from_environment({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == SINGLE
    found = ranks_from_environment({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"})
    assert found == Ranks(9, 16, 1)
    assert not found.is_main


def test_a_single_rank_exchanges_nothing() -> None:
    """No process group exists, so that any communication would raise."""
    column = torch.arange(3.0)
    assert SINGLE.gather("x") == ["x"]
    assert SINGLE.gather_all([1, 2]) == [1, 2]
    assert SINGLE.any(True)
    assert not SINGLE.any(False)
    assert SINGLE.max(2.5) == 2.5
    assert [*SINGLE.concatenate([column])] == [column]
    SINGLE.wait()


def exchanged(ranks: Ranks) -> dict[str, object]:
    own = torch.arange(ranks.rank * 2.0)  # none on rank 0
    first, second = ranks.concatenate([own, own + 0.5])
    return {
        "gather": ranks.gather(ranks.rank),
        "gather_all": ranks.gather_all(["a"] * ranks.rank),
        "any": [ranks.any(ranks.rank == 1), ranks.any(False)],
        "max": [ranks.max(-1.0 - ranks.rank), ranks.max(float("nan") if ranks.rank else 0.0)],
        "columns": [first.tolist(), second.tolist()],
    }


def test_every_rank_receives_the_values_of_all(tmp_path: Path) -> None:
    results = run_ranks(3, tmp_path, exchanged)
    for result in results:
        assert result["gather"] == [0, 1, 2]
        assert result["gather_all"] == ["a", "a", "a"]
        assert result["any"] == [True, False]
        assert result["max"][0] == -1.0
        assert result["max"][1] != result["max"][1]
        assert result["columns"] == [[0, 1, 0, 1, 2, 3], [0.5, 1.5, 0.5, 1.5, 2.5, 3.5]]


def failing(ranks: Ranks) -> None:
    raise ValueError(f"on rank {ranks.rank}")


def test_an_error_of_a_rank_reaches_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="on rank 1"):
        run_ranks(2, tmp_path, failing)
