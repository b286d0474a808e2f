"""`bandpo samples`: stored completions with their verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bandpo_cli.cli.completion import folder_of
from bandpo_cli.cli.options import RUNS, RunsDir, choice
from bandpo_cli.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from bandpo_cli.storage.tables import GradedCompletion


def samples(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run or an evaluation: its name in --runs-dir, or its folder.",
            autocompletion=folder_of("run", "evaluation"),
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Step of the run.", show_default="the last step with samples"),
    ] = None,
    correct: Annotated[
        bool | None,
        typer.Option("--correct/--wrong", help="Only these completions.", show_default="both"),
    ] = None,
    problem: Annotated[
        str | None, typer.Option(metavar="ID", help="Only completions of this problem.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=0, metavar="N", help="Maximum number of completions to print; 0 prints all.")
    ] = 8,
    format_: Annotated[str, choice("--format", "text", "jsonl")] = "text",
    runs_dir: RunsDir = RUNS,
) -> None:
    """Print completions with their reference answers and verdicts, grouped by prompt.

    [bold]bandpo samples first[/bold]  of the last step

    [bold]bandpo samples first --step 0 --wrong[/bold]  what went wrong before the training

    [bold]bandpo samples first --problem 3-7-8-9-24 --limit 0[/bold]  all completions of a problem

    [bold]bandpo samples first --limit 0 --format jsonl > completions.jsonl[/bold]  in scripts
    """
    from bandpo_cli.cli.console import open_console, to_json
    from bandpo_cli.experiments.overview import read_completions_of, select_completions

    path, completions = read_completions_of(run, runs_dir, step)
    chosen = select_completions(completions, problem, correct)
    shown = chosen[:limit] if limit else chosen
    if format_ == "jsonl":
        for completion in shown:
            print(to_json(completion))
        return
    if not chosen:
        raise UserError(
            f"{path}: none of its {len(completions):,} completions is {'correct' if correct else 'wrong'}"
        )
    console = open_console()
    previous = None
    for completion in shown:
        # A group has one prompt, which may be longer than all of its completions together.
        _print_completion(console, completion, with_prompt=completion["prompt"] != previous)
        previous = completion["prompt"]
    right = sum(item["accuracy"] == 1 for item in chosen)
    more = f"; --limit 0 prints all {len(chosen):,}" if len(shown) < len(chosen) else ""
    console.print(
        f"{len(shown):,} of {len(chosen):,} completions of {path}, {right:,} correct{more}",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def _print_completion(console: Console, completion: GradedCompletion, with_prompt: bool) -> None:
    from rich.rule import Rule
    from rich.text import Text

    style = "green" if completion["accuracy"] == 1 else "red"
    label, problem = completion["label"], completion["problem_id"]
    facts = [problem if problem.startswith(label) else f"{label} {problem}", completion["verdict"]]
    if completion["reward"] is not None:
        facts.append(f"reward {completion['reward']:g}")
    if completion["length"] is not None:
        facts.append(f"{completion['length']:,} tokens")
    if completion["finish_reason"] == "length":
        facts.append("truncated")
    console.print(Rule(Text(" · ".join(facts), style), align="left", style=style))
    if with_prompt:
        console.print(Text(completion["prompt"], "dim"), soft_wrap=True)
    console.print(Text(completion["text"]), soft_wrap=True)
    console.print(Text.assemble(("reference  ", "bold"), completion["reference"]), soft_wrap=True)
    console.print()
