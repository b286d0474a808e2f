"""Agreement of ranks: a result or an error is the same on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from bandpo_cli.errors import RunError, UserError, is_received
from bandpo_cli.ranks import SINGLE, Ranks


class Exchange:
    """Connects ranks that are threads of this process, in place of torch.distributed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)
        monkeypatch.setattr(Ranks, "gather", lambda ranks, value: self._gather(ranks, value))

    def _gather(self, ranks: Ranks, value: Any) -> list[Any]:
        self._values[ranks.rank] = value
        self._barrier.wait(10)
        values = [*self._values]
        self._barrier.wait(10)
        return values

    def outcomes(self, call: Callable[[Ranks], Any]) -> list[Any]:
        """Return what `call` returned or raised on each rank."""
        found: list[Any] = [None] * len(self._values)

        def run(rank: int) -> None:
            try:
                found[rank] = call(Ranks(rank, len(found)))
            except Exception as error:  # noqa: BLE001
                found[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return found


class OtherPackageError(Exception):
    """An error that cannot be read back from its pickle."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def fail(error: Exception) -> None:
    raise error


def test_without_further_ranks_nothing_is_exchanged() -> None:
    assert SINGLE.agree(lambda: 5) == [5]
    assert SINGLE.on_main(lambda: 5) == 5
    error = OtherPackageError("a", "b")
    with pytest.raises(OtherPackageError) as raised:
        SINGLE.agree(lambda: fail(error))
    assert raised.value is error


def test_all_ranks_have_all_results(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Exchange(monkeypatch, 3)
    assert exchange.outcomes(lambda ranks: ranks.agree(lambda: 10 * ranks.rank)) == 3 * [[0, 10, 20]]


def test_one_rank_acts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    acted: list[int] = []

    def act(ranks: Ranks) -> str:
        acted.append(ranks.rank)
        return "done"

    assert Exchange(monkeypatch, 3).outcomes(lambda ranks: ranks.on_main(lambda: act(ranks))) == 3 * ["done"]
    assert acted == [0]


@pytest.mark.parametrize(
    ("error", "received"),
    [
        (UserError("a mistake"), "UserError: rank 1: a mistake"),
        (RunError("a failure"), "RunError: rank 1: a failure"),
        (PermissionError(13, "denied", "/x"), "PermissionError: [Errno 13] denied: '/x'"),
        (OtherPackageError("a", "b"), "RuntimeError: rank 1: OtherPackageError: a b"),
    ],
)
def test_the_error_of_the_first_rank_that_failed_is_raised_on_all(
    monkeypatch: pytest.MonkeyPatch, error: Exception, received: str
) -> None:
    """Ranks 1 and 2 of 3 fail."""
    errors = [None, error, ValueError("later")]

    def act(ranks: Ranks) -> None:
        found = errors[ranks.rank]
        if found is not None:
            raise found

    first, second, third = Exchange(monkeypatch, 3).outcomes(lambda ranks: ranks.agree(lambda: act(ranks)))
    assert second is error
    for item in (first, third):
        assert f"{type(item).__name__}: {item}" == received
        assert is_received(item)
    assert not is_received(second)


def test_a_rank_that_fails_as_the_first_one_did_raises_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a mistake which all ranks find does not look like one of rank 0."""
    errors = [RunError("the disk is full") for _ in range(3)]
    exchange = Exchange(monkeypatch, 3)
    assert exchange.outcomes(lambda ranks: ranks.agree(lambda: fail(errors[ranks.rank]))) == errors
