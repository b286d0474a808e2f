"""Console of the commands: escapes of control characters, closed pipes, lines, tables, JSON, progress, log messages."""

import errno
import json
import logging
import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import rich.console
from rich.cells import cell_len
from rich.console import ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from bandpo_cli.callbacks import CallbackBase
from bandpo_cli.errors import escape_controls, log, redact_credentials


class SafeStream:
    """A text stream that shows control characters as escapes, and whose reader may go away: `head`, a closed terminal.

    Everything written after that is discarded. Rich's consoles write to `rich_proxied_file`, which escapes nothing:
    `Console` escapes the texts, and Rich adds control codes.
    """

    on_loss: str | None = None  # printed on standard error when the reader goes away

    def __init__(self, stream: TextIO, escapes: bool = True) -> None:
        self._stream, self._escapes = stream, escapes
        self.rich_proxied_file: Any = SafeStream(stream, escapes=False) if escapes else self

    def write(self, text: str) -> int:
        self._call("write", escape_controls(text) if self._escapes else text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._call("flush")

    def _call(self, method: str, *arguments: str) -> None:
        """Call a method of the stream, and discard all later output if the reader has gone away."""
        try:
            getattr(self._stream, method)(*arguments)
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


def protect_streams() -> None:
    """Escape control characters, and those that the encoding lacks, in all that Python code writes from now on."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, SafeStream):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, SafeStream(stream))


LINE_SECONDS = 60.0  # seconds after which a log file gets a line of progress in any case
PLAIN_LINES = 20  # approximate number of progress lines in a log file, however long the run or the evaluation

CONTINUES = "warning: nothing reads the output of this command any more; it continues without it"


_WITHIN_QUANTITY = re.compile(r"(?<=\d) (?=[^\W\d])|(?<=[=×≤≥→]) | (?==)|(?<=%) (?=\()")
"""The spaces of `1% (0.49 s)`, `T = 1` and `≤ 8 tokens`, at which no line is broken."""
_UNBROKEN = "\ufdd0"  # one of the code points that Unicode reserves for uses inside of a program


class Console(rich.console.Console):
    """A console that shows the control characters of every text as escapes, and passes those of Rich."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object, also one within a table or a panel; see `rich.console.Console.render`."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.replace("\n", "").isprintable():
                yield segment
            else:
                yield Segment(escape_controls(segment.text), segment.style)

    def print_line(self, line: str, heading: str = "", style: str = "bold") -> None:
        """Print a line without markup, after a heading if there is one.

        A terminal shows it in lines of complete words, numbers with their units. In a file it stays one line, and so
        does a command, to be copied.
        """
        if heading:
            heading += " " if heading.endswith(":") else "  "  # a heading without a colon is a column
        if self.is_terminal and ": bandpo " not in line:
            indent = " " * cell_len(heading)
            wrapper = textwrap.TextWrapper(
                max(20, self.width), indent, indent, break_long_words=False, break_on_hyphens=False
            )
            lines = map(wrapper.wrap, _WITHIN_QUANTITY.sub(_UNBROKEN, line).split("\n"))
            line = "\n".join(chain.from_iterable(lines)).removeprefix(indent).replace(_UNBROKEN, " ")
        self.print(Text.assemble((heading, style), line), highlight=False, soft_wrap=True)

    def print_warnings(self, lines: Iterable[str], heading: str = "warning:") -> None:
        """Print lines, each after a yellow heading."""
        for line in lines:
            self.print_line(line, heading, "yellow")

    def print_rows(self, rows: Iterable[tuple[str, str]], width: int = 0) -> None:
        """Print rows of a heading, `width` characters wide, and a text whose lines are below each other."""
        for heading, text in rows:
            for index, line in enumerate(text.splitlines()):
                self.print_line(line, f"{'' if index else heading:<{width}}")

    def print_settings(
        self, rows: Iterable[tuple[str, str]], notes: Iterable[str] = (), warnings: Iterable[str] = ()
    ) -> None:
        """Print (heading, text) rows about a command, and the notes and warnings below it."""
        rows = [*rows, ("data", "\n".join(notes))]
        # The heading of the folder, which follows, has 10 characters.
        self.print_rows(rows, max(10, *(len(heading) for heading, _ in rows)))
        self.print_warnings(warnings)


def open_console(stderr: bool = False, long_running: bool = False) -> Console:
    """Return the console of a command, and print the package's log messages on it.

    INFO messages are printed as lines, WARNING and above after the heading `warning:`. Strings are printed as they are:
    names of files and variants may contain what Rich would read as markup. If the reader of the output of a
    `long_running` command goes away, a line on standard error says that the command continues.
    """
    # Not the standard stream at the time of printing, which a live display replaces.
    file = getattr(sys.stderr if stderr else sys.stdout, "rich_proxied_file", None)
    if long_running and file is not None:
        file.on_loss = CONTINUES
    console = Console(file=file, stderr=stderr, markup=False, emoji=False)
    others = [handler for handler in log.handlers if not isinstance(handler, LogHandler)]
    log.handlers = [*others, LogHandler(console)]
    log.setLevel(logging.INFO)
    log.propagate = False  # MLflow's database migrations give the root logger a handler of their own
    return console


class LogHandler(logging.Handler):
    """Prints log messages on a console."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        heading = "warning:" if record.levelno >= logging.WARNING else ""
        self._console.print_line(redact_credentials(record.getMessage()), heading, "yellow")


def make_table(*headings: str, gap: int = 2) -> Table:
    """Return an empty table without lines. A heading that begins with `>` marks a column of numbers."""
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
    """

    spinners: Mapping[str, str] = {"load": "loading torch and the model …"}
    """The text beside the spinner, by phase."""

    def __init__(self, console: Console, runs_dir: Path = Path("runs")) -> None:
        self.console, self.runs_dir = console, runs_dir
        self.in_progress = False
        self.printed_at = -math.inf  # the last line of progress, by `time.monotonic`
        self._status: Status | None = None
        self._live: Live | None = None

    def render(self) -> RenderableType:
        """Return the current state of the progress for a terminal."""
        raise NotImplementedError

    def __rich__(self) -> RenderableType:
        return Group(self.render(), "") if self.in_progress else self.render()

    def line(self) -> str | None:
        """Return the progress since the last line for a file; None if it is too early for another line."""
        raise NotImplementedError

    @property
    def is_overdue(self) -> bool:
        """Whether a file gets a line in any case, since the last one was `LINE_SECONDS` ago."""
        return time.monotonic() >= self.printed_at + LINE_SECONDS

    def print_start(self, folder: Path | None, heading: str, notes: Iterable[str] = ()) -> None:
        """Print the notes and the folder of the experiment."""
        self.spin(None)
        self.console.print_warnings(notes)
        self.console.print_line(str(folder), heading)

    def spin(self, text: str | None) -> None:
        """Show a spinner with `text` in place of an earlier one; None removes it."""
        if self._status is not None:
            self._status.stop()
            self._status = None
        if text is not None:
            self._status = self.console.status(Text(text))
            self._status.start()

    def phase(self, name: str) -> None:
        """Show the spinner of a phase that has one."""
        self.spin(self.spinners.get(name))

    def show_progress(self) -> None:
        """Show progress until `stop_progress`: four times per second on a terminal, elsewhere by `update_progress`."""
        self.spin(None)
        self.in_progress = True
        if self.console.is_terminal:
            self._live = Live(self, console=self.console, refresh_per_second=4)
            self._live.start(refresh=True)

    def update_progress(self) -> None:
        """Print a line if one is due. A terminal shows the current state in any case."""
        if self.in_progress and self._live is None and (text := self.line()) is not None:
            self.printed_at = time.monotonic()
            self.console.print_line(text)

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
