"""The way in: files and functions that run between the shell and the first backward pass of `bandpo train`.

    python -m scripts.way_in            # the functions of each file in the order of their calls, and the counts
    python -m scripts.way_in --check    # exit with code 1 if a count is above its limit (LIMITS)

A profiler of the main thread records every call of a function of the package, from the start of the command until
`torch.autograd.backward`. The run trains the bundled model on two prompts, without evaluations and without a tracker.
Bodies of modules and classes and comprehensions are no functions here, because Python inlines some of them.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[1] / "bandpo_cli"
COMMAND = ["train", "--steps=1", "--no-mlflow", "--set=sampling.prompts=2", "--set=optim.updates=1"]
COMMAND += ["--set=evaluation.every=0"]
LIMITS = {"files": 50, "functions": 380, "changes of file": 366}
"""The largest allowed counts. Lower a limit when the way becomes shorter; no feature that can be off it raises one."""

_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Call(NamedTuple):
    """A call of a function: its file in the package, its qualified name and its first line."""

    file: str
    function: str
    line: int


def record_calls(folder: Path) -> list[Call]:
    """Train in this process until the first backward pass; return all calls of functions of the package in order.

    Raises:
        RuntimeError: the run has ended before a backward pass.
    """
    import torch

    calls: list[Call] = []
    prefix = f"{PACKAGE}/"

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name not in _COMPREHENSIONS
        if event == "call" and is_function and code.co_filename.startswith(prefix):
            calls.append(Call(code.co_filename.removeprefix(prefix), code.co_qualname, code.co_firstlineno))

    def stop(*_: Any, **__: Any) -> None:
        sys.setprofile(None)
        raise KeyboardInterrupt  # which ends the run

    torch.autograd.backward = stop
    sys.argv = ["bandpo", *COMMAND, "--runs-dir", str(folder)]
    sys.setprofile(profile)
    try:
        from bandpo_cli.__main__ import main

        main()
    except SystemExit:
        if sys.getprofile() is None:
            return calls
    finally:
        sys.setprofile(None)
    raise RuntimeError("the run has ended before a backward pass")


def count(calls: list[Call]) -> dict[str, int]:
    """Return the number of files and functions, and how often a call is in another file than the call before."""
    return {
        "files": len({call.file for call in calls}),
        "functions": len(set(calls)),
        "changes of file": sum(first.file != second.file for first, second in pairwise(calls)),
    }


def main() -> None:
    """Print the counts and, without --check, the functions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit with code 1 if a count is above its limit")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="way-in-") as folder:
        calls = record_calls(Path(folder))
    if not options.check:
        functions: dict[str, dict[str, None]] = {}
        for call in calls:
            functions.setdefault(call.file, {})[call.function] = None
        for file, names in functions.items():
            print(f"{file} ({len(names)}): {', '.join(names)}")
    counts = count(calls)
    for name, number in counts.items():
        print(f"{name}: {number} (at most {LIMITS[name]})")
    if options.check and any(counts[name] > limit for name, limit in LIMITS.items()):
        sys.exit("the way in is longer than its limit; see scripts/way_in.py")


if __name__ == "__main__":
    main()
