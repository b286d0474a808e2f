"""Recognition of out-of-memory errors, and failures that must not replace another error."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

import pytest
import torch

from bandpo_cli.errors import closed_at_end, find_out_of_memory, is_out_of_memory, warn_on_failure

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"


class EngineError(Exception):
    """An error of an engine that stands for the error of its worker."""


def wrapped(inner: Exception) -> Exception:
    try:
        try:
            raise inner
        except Exception as error:
            raise EngineError("the engine failed") from error
    except EngineError as outer:
        return outer


def while_handling(inner: Exception) -> Exception:
    error = EngineError("the clean-up failed")
    error.__context__ = inner
    return error


def with_cycle() -> Exception:
    first, second = EngineError("first"), EngineError("second")
    first.__cause__, second.__cause__ = second, first
    return first


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError(CUDA),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:145"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"
        ),
        RuntimeError(f"Worker failed with error '{CUDA}', please check the stack trace above"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_failed_allocations_are_recognised_also_when_wrapped(error: Exception) -> None:
    assert find_out_of_memory(error) is error
    assert find_out_of_memory(wrapped(error)) is error
    assert find_out_of_memory(wrapped(wrapped(error))) is error
    assert find_out_of_memory(while_handling(error)) is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes differ"),
        ValueError("a text about running out of memory"),
        wrapped(ValueError("no")),
        with_cycle(),
    ],
    ids=str,
)
def test_other_errors_are_not(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_an_error_raised_from_none_hides_the_allocation() -> None:
    """The code that raised it has dealt with the failed allocation."""
    error = while_handling(MemoryError())
    error.__suppress_context__ = True
    assert not is_out_of_memory(error)


def test_a_failure_after_the_end_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "bandpo_cli")
    with warn_on_failure("the file cannot be written"):
        raise OSError(errno.ENOSPC, "full", "/x")
    with warn_on_failure("the engine could not be closed"):
        raise RuntimeError("first line\nsecond line")
    assert [record.getMessage() for record in caplog.records] == [
        "the file cannot be written: /x: no space is left on the disk; free some, then continue",
        "the engine could not be closed: RuntimeError: first line",
    ]
    with pytest.raises(KeyboardInterrupt), warn_on_failure("x"):
        raise KeyboardInterrupt


def failing(error: BaseException) -> Callable[[], None]:
    def close() -> None:
        raise error

    return close


def test_closing_never_replaces_the_error_of_the_body(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "bandpo_cli")
    with (
        pytest.raises(ValueError, match="the error"),
        closed_at_end("an engine", failing(RuntimeError("no"))),
    ):
        raise ValueError("the error")
    assert [record.getMessage() for record in caplog.records] == [
        "an engine could not be closed: RuntimeError: no"
    ]


def test_a_failure_to_close_after_success_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "bandpo_cli")
    with closed_at_end("an engine", failing(RuntimeError("no"))):
        pass
    assert "an engine could not be closed: RuntimeError: no" in caplog.text
