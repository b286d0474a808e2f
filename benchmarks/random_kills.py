"""Resume test: a run that is killed at random times and resumed, compared with an uninterrupted run.

    python benchmarks/random_kills.py [--kills 50] [--steps 60] [--seed 0] [--folder EMPTY] [--set KEY=VALUE ...]

The run is small (the bundled model, 16 completions per step, a checkpoint every 2 steps, an evaluation every 3). The
kills are SIGKILL: most come within half a second after the process has done 0 to 7 steps, some while it loads, and
three in ten within 50 ms after it has begun to write a checkpoint. When a run finishes before the last kill, another
one starts. In the end each run is allowed to finish, and its record is compared with the uninterrupted run: metrics
without the clock, and the bytes of completions, tokens, evaluations and checkpoints. Exit code 0 when all are equal.

Each attempt is a separate process, forked from one that has imported torch and computed nothing with it.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # equality bit for bit requires the same number of threads

from shared import command_line, content_of_run

import bandpo_cli.reports.run_plots
import bandpo_cli.training.build  # noqa: F401 - imported once, before the forks
from bandpo_cli.__main__ import main as bandpo

SETTINGS = [
    "sampling.prompts=4", "sampling.samples=4", "optim.updates=2", "optim.lr=1e-4", "evaluation.every=3",
    "evaluation.problems=4", "evaluation.samples=4", "evaluation.k=[1,4]", "checkpoint.every=2", "seed=3",
    "tracking.mlflow=false",
]  # fmt: skip
LOADING_SHARE, WRITING_SHARE, MAX_STEPS = 0.15, 0.3, 8
MAX_DELAY_S, MAX_WRITING_DELAY_S = 0.5, 0.05


def start(arguments: Sequence[str], log: Path) -> int:
    """Fork a process that runs `bandpo train` with `arguments` and writes its output to `log`; return its id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code: object = 70
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["bandpo", "train", *arguments]
        bandpo()
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else end.code
    except BaseException:  # noqa: BLE001 - print it, because the process exits below
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def ended(process: int, wait: bool) -> int | None:
    """Return the exit status of a child process, None while it runs."""
    found, status = os.waitpid(process, 0 if wait else os.WNOHANG)
    return status if found else None


def kill_at_random(process: int, folder: Path, random_source: random.Random) -> int | None:
    """Kill the process at a random time and return None; return its exit status if it ended before."""
    env = folder / "env.json"  # written when the process starts or resumes the run
    stamp = env.stat().st_mtime_ns if env.exists() else 0

    def started() -> bool:
        return env.exists() and env.stat().st_mtime_ns != stamp

    steps, start_lines = random_source.randrange(MAX_STEPS), 0
    conditions = [started, lambda: metrics_of(folder).count(b"\n") >= start_lines + steps]
    delay_s, kind = MAX_DELAY_S, random_source.random()
    if kind < LOADING_SHARE:
        conditions = []
    elif kind < LOADING_SHARE + WRITING_SHARE:
        conditions.append(lambda: any(name.endswith(".writing") for name in hidden_folders(folder)))
        delay_s = MAX_WRITING_DELAY_S
    for condition in conditions:
        while not condition():
            if (status := ended(process, wait=False)) is not None:
                return status
            time.sleep(0.002)
        start_lines = metrics_of(folder).count(b"\n")
    end = time.monotonic() + random_source.uniform(0, delay_s)
    while time.monotonic() < end:
        if (status := ended(process, wait=False)) is not None:
            return status
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    ended(process, wait=True)
    return None


def metrics_of(folder: Path) -> bytes:
    """Return the content of metrics.jsonl, empty where there is none."""
    path = folder / "metrics.jsonl"
    return path.read_bytes() if path.exists() else b""


def hidden_folders(folder: Path) -> list[str]:
    """Return the names of the checkpoints that are being written or removed, or that a kill left so."""
    return sorted(path.name for path in (folder / "checkpoints").glob(".step-*"))


