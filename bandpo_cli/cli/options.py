"""Options that several commands share: one wording, one type."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bandpo_cli.registries import ENGINES

RUNS = Path("runs")

ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help="YAML file of settings; repeatable, later files win."
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as section.key=value; repeatable."),
]
SamplerName = Annotated[
    str | None, typer.Option(metavar="ENGINE", help=f"auto, {ENGINES.names_text()}.", show_default="auto")
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
    typer.Option("--mlflow/--no-mlflow", help="Send the figures to MLflow.", show_default="on"),
]
TableOrJson = Annotated[str, typer.Option("--format", metavar="FORMAT", help="table or json.")]
