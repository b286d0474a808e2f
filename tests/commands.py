"""Run `bandpo` in processes that are forked from a process that has imported torch and transformers.

A new interpreter needs five seconds of processor time for these imports, more than most commands. Tests of the imports
start an interpreter of their own.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    ["torch", "transformers.models.qwen2.modeling_qwen2", "transformers.models.auto.tokenization_auto",
     "transformers.tokenization_utils_fast", "pandas", "pyarrow.parquet", "scipy.stats", "matplotlib.figure",
     "matplotlib.backends.backend_agg", "jinja2", "rich.console", "typer", "bandpo_cli.config.run"]
)  # fmt: skip


class Forked:
    """`python -m bandpo_cli` in a forked process, in a session of its own, with the interface of `subprocess.Popen`.

    Args:
        words: arguments of the command.
        imports: modules to import before the command, such as one that registers entries.
        module: the module in place of `bandpo_cli`.
        before: called in the process before the command.
        terminal: the path of a terminal for its input and output; None for pipes.
        environment: variables that are added to those of this process; MLFLOW_TRACKING_URI is not passed on.
    """

    def __init__(
        self,
        *words: str,
        cwd: Path,
        imports: Sequence[str] = (),
        module: str = "bandpo_cli",
        before: Callable[[], None] | None = None,
        terminal: str | None = None,
        **environment: str,
    ) -> None:
        variables = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
        pipes = [FORKSERVER.Pipe(duplex=False) for _ in range(2)]
        outputs = [writer for _, writer in pipes] if terminal is None else terminal
        self._process = FORKSERVER.Process(
            target=_run, args=(words, cwd, imports, module, before, outputs, variables | environment)
        )
        self._process.start()
        for _, writer in pipes:
            writer.close()
        self.stdout, self.stderr = (
            os.fdopen(os.dup(reader.fileno()), encoding="utf-8") for reader, _ in pipes
        )
        self.pid = self._process.pid
        self.kill, self.terminate = self._process.kill, self._process.terminate

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("bandpo", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        with ThreadPoolExecutor(2) as pool:
            out, err = (pool.submit(stream.read) for stream in (self.stdout, self.stderr))
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            return out.result(), err.result()


def run_bandpo(
    *words: str, cwd: Path, timeout: float = 240.0, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run `python -m bandpo_cli` and return its exit code and output; `options` are those of `Forked`."""
    process = Forked(*words, cwd=cwd, **options)  # type: ignore[arg-type]
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(["bandpo", *words], process.returncode or 0, out, err)


def _run(
    words: Sequence[str],
    cwd: Path,
    imports: Sequence[str],
    module: str,
    before: Callable[[], None] | None,
    outputs: Sequence[Connection] | str,
    variables: dict[str, str],
) -> None:
    """Run the command in this forked process; `multiprocessing` turns its SystemExit into the exit code."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    os.setsid()
    sys.path[0] = str(cwd)  # as for `python -m`
    for number, name in enumerate(("stdout", "stderr"), start=1):
        output = os.open(outputs, os.O_RDWR) if isinstance(outputs, str) else outputs[number - 1].fileno()
        os.dup2(output, number)
        setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
    if variables.get("OMP_NUM_THREADS") == "1":  # torch has read it already
        import torch

        torch.set_num_threads(1)
    if before is not None:
        before()
    for import_ in imports:
        import_module(import_)
    sys.argv = ["bandpo", *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
