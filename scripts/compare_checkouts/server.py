"""Fork server: imports the large libraries once, then forks a process for each command.

Importing torch and transformers takes most of the time of a small command. The package under test is not imported
here: each forked process imports it from PYTHONPATH, as `python -m bandpo_cli` does. The processes start no thread
and compute nothing before the fork.

Protocol, one line each: a request `{"words": [...], "stdout": PATH, "stderr": PATH}` on standard input; its process
id, and after its end its exit code, on standard output. Each process leads a process group of its own.
"""

import atexit
import gc
import json
import os
import runpy
import sys
import threading
import traceback
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

PRELOADED = (
    "jinja2",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pandas",
    "pyarrow.parquet",
    "pydantic",
    "rich.console",
    "scipy.stats",
    "safetensors.torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.tokenization_utils_fast",
    "typer",
    "yaml",
)


def serve() -> None:
    """Serve requests until the end of standard input; in a forked process, run the command and exit."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            _redirect(request["stdout"], request["stderr"])
            _run(request["words"])
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(words: list[str]) -> NoReturn:
    """Run `python -m bandpo_cli` with these arguments, and exit as the interpreter does.

    Threads are joined and exit handlers run; modules are not torn down, which takes longer than a small command.
    """
    code: object = 0
    try:
        sys.argv = ["bandpo", *words]
        runpy.run_module("bandpo_cli", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - printed and turned into exit code 1, as the interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _redirect(stdout: str, stderr: str) -> None:
    """Redirect the standard streams to files; input is empty."""
    for number, path in enumerate((os.devnull, stdout, stderr)):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(path, flags, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as for `python -m`; the folder of this file would hide modules
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    gc.collect()
    gc.freeze()  # or each forked process would copy all of this memory at its first collection
    serve()
