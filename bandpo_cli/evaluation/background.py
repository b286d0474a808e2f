"""Grading in a thread, while the thread that submits goes on sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from bandpo_cli.types import Grade, Grader, Problem


class BackgroundGrading:
    """One thread that grades batches in the order in which they are submitted; a context manager.

    Where its body ends with an exception, Ctrl-C included, the batches that wait are dropped and the one in work is
    cancelled.
    """

    def __init__(self, grade: Grader, cancel: Callable[[], None]) -> None:
        """Set the functions; the thread starts with the first batch.

        Args:
            grade: grades texts [N], each as an answer to its problem [N]; called in the thread.
            cancel: makes a running call of `grade` end soon with an exception.
        """
        self._grade, self._cancel = grade, cancel
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grading")

    def submit(self, problems: Sequence[Problem], texts: Sequence[str]) -> Future[list[Grade]]:
        """Return the future grades of the texts; its `result` raises what grading raised."""
        return self._executor.submit(self._grade, problems, texts)

    def __enter__(self) -> BackgroundGrading:
        """Return the object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the thread, after cancelling its work if the body failed."""
        if error is not None:
            self._cancel()
        self._executor.shutdown(wait=True, cancel_futures=error is not None)
