"""`bandpo plot`: the plots of a run, in a format of choice."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bandpo_cli.cli.options import RUNS, RunName, RunsDir, choice
from bandpo_cli.errors import UserError


def plot(
    run: RunName,
    format_: Annotated[str, choice("--format", "png", "pdf", "svg")] = "png",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the plots.", show_default="plots in the run folder"),
    ] = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Plot accuracy, entropy, clipped tokens and the clip map of a run, which may be in progress.

    [bold]bandpo plot first[/bold]  again, with the steps that it has now

    [bold]bandpo plot first --format pdf --out figures[/bold]  for a paper
    """
    from bandpo_cli.cli.console import open_console, print_line
    from bandpo_cli.reports.run_plots import plot_run
    from bandpo_cli.storage.run_folder import RunFolder

    folder = RunFolder.open(runs_dir, run).path
    console = open_console()
    try:
        written = plot_run(folder, out, f".{format_}")
    except OSError as error:
        raise UserError(
            f"--out {out or folder / 'plots'}: cannot be written: {error.strerror or error}"
        ) from None
    if not written:
        raise UserError(f"{folder} has nothing to plot: the run has completed no step")
    for path in written:
        print_line(console, str(path))
