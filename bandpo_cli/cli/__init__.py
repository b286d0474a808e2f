"""Command line application. Modules of commands are light: heavy imports are inside the command functions."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bandpo_cli import __version__
from bandpo_cli.cli.bounds import bounds
from bandpo_cli.cli.doctor import configs_app, doctor
from bandpo_cli.cli.eval import eval_app
from bandpo_cli.cli.export import export_app, import_app
from bandpo_cli.cli.options import command_group
from bandpo_cli.cli.report import report
from bandpo_cli.cli.runs import plot, runs, samples, show, view
from bandpo_cli.cli.sweep import sweep
from bandpo_cli.cli.sync import sync
from bandpo_cli.cli.train import train

COMPLETION_OPTIONS = ("install_completion", "show_completion")
"""The names that Typer gives to the options that set up shell completion."""


class _Root(TyperGroup):
    """The command group `bandpo`. Its help lists the options of shell completion last."""

    def get_params(self, ctx: Any) -> list[Any]:
        return sorted(super().get_params(ctx), key=lambda option: option.name in COMPLETION_OPTIONS)


app = command_group(name="bandpo", cls=_Root, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(context: typer.Context, asked: bool) -> None:
    if asked and not context.resilient_parsing:  # resilient: a shell completes a later word
        print(f"bandpo {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> None:
    """Reinforcement learning of language models with Band-constrained Policy Optimization."""


# In the order of the help.
app.command()(train)
app.add_typer(eval_app, name="eval")
for command in (sweep, report, runs, show, samples, view, plot, sync, bounds):
    app.command()(command)
app.add_typer(export_app, name="export")
app.add_typer(import_app, name="import")
app.add_typer(configs_app, name="configs")
app.command()(doctor)
