"""`bandpo configs`: the configuration files of the package."""

from __future__ import annotations

from typing import Annotated

import typer

from bandpo_cli.cli.completion import complete_shipped_config
from bandpo_cli.cli.options import command_group

configs_app = command_group(invoke_without_command=True)


@configs_app.callback()
def configs(context: typer.Context) -> None:
    """List the config files of the package; --config accepts their names.

    [bold]bandpo configs[/bold]  list the names, each with a one-line description

    [bold]bandpo configs show paper/base[/bold]  print a config file, to copy and change

    [bold]bandpo train -c paper/base -c paper/models/qwen2.5-3b-instruct[/bold]  use them
    """
    if context.invoked_subcommand is not None:
        return
    from rich.text import Text

    from bandpo_cli.cli.console import make_table, open_console
    from bandpo_cli.config.files import describe_config, shipped_configs

    table = make_table("", "")
    table.show_header = False
    table.columns[0].no_wrap = True
    for name, path in shipped_configs().items():
        table.add_row(Text(name, "bold"), Text(describe_config(path)))
    open_console().print(table, highlight=False)


@configs_app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A name of the list, such as paper/base.",
            autocompletion=complete_shipped_config,
        ),
    ],
) -> None:
    """Print a configuration file."""
    from bandpo_cli.config.files import shipped_configs
    from bandpo_cli.errors import UserError, nearest

    known = shipped_configs()
    path = known.get(name.removesuffix(".yaml"))
    if path is None:
        raise UserError(
            f"{name}: no configuration of that name{nearest(name, known)}; `bandpo configs` lists them"
        )
    print(path.read_text(encoding="utf-8"), end="")
