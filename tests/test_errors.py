"""Recognition of out-of-memory errors, and failures that must not replace another error."""

import errno
import logging

import pytest
import torch

from bandpo_cli.errors import closed_at_end, find_out_of_memory, warn_on_failure

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"


class EngineError(Exception):
    """An error of an engine that stands for the error of its worker."""


def wrapped(inner: BaseException, raised_from: bool = True, hidden: bool = False) -> Exception:
    """Return an error that was raised from `inner`, or while handling it."""
    error = EngineError("the engine failed")
    error.__cause__ = inner if raised_from else None
    error.__context__, error.__suppress_context__ = inner, hidden
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError(CUDA),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:145"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        RuntimeError(f"Worker failed with error '{CUDA}', please check the stack trace above"),
    ],
    ids=lambda error: str(error)[:40],
)  # fmt: skip
def test_failed_allocations_are_recognised_also_when_wrapped(error):
    for outer in (error, wrapped(error), wrapped(wrapped(error)), wrapped(error, raised_from=False)):
        assert find_out_of_memory(outer) is error
    assert not find_out_of_memory(wrapped(error, raised_from=False, hidden=True)), "raised `from None`"


def test_other_errors_are_not():
    first = wrapped(ValueError("no"))
    cycle = wrapped(first)
    first.__cause__ = cycle
    others = [RuntimeError("shapes differ"), ValueError("a text about running out of memory")]
    assert not any(map(find_out_of_memory, [*others, wrapped(others[1]), cycle]))


def test_a_failure_after_the_end_is_a_warning(caplog):
    caplog.set_level(logging.WARNING, "bandpo_cli")
    with warn_on_failure("the file cannot be written"):
        raise OSError(errno.ENOSPC, "full", "/x")
    with warn_on_failure("the engine could not be closed"):
        raise RuntimeError("first line\nsecond line")
    assert caplog.messages == [
        "the file cannot be written: /x: no space is left on the disk; free some, then continue",
        "the engine could not be closed: RuntimeError: first line",
    ]
    with pytest.raises(KeyboardInterrupt), warn_on_failure("x"):
        raise KeyboardInterrupt


def close() -> None:
    raise RuntimeError("no")


def test_closing_never_replaces_the_error_of_the_body(caplog):
    caplog.set_level(logging.WARNING, "bandpo_cli")
    with closed_at_end("an engine", close):
        pass
    with pytest.raises(ValueError, match="the error"), closed_at_end("an engine", close):
        raise ValueError("the error")
    assert caplog.messages == 2 * ["an engine could not be closed: RuntimeError: no"]
