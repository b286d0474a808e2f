"""Problem stream: complete epochs in a reproducible order, resumed by one integer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.tasks.task import ProblemStream
from bandpo_cli.types import Problem


def problems(count: int) -> list[Problem]:
    return [Problem(str(index), "", "", "test", "math") for index in range(count)]


def taken(size: int, seed: int, position: int, count: int) -> list[Problem]:
    return ProblemStream(problems(size), seed, position).next(count)


SIZES, SEEDS = st.integers(1, 12), st.integers(0, 2**32)


@given(size=SIZES, seed=SEEDS, epoch=st.integers(0, 50))
def test_each_epoch_contains_each_problem_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(int(problem.id) for problem in taken(size, seed, epoch * size, size)) == list(range(size))


@given(size=SIZES, seed=SEEDS, start=st.integers(0, 100), counts=st.lists(st.integers(0, 15), max_size=5))
def test_consecutive_batches_equal_one_sequence(size: int, seed: int, start: int, counts: list[int]) -> None:
    """A run that is stopped after any batch, and resumed at its position in a new process, gets the same problems."""
    pieces, stream = [], ProblemStream(problems(size), seed, start)
    for count in counts:
        pieces += stream.next(count)
        stream = ProblemStream(problems(size), seed, stream.position)
    assert pieces == taken(size, seed, start, sum(counts))
    assert stream.position == start + sum(counts)


def test_epochs_and_seeds_differ() -> None:
    assert taken(100, 0, 0, 100) not in (taken(100, 0, 100, 100), taken(100, 1, 0, 100))


def test_order_is_fixed() -> None:
    # Literal: a run resumed with another version of Python must get the same problems.
    assert "".join(problem.id for problem in taken(6, 7, 0, 6)) == "245103"


def test_empty_stream_and_negative_positions_are_rejected() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ProblemStream([], seed=0)
    for position, count in ((-1, 1), (0, -1)):
        with pytest.raises(ValueError, match="negative"):
            taken(3, 0, position, count)
