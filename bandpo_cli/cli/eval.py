"""`bandpo eval`, scores of a model or of stored completions, and `bandpo eval compare`."""

from __future__ import annotations

import gc
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bandpo_cli.cli import options as opt
from bandpo_cli.cli.console import open_console
from bandpo_cli.cli.options import folder_of
from bandpo_cli.cli.signals import exit_on_sigterm
from bandpo_cli.datasets import tasks_text
from bandpo_cli.processes.ranks import launched_name

if TYPE_CHECKING:
    from bandpo_cli.experiments.eval_run import EvalResult

eval_app = opt.command_group(invoke_without_command=True)

_GC_THRESHOLDS = (50_000, 10, 10)
"""Thresholds of the garbage collector. The imports of an evaluation create 175,000 objects and hardly any garbage; with
Python's thresholds (700, 10, 10) the collector visits them 470 times in all, which takes 0.35 s."""

_OF_SAMPLING = {
    "--model", "--task", "--template", "--n", "--temperature", "--max-tokens", "--sampler", "--limit", "--seed",
    "--nproc",
}  # fmt: skip
"""The options without effect where stored completions are scored."""
_OF_RESUME = {"--resume", "--format", "--runs-dir", "--tracking-uri", "--mlflow", "--nproc", "--stall-after"}


_TASK_HELP = f"{tasks_text()}, or a .jsonl, .json, .csv or .parquet file; repeatable."
_TASK = opt.option("NAME|FILE", "the evaluation sets of the run", **opt.TASK_VALUES, help=_TASK_HELP)


