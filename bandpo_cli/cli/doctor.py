"""`bandpo doctor`: versions, tested ranges and GPUs on one screen."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict

import typer

from bandpo_cli.cli.options import TableOrJson


def doctor(format_: TableOrJson = "table") -> None:
    """Check the installation: versions against the tested ranges, imports, GPUs and their free memory.

    The exit code is 0 if everything is in order, and 1 if a package is missing,
    is outside its tested range or cannot be imported, or if torch cannot use
    the GPU.

    [bold]bandpo doctor[/bold]  after installing, and for reports of errors

    [bold]bandpo doctor --format json[/bold]  in scripts
    """
    from bandpo_cli.cli.console import make_table, open_console, print_json, print_line
    from bandpo_cli.experiments.doctor import diagnose

    console = open_console()
    with console.status("importing the packages …") if format_ == "table" else nullcontext():
        diagnosis = diagnose()
    if format_ == "json":
        print_json(asdict(diagnosis))
    else:
        for heading, line in diagnosis.system.items():
            print_line(console, line, f"{heading:<7}")
        table = make_table("package", "installed", "tested")
        for package in diagnosis.packages:
            version = package.version or ("optional" if package.optional else "missing")
            color = "red" if package.problem else "" if package.version else "dim"
            table.add_row(package.name, version, package.tested, style=color)
        console.print("", table, highlight=False)
        for problem in diagnosis.problems:
            print_line(console, problem, "problem", "red")
        if diagnosis.repair:
            print_line(console, diagnosis.repair, "repair ")
    if diagnosis.problems:
        raise typer.Exit(1)
