"""Standard output and standard error of the command line: escapes control characters and ignores a closed pipe."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, TextIO

from bandpo_cli.errors import escape_controls


class RawStream:
    """A text stream whose reader may go away, such as `head` at the end of a pipe, or a terminal that is closed.

    Everything written after that is discarded. Nothing is escaped: Rich writes its own control codes here.

    Attributes:
        lost: the reader has gone away.
        on_loss: the line for standard error in that case; None for no line.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost = False
        self.on_loss: str | None = None

    def write(self, text: str) -> int:
        """Write a text as it is."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._handle(error)
            return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        try:
            self._stream.flush()
        except OSError as error:
            self._handle(error)

    def _handle(self, error: OSError) -> None:
        """Discard all later output if the reader has gone away, else raise the error."""
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        if not self.lost:
            self.lost = True
            if self.on_loss is not None and sys.stderr is not None:
                print(self.on_loss, file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class SafeStream(RawStream):
    """A text stream that shows control characters as escapes.

    Attributes:
        rich_proxied_file: the stream that Rich's consoles write to. `SafeConsole` escapes the texts before.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.rich_proxied_file: Any = RawStream(stream)

    def write(self, text: str) -> int:
        """Write a text with its control characters escaped."""
        super().write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write texts with their control characters escaped."""
        for line in lines:
            self.write(line)


def protect_streams() -> None:
    """Escape everything that Python code writes to standard output and standard error from now on.

    Characters that the encoding of a stream lacks are written as escapes too.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, SafeStream):
            continue
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, SafeStream(stream))
