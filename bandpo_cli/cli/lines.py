"""Lines beside the tables: printed as they are, whatever brackets a path or a message holds."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def print_line(console: Console, line: str, heading: str = "", style: str = "bold") -> None:
    """Print a line, after a heading if there is one."""
    gap = " " if heading.endswith(":") else "  "
    text = Text.assemble((heading, style), gap, line) if heading else Text(line)
    console.print(text, highlight=False, soft_wrap=True)


def print_warning(console: Console, line: str) -> None:
    """Print a warning."""
    print_line(console, line, "warning:", "yellow")
