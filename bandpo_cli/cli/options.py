"""Options that several commands share, and checks of option values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from bandpo_cli.cli.completion import complete_config, folder_of, one_of
from bandpo_cli.errors import UserError, nearest
from bandpo_cli.registries import ENGINES, GRADERS, split_member

RUNS = Path("runs")

ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="YAML config file, or a name of `bandpo configs`; repeatable, later files win.",
        autocompletion=complete_config,
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as section.key=value; repeatable."),
]
SamplerName = Annotated[
    str | None,
    typer.Option(
        metavar="ENGINE",
        help=f"auto, {ENGINES.names_text()}.",
        show_default="auto",
        autocompletion=one_of(["auto", *ENGINES]),
    ),
]
GraderName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Grader: {GRADERS.names_text()}.",
        show_default="the one of the data",
        autocompletion=one_of(GRADERS),
    ),
]
RunsDir = Annotated[
    Path,
    typer.Option(metavar="FOLDER", help="Where runs, evaluations, sweeps and the MLflow store are kept."),
]
TrackingUri = Annotated[
    str | None,
    typer.Option(
        metavar="URI",
        help="MLflow server or store.",
        show_default="$MLFLOW_TRACKING_URI, else mlflow.db in --runs-dir",
    ),
]
Mlflow = Annotated[
    bool | None,
    typer.Option("--mlflow/--no-mlflow", help="Send metrics to MLflow.", show_default="on"),
]
TableOrJson = Annotated[
    str,
    typer.Option(
        "--format", metavar="FORMAT", help="table or json.", autocompletion=one_of(("table", "json"))
    ),
]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Its name in --runs-dir, or its folder.", autocompletion=folder_of("run")
    ),
]


Nproc = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Number of processes on this machine, each with a GPU of its own where there are GPUs.",
        show_default="1",
    ),
]


def single(flag: str, kind: type = str) -> Callable[[str], Any]:
    """Return a parser of one value for an option of `train`; several values are a sweep's.

    Args:
        flag: the option.
        kind: str, int or float.
    """

    def parse(text: str) -> Any:
        if "," in text:
            raise UserError(
                f"{flag} {text}: train takes one value; bandpo sweep {flag} {text} compares several"
            )
        try:
            return kind(text)
        except ValueError:
            what = "an integer" if kind is int else "a number"
            raise UserError(f"{flag} {text}: {what} is expected") from None

    return parse


def print_members(context: typer.Context, tasks: list[str] | None) -> list[str] | None:
    """Print the members of a task and exit if a value of `--task` is TASK:list; return the values otherwise."""
    if context.resilient_parsing:  # a shell completes a later word
        return tasks
    for task, member in filter(None, map(split_member, tasks or [])):
        if member == "list":
            from bandpo_cli.config.task import describe_members

            found = describe_members(task)
            width = max(map(len, found))
            typer.echo("\n".join(f"{name:{width}}  {text}".rstrip() for name, text in found.items()))
            raise typer.Exit
    return tasks


def check_choice(flag: str, value: str, allowed: tuple[str, ...]) -> str:
    """Return `value` if it is one of `allowed`, else raise a UserError."""
    if value not in allowed:
        raise UserError(f"{flag} {value}: unknown{nearest(value, allowed)}; allowed: {', '.join(allowed)}")
    return value


def refuse_with(flag: str, why: str, given: dict[str, Any], others: set[str]) -> None:
    """Raise UserError if any of the flags `others` is given, which `flag` makes meaningless."""
    extra = [name for name, value in given.items() if name in others and value not in (None, [])]
    if extra:
        raise UserError(f"{flag}: {why}; leave out {', '.join(extra)}")
