"""A training run killed at random moments and resumed each time, beside one that nothing disturbed.

    python benchmarks/random_kills.py [--kills 50] [--steps 60] [--seed 0] [--folder EMPTY] [--set KEY=VALUE ...]

The run is small (the embedded model, 16 completions a step, a checkpoint every 2 steps, an evaluation every 3), the
kills are SIGKILL: most fall within half a second after the process has done 0 to 7 steps, some while it loads.
Where a run comes to its end before the kills are used up, another begins. In the end each is left to finish, and all
that it recorded is compared with the undisturbed run: metrics but for time/, and the bytes of completions, tokens,
evaluations and checkpoints. Exit code 0 when all is equal.

Each attempt is a process of its own, forked from one that has imported torch and computed nothing with it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # bit for bit means the same number of threads

import bandpo_cli.reports.run_plots
import bandpo_cli.training.components  # noqa: F401 - imported once, for all that are forked
from bandpo_cli.__main__ import main as bandpo

SETTINGS = [
    "sampling.prompts=4", "sampling.samples=4", "optim.updates=2", "optim.lr=1e-4", "evaluation.every=3",
    "evaluation.problems=4", "evaluation.samples=4", "evaluation.k=[1,4]", "checkpoint.every=2", "seed=3",
    "tracking.mlflow=false",
]  # fmt: skip
LOADING_SHARE, MOST_STEPS, LONGEST_S = 0.15, 8, 0.5


def start(arguments: Sequence[str], log: Path) -> int:
    """Fork a process that runs `bandpo train` with these arguments; return its id."""
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
    except BaseException:  # noqa: BLE001 - nobody else would tell of it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def ended(process: int, wait: bool) -> int | None:
    """Return the exit status of a child, None while it runs."""
    found, status = os.waitpid(process, 0 if wait else os.WNOHANG)
    return status if found else None


def kill_at_random(process: int, folder: Path, dice: random.Random) -> int | None:
    """Kill the process at a random moment and return None; its exit status when it ended before."""
    begun = folder / "env.json"
    stamp = begun.stat().st_mtime_ns if begun.exists() else 0

    def taken_up() -> bool:
        return begun.exists() and begun.stat().st_mtime_ns != stamp

    steps, start_lines = dice.randrange(MOST_STEPS), 0
    holds = [taken_up, lambda: metrics_of(folder).count(b"\n") >= start_lines + steps]
    if dice.random() < LOADING_SHARE:
        holds = []
    for each in holds:
        while not each():
            if (status := ended(process, wait=False)) is not None:
                return status
            time.sleep(0.002)
        start_lines = metrics_of(folder).count(b"\n")
    end = time.monotonic() + dice.uniform(0, LONGEST_S)
    while time.monotonic() < end:
        if (status := ended(process, wait=False)) is not None:
            return status
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    ended(process, wait=True)
    return None


def metrics_of(folder: Path) -> bytes:
    """Return what there is of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    return path.read_bytes() if path.exists() else b""


def part_hit(folder: Path, before: bytes, steps: int) -> str:
    """Tell by what the kill left what the process was doing; `before` is the metrics file of when it began."""
    content = metrics_of(folder)
    lines = content.count(b"\n")
    hidden = [path.name for path in (folder / "checkpoints").glob(".step-*")]
    latest = max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")), default=0)
    for holds, words in (
        (any(name.endswith(".writing") for name in hidden), "while a checkpoint was written"),
        (any(name.endswith(".removing") for name in hidden), "while a checkpoint was removed"),
        (not content.endswith(b"\n") and bool(content), "in the middle of a line of metrics"),
        (latest > lines - 1, "between a checkpoint and its line"),
        (any(folder.rglob(".*.tmp")), "while another file was written"),
        (lines == steps + 1, "after the last step"),
        (content == before, "while loading, or in the first step"),
    ):
        if holds:
            return words
    return "in a later step"


def record(folder: Path) -> list[dict[str, object]]:
    """Return the metrics of a run but for its clocks."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def files(folder: Path, part: str) -> dict[str, bytes]:
    """Return the files below a part of the run folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in (folder / part).rglob("*")
        if path.is_file()
    }


def differences(folder: Path, undisturbed: Path) -> list[str]:
    """Return what two runs differ in."""
    found = [] if record(folder) == record(undisturbed) else ["metrics"]
    for part in ("samples", "tokens", "evals", "checkpoints"):
        if files(folder, part) != files(undisturbed, part):
            found.append(part)
    return found


def finish(arguments: Sequence[str], log: Path) -> None:
    """Run to the end; raises SystemExit, with the end of its output, when it fails."""
    if ended(start(arguments, log), wait=True) != 0:
        raise SystemExit(f"failed: bandpo train {' '.join(arguments)}\n{log.read_text()[-2000:]}")


def main() -> None:
    """Kill, resume, compare, and print the verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    place = options.folder or Path(tempfile.mkdtemp(prefix="random-kills-"))
    place.mkdir(parents=True, exist_ok=True)
    log, dice = place / "log.txt", random.Random(options.seed)
    there = ["--runs-dir", str(place)]
    settings = [word for each in [*SETTINGS, *options.set] for word in ("--set", each)]
    begin = ["--steps", str(options.steps), *settings, *there]

    finish([*begin, "--name", "undisturbed"], log)

    def go_on(name: str) -> list[str]:
        """Return the arguments that begin a run, or go on with it."""
        folder = place / name
        if (folder / "config.yaml").exists():
            return ["--resume", name, *there]
        if folder.exists():  # killed in the instant between the folder and its first file
            folder.rmdir()
        return [*begin, "--name", name]

    hit: Counter[str] = Counter()
    runs: list[str] = []
    whole = True
    while hit.total() < options.kills:
        if whole:
            runs.append(f"killed-{len(runs) + 1}")
        folder = place / runs[-1]
        before = metrics_of(folder)
        status = kill_at_random(start(go_on(runs[-1]), log), folder, dice)
        whole = status is not None
        if whole and not (folder / "summary.json").exists():
            raise SystemExit(f"an attempt failed with status {status}:\n{log.read_text()[-2000:]}")
        if not whole:
            hit[part_hit(folder, before, options.steps)] += 1
            lines = metrics_of(folder).count(b"\n")
            print(f"kill {hit.total():3}: {runs[-1]} with {lines} lines", flush=True)
    if not whole and not (place / runs[-1] / "summary.json").exists():
        finish(go_on(runs[-1]), log)

    print(f"{hit.total()} kills of {len(runs)} runs of {options.steps} steps, in {place}")
    for words, count in hit.most_common():
        print(f"  {count:3} {words}")
    wrong = {name: found for name in runs if (found := differences(place / name, place / "undisturbed"))}
    parts = "metrics, completions, tokens, evaluations, weights and optimizer state"
    print(f"DIFFERENT: {wrong}" if wrong else f"equal: {parts} of every run are those of the undisturbed one")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
