"""Console output of the commands: escaped and closed streams, lines, tables, JSON, progress, and log messages.

`protect_streams` escapes control characters in everything that is printed and ignores a closed pipe. `open_console`
returns the console that the commands print on.
"""

import errno
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from bandpo_cli.callbacks import CallbackBase
from bandpo_cli.errors import escape_controls, redact_credentials


class RawStream:
    """A text stream whose reader may go away, such as `head` at the end of a pipe, or a terminal that is closed.

    Everything written after that is discarded. Nothing is escaped: Rich writes its own control codes here.

    Attributes:
        on_loss: the line for standard error when the reader goes away; None for no line.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.on_loss: str | None = None

    def write(self, text: str) -> int:
        """Write a text as it is."""
        with self._discarding():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        with self._discarding():
            self._stream.flush()

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        """Discard all later output if the reader has gone away."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self._stream.fileno())
            message, self.on_loss = self.on_loss, None
            if message is not None and sys.stderr is not None:
                print(message, file=sys.stderr)

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


PLAIN_LINES = 20
"""Approximate number of progress lines in a log file, however long the run or the evaluation."""

CONTINUES = "warning: nothing reads the output of this command any more; it continues without it"


class SafeConsole(Console):
    """A console that shows the control characters of every text as escapes, and passes those of Rich.

    Every renderable, also one within a table or a panel, is rendered by `render`.
    """

    @property
    def file(self) -> IO[str]:
        """The stream to write to. A live display puts its own stream before the stream of `protect_streams`."""
        file = super().file
        return file.rich_proxied_file if isinstance(file, SafeStream) else file

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object; see `rich.console.Console.render`."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable() or segment.text == "\n":
                yield segment
            else:
                yield Segment(escape_controls(segment.text), segment.style)


def open_console(stderr: bool = False, long_running: bool = False) -> Console:
    """Return the console of a command, and print the package's log messages on it.

    INFO messages are printed as lines, WARNING and above after the heading `warning:`. Strings are printed as they are:
    names of files and variants may contain what Rich would read as markup. Control characters are shown as escapes.

    Args:
        long_running: print on standard error if the reader of the output goes away, since the command continues.
    """
    stream = sys.stderr if stderr else sys.stdout
    if long_running and isinstance(stream, SafeStream):
        stream.rich_proxied_file.on_loss = CONTINUES
    console = SafeConsole(stderr=stderr, markup=False, emoji=False)
    logger = logging.getLogger("bandpo_cli")
    others = [handler for handler in logger.handlers if not isinstance(handler, LogHandler)]
    logger.handlers = [*others, LogHandler(console)]
    logger.setLevel(logging.INFO)
    logger.propagate = False  # MLflow's database migrations give the root logger a handler of their own
    return console


class LogHandler(logging.Handler):
    """Print log messages on a console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        heading = "warning:" if record.levelno >= logging.WARNING else ""
        print_line(self._console, redact_credentials(record.getMessage()), heading, "yellow")


def print_line(console: Console, line: str, heading: str = "", style: str = "bold") -> None:
    """Print a line without markup, after a heading if there is one."""
    gap = " " if heading.endswith(":") else "  "  # a heading without a colon is a column
    text = Text.assemble((heading, style), gap, line) if heading else Text(line)
    console.print(text, highlight=False, soft_wrap=True)


def print_rows(console: Console, rows: Iterable[tuple[str, str]], width: int = 0) -> None:
    """Print rows of a heading, `width` characters wide, and a text whose lines are below each other."""
    for heading, text in rows:
        for index, line in enumerate(text.splitlines()):
            print_line(console, line, f"{'' if index else heading:<{width}}")


def print_settings(
    console: Console, rows: Sequence[tuple[str, str]], notes: Sequence[str] = (), warnings: Sequence[str] = ()
) -> None:
    """Print (heading, text) rows about a command, and the notes and warnings below it."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for heading, text in rows:
        grid.add_row(heading, Text(text))
    for index, note in enumerate(notes):
        grid.add_row("" if index else "data", Text(note))
    console.print(grid, highlight=False)
    for warning in warnings:
        print_line(console, warning, "warning:", "yellow")


def make_table(*headings: str, gap: int = 2) -> Table:
    """Return an empty table without lines. A heading that begins with `>` marks a column of numbers.

    Args:
        headings: the headings; none for a table without a row of them.
        gap: spaces between the columns.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for heading in headings:
        if heading.startswith(">"):
            table.add_column(heading[1:], justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold")
    return table


def print_json(value: Any) -> None:
    """Print a value as JSON on standard output; NaN and infinity as null."""
    from bandpo_cli.storage.files import replace_nonfinite

    print(to_json(replace_nonfinite(value), indent=2))


def to_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON for standard output: control characters, and those that its encoding lacks, as escapes."""
    has_all = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    text = json.dumps(value, indent=indent, ensure_ascii=not has_all, default=str)  # paths as text
    return escape_controls(text, as_json=True)


def format_duration(seconds: float) -> str:
    """Return hours, minutes and seconds: `0:01:05`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class ExperimentView(CallbackBase):
    """Base class of the console views: a spinner in some phases, and progress, live on a terminal and lines elsewhere.

    A live display stays in place while it changes, and ends in its final state. The cursor waits on an empty line below
    it. At Ctrl-C the terminal writes ^C at the cursor: at the end of a full line that would begin a new line, and the
    next update would leave old lines above the new ones.

    Attributes:
        spinners: the text beside the spinner, by phase.
        in_progress: progress is shown.
    """

    spinners: Mapping[str, str] = {}

    def __init__(self, console: Console, runs_dir: Path = Path("runs")) -> None:
        self.console, self.runs_dir = console, runs_dir
        self.in_progress = False
        self._status: Status | None = None
        self._live: Live | None = None

    def render(self) -> RenderableType:
        """Return the current state of the progress for a terminal."""
        raise NotImplementedError

    def line(self) -> str | None:
        """Return the progress since the last line for a file; None if it is too early for another line."""
        raise NotImplementedError

    def print_start(self, folder: Path | None, heading: str, notes: Iterable[str] = ()) -> None:
        """Print the notes and the folder of the experiment."""
        self.spin(None)
        for note in notes:
            print_line(self.console, note, "note:", "yellow")
        print_line(self.console, str(folder), heading)

    def spin(self, text: str | None) -> None:
        """Show a spinner with `text` in place of an earlier one; None removes it."""
        if self._status is not None:
            self._status.stop()
        self._status = None if text is None else self.console.status(Text(text))
        if self._status is not None:
            self._status.start()

    def phase(self, name: str) -> None:
        """Show the spinner of a phase that has one."""
        self.spin(self.spinners.get(name))

    def show_progress(self) -> None:
        """Show progress until `stop_progress`: four times per second on a terminal, elsewhere by `update_progress`."""
        self.spin(None)
        self.in_progress = True
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._get_state, refresh_per_second=4)
            self._live.start(refresh=True)

    def update_progress(self) -> None:
        """Print a line if one is due. A terminal shows the current state in any case."""
        if self.in_progress and self._live is None and (text := self.line()) is not None:
            print_line(self.console, text)

    def stop_progress(self) -> None:
        """Leave the final state on a terminal."""
        self.in_progress = False
        if self._live is not None:
            self._live.stop()
        self._live = None

    def close(self) -> None:
        """Remove the spinner and the progress, where an error left them."""
        self.spin(None)
        self.stop_progress()

    def _get_state(self) -> RenderableType:
        return Group(self.render(), "") if self.in_progress else self.render()