def interrupted_phase(folder: Path, before: bytes, hidden_before: list[str], steps: int) -> str:
    """Return what the process was doing when it was killed, from the files that it left.

    Args:
        before: the metrics file when the process started.
        hidden_before: the hidden folders then, which the process before left.
        steps: configured steps of the run.
    """
    content = metrics_of(folder)
    lines = content.count(b"\n")
    hidden = hidden_folders(folder)
    if content == before and hidden == hidden_before:
        return "while loading, or in the first step"
    written = [int(name.split(".")[1][5:]) for name in hidden if name.endswith(".writing")]
    latest = max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")), default=0)
    for is_phase, phase in (
        (any(step < lines for step in written), "while a thread wrote a checkpoint"),
        (bool(written), "while writing a checkpoint before its line"),
        (any(name.endswith(".removing") for name in hidden), "while removing a checkpoint"),
        (not content.endswith(b"\n") and bool(content), "in the middle of a line of metrics"),
        (latest > lines - 1, "between a checkpoint and its line"),
        (any(folder.rglob(".*.tmp")), "while writing another file"),
        (lines == steps + 1, "after the last step"),
    ):
        if is_phase:
            return phase
    return "in a later step"


def differences(folder: Path, uninterrupted: Path) -> list[str]:
    """Return the parts in which two runs differ."""
    one, other = content_of_run(folder), content_of_run(uninterrupted)
    return [part for part in one if one[part] != other[part]]


def finish(arguments: Sequence[str], log: Path) -> None:
    """Run `bandpo train` to its end. Raises SystemExit with the end of its output when it fails."""
    if ended(start(arguments, log), wait=True) != 0:
        raise SystemExit(f"failed: bandpo train {' '.join(arguments)}\n{log.read_text()[-2000:]}")


def main() -> None:
    """Kill, resume and compare the runs, and print the result."""
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    place = options.folder or Path(tempfile.mkdtemp(prefix="random-kills-"))
    place.mkdir(parents=True, exist_ok=True)
    log, random_source = place / "log.txt", random.Random(options.seed)
    runs_dir = ["--runs-dir", str(place)]
    settings = [word for item in [*SETTINGS, *options.set] for word in ("--set", item)]
    new_run = ["--steps", str(options.steps), *settings, *runs_dir]

    finish([*new_run, "--name", "uninterrupted"], log)

    def next_attempt(name: str) -> list[str]:
        """Return the arguments that start or resume a run."""
        folder = place / name
        if (folder / "config.yaml").exists():
            return ["--resume", name, *runs_dir]
        if folder.exists():  # killed before config.yaml, which makes the folder a run
            shutil.rmtree(folder)
        return [*new_run, "--name", name]

    phases: Counter[str] = Counter()
    runs: list[str] = []
    finished = True
    while phases.total() < options.kills:
        if finished:
            runs.append(f"killed-{len(runs) + 1}")
        folder = place / runs[-1]
        before, hidden_before = metrics_of(folder), hidden_folders(folder)
        status = kill_at_random(start(next_attempt(runs[-1]), log), folder, random_source)
        finished = status is not None
        if finished and not (folder / "summary.json").exists():
            raise SystemExit(f"an attempt failed with status {status}:\n{log.read_text()[-2000:]}")
        if not finished:
            phases[interrupted_phase(folder, before, hidden_before, options.steps)] += 1
            lines = metrics_of(folder).count(b"\n")
            print(f"kill {phases.total():3}: {runs[-1]} with {lines} lines", flush=True)
    if not finished and not (place / runs[-1] / "summary.json").exists():
        finish(next_attempt(runs[-1]), log)

    print(f"{phases.total()} kills of {len(runs)} runs of {options.steps} steps, in {place}")
    for phase, count in phases.most_common():
        print(f"  {count:3} {phase}")
    different = {
        name: found for name in runs if (found := differences(place / name, place / "uninterrupted"))
    }
    parts = "metrics, completions, tokens, evaluations, weights and optimizer state"
    print(
        f"DIFFERENT: {different}"
        if different
        else f"equal: {parts} of every run equal those of the uninterrupted one"
    )
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
