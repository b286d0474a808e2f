"""Problem stream: complete epochs in a reproducible order, resumed by one integer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.tasks.task import ProblemStream
from bandpo_cli.types import Problem


def stream_of(size: int, seed: int, position: int = 0) -> ProblemStream:
    return ProblemStream(
        [Problem(str(index), "", "", "test", "math") for index in range(size)], seed, position
    )


SIZES, SEEDS = st.integers(1, 12), st.integers(0, 2**32)


@given(size=SIZES, seed=SEEDS, epoch=st.integers(0, 50))
def test_each_epoch_contains_each_problem_once(size: int, seed: int, epoch: int) -> None:
    problems = stream_of(size, seed, epoch * size).next(size)
    assert sorted(int(problem.id) for problem in problems) == list(range(size))


@given(size=SIZES, seed=SEEDS, start=st.integers(0, 100), counts=st.lists(st.integers(0, 15), max_size=5))
def test_consecutive_batches_equal_one_sequence(size: int, seed: int, start: int, counts: list[int]) -> None:
    """A run that is stopped after any batch, and resumed at its position in a new process, gets the same problems."""
    pieces, stream = [], stream_of(size, seed, start)
    for count in counts:
        pieces += stream.next(count)
        stream = stream_of(size, seed, stream.position)
    assert pieces == stream_of(size, seed, start).next(sum(counts))
    assert stream.position == start + sum(counts)


def test_the_order_is_fixed_and_differs_between_epochs_and_seeds() -> None:
    first, second = stream_of(100, 0).next(200)[:100], stream_of(100, 0).next(200)[100:]
    assert first not in (second, stream_of(100, 1).next(100))
    # Literal: a run resumed with another version of Python must get the same problems.
    assert "".join(problem.id for problem in stream_of(6, 7).next(6)) == "245103"


def test_empty_stream_and_negative_positions_are_rejected() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ProblemStream([], seed=0)
    for position, count in ((-1, 1), (0, -1)):
        with pytest.raises(ValueError, match="negative"):
            stream_of(3, 0).take(position, count)
