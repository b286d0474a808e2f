"""`bandpo export`: an experiment as files for another engine, and the policy of a run as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bandpo_cli.cli.completion import folder_of
from bandpo_cli.cli.options import RUNS, Assignments, ConfigFiles, command_group

export_app = command_group(no_args_is_help=True)


@export_app.callback()
def export() -> None:
    """Write an experiment for verl, or the policy of a run as a model folder."""


@export_app.command()
def verl(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; it must not exist.")],
    config: ConfigFiles = None,
    set_: Assignments = None,
    nodes: Annotated[int, typer.Option(metavar="N", min=1, help="Machines of the job.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(metavar="N", min=1, help="GPUs of each machine.")] = 8,
    allow_differences: Annotated[
        bool,
        typer.Option(
            "--allow-differences",
            help="Export settings that verl computes differently; README.md lists them.",
        ),
    ] = False,
) -> None:
    """Write a folder with which verl runs an experiment on one or several machines.

    It has the command with every setting (run.sh), the problems with their
    prompts, the reward function with this package's graders, and a README.md
    that maps each setting. A setting that verl would compute differently is an
    error, unless --allow-differences is given.

    [bold]bandpo export verl -c paper/base -c paper/models/qwen2.5-3b-instruct --out job[/bold]  one machine with 8 GPUs

    [bold]bandpo export verl -c my.yaml --out job --nodes 4 --gpus-per-node 8[/bold]  four machines

    [bold]bandpo export verl --set optim.warmup_steps=0 --out job --gpus-per-node 1[/bold]  the bundled model
    """
    from bandpo_cli.cli.console import open_console, print_line
    from bandpo_cli.config.files import read_config
    from bandpo_cli.config.layers import read_assignments, resolve
    from bandpo_cli.experiments.export_folders import export_verl

    settings = resolve([*map(read_config, config or []), read_assignments(set_ or [])])
    exported = export_verl(
        settings, out, nodes=nodes, gpus_per_node=gpus_per_node, allow_differences=allow_differences
    )
    console = open_console()
    rows = [
        ("method", settings.bounds.describe()),
        ("data", f"{exported.problems:,} training problems, {exported.heldout:,} held out"),
        *(("note", line) for line in exported.notes),
        *(("batches", line) for line in exported.arithmetic),
        *(("differs", line) for line in exported.differences),
        ("run", f"bash {exported.folder / 'run.sh'}"),
    ]
    for heading, line in rows:
        print_line(console, line, heading)


@export_app.command()
def merged(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run (or RUN@STEP) in --runs-dir, or an adapter folder of peft.",
            autocompletion=folder_of("run"),
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; it must not exist.")],
    runs_dir: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the runs.")] = RUNS,
) -> None:
    """Write the policy of a run as a model folder, which transformers and vLLM load.

    The adapters of a run with LoRA are merged into the weights of its base
    model. For a run that trains all weights, the model files of the checkpoint are copied.

    [bold]bandpo export merged NAME --out model[/bold]  the latest checkpoint

    [bold]bandpo export merged NAME@100 --out model[/bold]  the checkpoint of step 100
    """
    from bandpo_cli.cli.console import open_console, print_line
    from bandpo_cli.experiments.export_folders import export_merged

    folder = export_merged(model, out, runs_dir)
    print_line(open_console(), str(folder), "model")
