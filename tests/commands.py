"""Run `bandpo` in processes that are forked from a process that has imported torch and transformers.

A new interpreter needs five seconds of processor time for these imports, more than most commands. Tests of the imports
start an interpreter of their own.
"""

import base64
import faulthandler
import inspect
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bandpo_cli.cli.signals import FORWARDED

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    ["torch", "transformers.models.qwen2.modeling_qwen2", "transformers.models.auto.tokenization_auto",
     "transformers.tokenization_utils_fast", "pandas", "pyarrow.parquet", "scipy.stats", "matplotlib.figure",
     "matplotlib.backends.backend_agg", "jinja2", "rich.progress", "typer", "bandpo_cli.cli.train_view",
     "bandpo_cli.experiments.run", "bandpo_cli.training.build", "bandpo_cli.training.loop", "peft",
     "transformers.models.qwen2.tokenization_qwen2", "pyarrow.dataset", "bandpo_cli.reports.run_plots",
     "torch.distributed.checkpoint.hf_storage", "tests.training.recording", "tests.preloaded"]
)  # fmt: skip

EMPTY_PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)
"""An image of one pixel."""


class Forked:
    """`python -m bandpo_cli` in a forked process, in a session of its own, with the interface of `subprocess.Popen`.

    As in the process of the tests, PNG files are empty images and `os.fsync` returns at once; not on a terminal.

    Args:
        words: arguments of the command.
        imports: modules to import before the command, such as one that registers entries.
        module: the module in place of `bandpo_cli`.
        before: called in the process before the command.
        terminal: the path of a terminal for its input and output; None for pipes.
        fork_children: fork the ranks, runs and engine processes that the command starts, too; see `ForkedChild`.
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
        fork_children: bool = False,
        **environment: str,
    ) -> None:
        variables = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
        pipes = [FORKSERVER.Pipe(duplex=False) for _ in range(2)]
        outputs = [writer for _, writer in pipes] if terminal is None else terminal
        options = (imports, module, before, fork_children)
        self._process = FORKSERVER.Process(
            target=_start, args=(words, cwd, outputs, variables | environment, *options)
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
    process = Forked(*words, cwd=cwd, **options)
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(["bandpo", *words], process.returncode or 0, out, err)


class ForkedChild(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks this process in place of starting `python -m bandpo_cli` or an engine process.

    The parent must hold nothing that a fork cannot share: no connection to MLflow's database, no pool of threads.
    """

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        is_command = [*args[:3]] == [sys.executable, "-m", "bandpo_cli"]
        if not is_command and not any("bandpo_cli.sampling.engine_server" in word for word in args[4:5]):
            super()._execute_child(args, *rest)
            return
        start = inspect.signature(super()._execute_child).bind(args, *rest).arguments
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(*(start[name] for name in _PIPES))
            return
        code: object = 1
        try:
            faulthandler.unregister(signal.SIGUSR1)  # as in a new process
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, *FORWARDED):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number, descriptor in ((1, start["c2pwrite"]), (2, start["errwrite"])):
                os.dup2(descriptor if descriptor >= 0 else number, number)
            # No lock of the parent stays held, and objects of the parent close no descriptor of this process later.
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *start["pass_fds"]}:
                os.dup2(null, descriptor)
            _enter(Path.cwd(), [1, 2], dict(start["env"] or os.environ))
            if is_command:
                _run(args[3:])
            else:
                sys.argv = ["-c", *args[4:]]
                exec(args[3], {})
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException:  # noqa: BLE001 - the process ends here
            traceback.print_exc()
        finally:
            threading._shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1 if code else 0)


def save_empty_images(savefig: Callable[..., None]) -> Callable[..., None]:
    """Return a function in place of `Figure.savefig` that writes an empty image for the format PNG."""

    def save(figure: Any, path: Any, **options: Any) -> None:
        if options.get("format") == "png":
            Path(path).write_bytes(EMPTY_PNG)
        else:
            savefig(figure, path, **options)

    return save


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _start(
    words: Sequence[str],
    cwd: Path,
    outputs: Sequence[Connection] | str,
    variables: dict[str, str],
    imports: Sequence[str],
    module: str,
    before: Callable[[], None] | None,
    fork_children: bool,
) -> None:
    """Run the command in this forked process; `multiprocessing` turns its SystemExit into the exit code."""
    if fork_children:
        subprocess.Popen = ForkedChild
    if isinstance(outputs, str):
        descriptors = [os.open(outputs, os.O_RDWR) for _ in range(2)]
    else:
        descriptors = [output.fileno() for output in outputs]
        os.fsync = lambda descriptor: None
        with suppress(ImportError):
            from matplotlib.figure import Figure

            Figure.savefig = save_empty_images(Figure.savefig)
    _enter(cwd, descriptors, variables)
    sys.path[0] = str(cwd)  # as for `python -m`
    if before is not None:
        before()
    for import_ in imports:
        import_module(import_)
    _run(words, module)


def _enter(cwd: Path, outputs: Sequence[int], variables: dict[str, str]) -> None:
    """Give this process its environment, its folder, a session of its own and two file descriptors for its output."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    os.setsid()
    for number, (name, output) in enumerate(zip(("stdout", "stderr"), outputs, strict=True), start=1):
        os.dup2(output, number)
        setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
    if variables.get("OMP_NUM_THREADS") == "1":  # torch has read it already
        import torch

        torch.set_num_threads(1)


def _run(words: Sequence[str], module: str = "bandpo_cli") -> None:
    sys.argv = ["bandpo", *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:  # a forked process ends without the finalizers of an interpreter
        watch = sys.modules.get("bandpo_cli.processes.watch")
        if watch is not None and watch._folder is not None and f"-{os.getpid()}-" in watch._folder.name:
            watch._folder.cleanup()
