"""Problem stream: complete epochs in a reproducible order, resumed by one integer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.tasks.task import ProblemStream
from bandpo_cli.types import Problem


def problems(count: int) -> list[Problem]:
    return [Problem(str(index), "", "", "test", "math") for index in range(count)]


SIZES, SEEDS = st.integers(1, 12), st.integers(0, 2**32)


@given(size=SIZES, seed=SEEDS, epoch=st.integers(0, 50))
def test_each_epoch_contains_each_problem_once(size: int, seed: int, epoch: int) -> None:
    taken = ProblemStream(problems(size), seed).take(epoch * size, size)
    assert sorted(int(problem.id) for problem in taken) == list(range(size))


@given(size=SIZES, seed=SEEDS, start=st.integers(0, 100), counts=st.lists(st.integers(0, 15), max_size=5))
def test_consecutive_batches_equal_one_sequence(size: int, seed: int, start: int, counts: list[int]) -> None:
    """A run that is stopped after any batch, and resumed at its position in a new process, gets the same problems."""
    expected = ProblemStream(problems(size), seed).take(start, sum(counts))
    pieces, position = [], start
    for count in counts:
        stream = ProblemStream(problems(size), seed)
        stream.position = position
        pieces += stream.next(count)
        position = stream.position
    assert pieces == expected
    assert position == start + sum(counts)


def test_epochs_and_seeds_differ() -> None:
    stream = ProblemStream(problems(100), seed=0)
    assert stream.take(0, 100) != stream.take(100, 100)
    assert stream.take(0, 100) != ProblemStream(problems(100), seed=1).take(0, 100)


def test_order_is_fixed() -> None:
    # Literal: a run resumed with another version of Python must get the same problems.
    assert "".join(problem.id for problem in ProblemStream(problems(6), seed=7).take(0, 6)) == "245103"


def test_empty_stream_and_negative_positions_are_rejected() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ProblemStream([], seed=0)
    with pytest.raises(ValueError, match="negative"):
        ProblemStream(problems(3), seed=0, position=-1).next(1)
    with pytest.raises(ValueError, match="negative"):
        ProblemStream(problems(3), seed=0).next(-1)
