"""Runs commands in one checkout: environment, processes, and the files that each command writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from types import TracebackType

from scripts.compare_checkouts.commands import Command

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""One thread each: the order of the terms in a sum depends on the number of threads."""

TIMEOUT_S = 600.0
POLL_S = 0.005
SHOWN_S = 3.0
"""Commands that take longer print a line of progress."""

_LOCATE = "import bandpo_cli; print(bandpo_cli.__file__)"
_LOCATE_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_LOCATE!r}], check=True)"

Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class Side:
    """One of the two checkouts.

    Attributes:
        name: `old` or `new`; of equal length, so that paths and line breaks have equal lengths too.
        checkout: the folder with the package `bandpo_cli`.
        work: the current folder of all commands; has the inputs, and `runs/`.
    """

    name: str
    checkout: Path
    work: Path

    def plain(self, text: str) -> str:
        """Return `text` with names in place of the two folders; one may lie in the other, or begin like it."""
        names = {str(self.work): "<work>", str(self.checkout): "<checkout>"}
        for path in sorted(names, key=len, reverse=True):
            text = text.replace(path, names[path])
        return text


@dataclass(frozen=True)
class Outcome:
    """One command in one checkout.

    Attributes:
        code: the exit code; negative for a signal.
        written: files that were added, changed or removed, relative to `Side.work`.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    written: frozenset[str]


def environment(side: Side) -> dict[str, str]:
    """Return the variables of all commands: the checkout first on the Python path, one thread, no GPU, no network.

    PYTHONHASHSEED stays random, so that results that depend on the order of a set differ.
    """
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "BANDPO_"))
    }
    return {
        **inherited,
        **dict.fromkeys(THREADS, "1"),
        "PYTHONPATH": str(side.checkout),
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "200",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }


def check_import(side: Side) -> None:
    """Raise RuntimeError unless the commands, and the processes that they start, import the side's checkout."""
    for code in (_LOCATE, _LOCATE_CHILD):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=side.work, env=environment(side), capture_output=True, text=True
        )
        found = done.stdout.strip()
        expected = side.checkout / "bandpo_cli" / "__init__.py"
        if done.returncode or Path(found).resolve() != expected:
            raise RuntimeError(f"{side.name}: imports {found or done.stderr.strip()}, not {expected}")


class Runner:
    """Runs the commands of one side through a fork server."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self._running: int | None = None
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py"))],
            cwd=side.work,
            env=environment(side),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Terminate the server, and the command that runs."""
        self._kill()
        self._server.kill()
        self._server.wait()

    def run_all(self, commands: Sequence[Command]) -> dict[str, Outcome]:
        """Run the commands one after the other and return the outcomes by name."""
        outcomes = {}
        for command in commands:
            outcome = self.run(command)
            outcomes[command.name] = outcome
            if outcome.seconds > SHOWN_S:
                print(f"{self.side.name}  {command.name:<20} {outcome.seconds:5.1f} s", flush=True)
        return outcomes

    def run(self, command: Command) -> Outcome:
        """Run one command to its end, or to the step at which it is killed.

        Raises RuntimeError when the server has ended.
        """
        work = self.side.work
        outputs = [work.parent / f"{self.side.name}-{stream}.txt" for stream in ("stdout", "stderr")]
        before, start = stamps(work), time.monotonic()
        request = {"words": command.words, "stdout": str(outputs[0]), "stderr": str(outputs[1])}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        self._running = self._answer()
        timer = Timer(TIMEOUT_S, self._kill)
        timer.start()
        try:
            if command.kill_after is not None:
                run, step = command.kill_after
                self._kill_after(work / "runs" / run / "metrics.jsonl", step)
            code = self._answer()
        finally:
            timer.cancel()
            self._running = None
        seconds, after = time.monotonic() - start, stamps(work)
        written = frozenset(path for path in {**before, **after} if before.get(path) != after.get(path))
        stdout, stderr = (
            self.side.plain(path.read_text(encoding="utf-8", errors="replace")) for path in outputs
        )
        return Outcome(code, stdout, stderr, seconds, written)

    def _answer(self) -> int:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.side.name}: the fork server has ended")
        return int(line)

    def _kill(self) -> None:
        """Send SIGKILL to the process group of the command that runs."""
        if self._running is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._running, signal.SIGKILL)

    def _kill_after(self, metrics: Path, step: int) -> None:
        """Kill the command once `metrics` has the line of `step`, or return when it ends before; step 0 comes first."""
        assert self._running is not None
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > step):
            try:
                os.kill(self._running, 0)
            except ProcessLookupError:
                return
            time.sleep(POLL_S)
        self._kill()


def stamps(folder: Path) -> dict[str, Stamp]:
    """Return modification time, size and inode of every file, by path relative to `folder`.

    Compiled Python files are left out: an import of a grader in the folder writes them.
    """
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            if path.parent.name == "__pycache__":
                continue
            with suppress(FileNotFoundError):
                status = path.stat()
                key = path.relative_to(folder).as_posix()
                found[key] = (status.st_mtime_ns, status.st_size, status.st_ino)
    return found
