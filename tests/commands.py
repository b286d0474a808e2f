"""Run `bandpo` in processes that are forked from a process that has imported torch and transformers.

A new interpreter needs five seconds of processor time for these imports, more than most commands. Tests of the
imports, of signals and of the terminal start an interpreter of their own.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "transformers.models.qwen2.modeling_qwen2", "transformers.models.auto.tokenization_auto",
     "transformers.tokenization_utils_fast", "pandas", "pyarrow.parquet", "scipy.stats", "matplotlib.figure",
     "matplotlib.backends.backend_agg", "jinja2", "rich.console", "typer", "bandpo_cli.config.run"]
)  # fmt: skip


def run_bandpo(
    *words: str, cwd: Path, imports: Sequence[str] = (), timeout: float = 240.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m bandpo_cli` and return its exit code and output.

    Args:
        words: arguments of the command.
        imports: modules to import before the command, such as one that registers entries.
        environment: variables that are added to those of this process; MLFLOW_TRACKING_URI is not passed on.
    """
    variables = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = _CONTEXT.Process(target=_run, args=(words, cwd, imports, variables | environment, outputs))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(["bandpo", *words], timeout)
        texts = [path.read_text(encoding="utf-8") for path in outputs]
    return subprocess.CompletedProcess(["bandpo", *words], process.exitcode, *texts)


def _run(
    words: Sequence[str],
    cwd: Path,
    imports: Sequence[str],
    variables: dict[str, str],
    outputs: Sequence[Path],
) -> None:
    """Run the command in this forked process; `multiprocessing` turns its SystemExit into the exit code."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    sys.path[0] = str(cwd)  # as for `python -m`
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    for module in imports:
        import_module(module)
    sys.argv = ["bandpo", *words]
    runpy.run_module("bandpo_cli", run_name="__main__", alter_sys=True)
