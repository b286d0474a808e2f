"""Commands about the installation: `bandpo doctor`, and `bandpo configs`, the config files of the package."""

from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from bandpo_cli.cli import options as opt
from bandpo_cli.cli.console import make_table, open_console, print_json, print_line, print_rows
from bandpo_cli.cli.options import complete_shipped_config
from bandpo_cli.errors import UserError, nearest

configs_app = opt.command_group(invoke_without_command=True)


def doctor(format_: opt.TableOrJson = "table") -> None:
    """Check the installation: versions against the tested ranges, imports, GPUs and their free memory.

    The exit code is 0 if everything is in order, and 1 if a package is missing,
    is outside its tested range or cannot be imported, or if torch cannot use
    the GPU.

    [bold]bandpo doctor[/bold]  after installing, and for reports of errors

    [bold]bandpo doctor --format json[/bold]  in scripts
    """
    from bandpo_cli.experiments.doctor import diagnose

    console = open_console()
    with console.status("importing the packages …") if format_ == "table" else nullcontext():
        diagnosis = diagnose()
    if format_ == "json":
        print_json(asdict(diagnosis))
    else:
        print_rows(console, diagnosis.system.items(), 7)
        table = make_table("package", "installed", "tested")
        for package in diagnosis.packages:
            version = package.version or ("optional" if package.optional else "missing")
            color = "red" if package.problem else "" if package.version else "dim"
            table.add_row(package.name, version, package.tested, style=color)
        console.print("", table, highlight=False)
        for problem in diagnosis.problems:
            print_line(console, problem, "problem", "red")
        print_rows(console, [("repair", diagnosis.repair or "")], 7)
    if diagnosis.problems:
        raise typer.Exit(1)


@configs_app.callback()
def configs(context: typer.Context) -> None:
    """List the config files of the package; --config accepts their names.

    [bold]bandpo configs[/bold]  list the names, each with a one-line description

    [bold]bandpo configs show paper/base[/bold]  print a config file, to copy and change

    [bold]bandpo train -c paper/base -c paper/models/qwen2.5-3b-instruct[/bold]  use them
    """
    if context.invoked_subcommand is not None:
        return
    from bandpo_cli.config import describe_config, shipped_configs

    table = make_table("", "")
    table.show_header = False
    table.columns[0].no_wrap = True
    for name, path in shipped_configs().items():
        table.add_row(Text(name, "bold"), Text(describe_config(path)))
    open_console().print(table, highlight=False)


@configs_app.command()
@opt.documented
def show(name: Annotated[str, opt.argument("NAME", complete=complete_shipped_config)]) -> None:
    """Print a configuration file.

    Args:
        name: A name of the list, such as paper/base.
    """
    from bandpo_cli.config import shipped_configs

    known = shipped_configs()
    path = known.get(name.removesuffix(".yaml"))
    if path is None:
        near = nearest(name, known)
        raise UserError(f"{name}: no configuration of that name{near}; `bandpo configs` lists them")
    print(path.read_text(encoding="utf-8"), end="")