@eval_app.callback()
@opt.takes_settings("eval")
def evaluate(
    context: typer.Context,
    *,
    model: Annotated[str | None, opt.option("MODEL", "the bundled model", complete=folder_of("run"))] = None,
    task: Annotated[list[str] | None, _TASK] = None,
    samples: Annotated[Path | None, opt.option("FILE")] = None,
    n: Annotated[int | None, opt.option("N", "the run's, else 16 or 4", flags=["--n"], min=1)] = None,
    k: Annotated[str | None, opt.option("K,K", "4, 16, ... up to n", flags=["--k"])] = None,
    settings: opt.EvalSettings,
    format_: opt.TableOrJson = "table",
    resume: Annotated[str | None, opt.option("NAME", complete=folder_of("evaluation"))] = None,
    name: Annotated[str | None, opt.option("NAME", "from model, tasks, n, seed and time")] = None,
    config: opt.ConfigFiles = None,
    set_: opt.Assignments = None,
    runs_dir: opt.RunsDir = opt.RUNS,
    tracking: opt.Tracking,
    nproc: opt.Nproc = None,
) -> int | None:
    """Evaluate a model on problem sets, with confidence intervals, and store every completion.

    mean@n, unbiased pass@k, maj@k, and the shares of answers without a readable
    form, truncated completions and timeouts. Every metric has a 95% interval
    by bootstrap over problems. A checkpoint of a run is evaluated with the
    tasks, template and seed of the run, so the metrics equal the metrics of the run.

    [bold]bandpo eval --model NAME[/bold]  a run's latest checkpoint

    [bold]bandpo eval --model NAME@40 --n 64 --k 1,8,64[/bold]  an earlier one, more samples

    [bold]bandpo eval --model NAME@0[/bold]  the model before training, on the run's own problems

    [bold]bandpo eval --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --task math500[/bold]

    [bold]bandpo eval --samples completions.jsonl --grader math[/bold]  completions from anywhere

    [bold]bandpo eval compare EVAL_A EVAL_B[/bold]  the difference, problem by problem

    Args:
        model: A run: NAME or its folder for the latest checkpoint, NAME@STEP for another, NAME@0 for the model
            before training. Or a Hugging Face folder, an adapter folder of peft, or a hub id.
        samples: Score stored completions, without a model: .jsonl, .json, .csv or .parquet rows with question,
            answer and completions, or an earlier samples.parquet.
        n: Completions per problem.
        k: The k of pass@k and maj@k.
        resume: Resume an interrupted evaluation with the settings that it was started with.
        name: Name of the evaluation's folder.
    """
    if context.invoked_subcommand is not None:
        return None
    gc.set_threshold(*_GC_THRESHOLDS)
    from bandpo_cli.cli.launch import launch, ranks_to_start
    from bandpo_cli.config.layers import nest, read_assignments, read_config
    from bandpo_cli.experiments import evaluate as run_evaluation
    from bandpo_cli.experiments.eval_plan import MAX_K, plan_evaluation, plan_evaluation_resume
    from bandpo_cli.experiments.eval_run import resume_evaluation
    from bandpo_cli.experiments.preflight import choose_run_name, read_numbers
    from bandpo_cli.storage.eval_folder import EvalFolder

    console = open_console(stderr=format_ == "json", long_running=True)
    start: partial[EvalResult]
    if resume is not None:
        why = "the settings of the evaluation are used"
        opt.refuse_with(context, "--resume", why, lambda name: name not in _OF_RESUME)
        folder = EvalFolder.open(runs_dir, resume)
        request = plan_evaluation_resume(folder, nest(tracking).get("tracking"))
        start = partial(resume_evaluation, resume, runs_dir, request=request)
    else:
        if samples is not None:
            opt.refuse_with(context, "--samples", "nothing is sampled", _OF_SAMPLING.__contains__)
        request = plan_evaluation(
            "embedded" if model is None else model,
            task or [],
            samples=samples,
            n=n,
            k=None if k is None else sorted({*read_numbers("--k", k, 1, MAX_K)}),
            grader=settings.pop("task.grader", None),
            base=[*map(read_config, config or []), nest(tracking | settings)],
            settings=[read_assignments(set_ or [])],
            runs_dir=runs_dir,
        )
        asked = launched_name() if name is None else name
        folder = EvalFolder(runs_dir / choose_run_name(runs_dir, asked, request.default_name()))
        # The name is chosen again at the start: another process may have taken the default one since.
        start = partial(run_evaluation, request, runs_dir=runs_dir, name=asked)
    if (ranks := ranks_to_start(nproc)) is not None:
        return launch(ranks, request.config, "eval", folder.path, runs_dir)
    from bandpo_cli.cli.eval_view import EvalView, print_files, print_request

    if not folder.samples_path.exists():
        print_request(console, request)
    with exit_on_sigterm(), closing(EvalView(console, format_, runs_dir)) as view:
        result = start(callbacks=[view])
    print_files(console, result)
    return None


_EVALUATION = folder_of("evaluation", "run")


@eval_app.command()
@opt.documented
def compare(
    a: Annotated[str, opt.argument("A", complete=_EVALUATION)],
    b: Annotated[str, opt.argument("B", complete=_EVALUATION)],
    show: Annotated[int, opt.option("N", min=0)] = 5,
    format_: opt.TableOrJson = "table",
    runs_dir: opt.RunsDir = opt.RUNS,
) -> None:
    """Compare two evaluations problem by problem: B − A, with paired 95% intervals.

    An evaluation is its name in --runs-dir, its folder, or its eval.json. A
    problem is a win if B has a higher share of correct completions than A. Only
    problems that both have are compared, and settings that differ are listed.

    [bold]bandpo eval compare before after[/bold]  two evaluations

    [bold]bandpo eval compare NAME@0 NAME@100[/bold]  two steps of a run

    Args:
        a: An evaluation, or RUN or RUN@STEP as evaluated in training.
        b: The evaluation to compare with A, in the same forms.
        show: Number of the most changed problems to list.
    """
    from bandpo_cli.cli.eval_view import print_comparison
    from bandpo_cli.experiments import compare as compare_evaluations

    print_comparison(open_console(), compare_evaluations(a, b, runs_dir), show, format_)
