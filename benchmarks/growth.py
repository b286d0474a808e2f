"""Processor time and memory of commands on long runs and on many runs, with the exponent of their growth.

    python benchmarks/growth.py [--steps 1000 10000 50000] [--runs 20 200 2000] [--folder FOLDER]

One short run is trained; longer runs repeat its records, and its completions at each step, and folders of many runs are
copies of it. Each command runs in a process of its own: user and system time and the peak of its memory. `resume` goes
on for one step, which has an evaluation and a checkpoint, and plots at the end. `checkpoint` is the work of one
checkpoint apart from writing it: which older ones to remove. The exponent is the slope of log(time) over log(size)
between the last two sizes, less the time of the smallest size, which is mostly the start of Python and its packages.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from shared import command_line

from bandpo_cli.config.batch_and_sampling import CheckpointConfig
from bandpo_cli.config.layers import read_assignments, resolve, to_yaml
from bandpo_cli.results import summary_fields
from bandpo_cli.storage.checkpoints import prune_checkpoints
from bandpo_cli.storage.files import step_name
from bandpo_cli.storage.run_folder import RunFolder

SETTINGS = [
    "steps=20", "sampling.prompts=4", "sampling.samples=4", "optim.updates=1", "evaluation.every=5",
    "evaluation.problems=4", "evaluation.samples=4", "evaluation.k=[1,4]", "checkpoint.every=10",
    "tracking.mlflow=false",
]  # fmt: skip


def long_run(short: RunFolder, runs_dir: Path, steps: int) -> RunFolder:
    """Write a complete run of `steps` steps with the records, completions and the last checkpoint of `short`."""
    folder = RunFolder.create(runs_dir, f"long-{steps}")
    config = resolve([read_assignments([*SETTINGS, f"steps={steps}"])])
    folder.write_config(to_yaml(config))
    shutil.copy(short.path / "env.json", folder.path)
    first, *records = short.read_metrics()
    with folder.metrics_path.open("w") as file:
        for step in range(steps + 1):
            record = first if step == 0 else records[(step - 1) % len(records)]
            file.write(json.dumps({**record, "step": step}) + "\n")
    samples = sorted((short.path / "samples").iterdir())
    (folder.path / "samples").mkdir()
    for step in range(1, steps + 1):
        os.link(samples[step % len(samples)], folder.path / "samples" / f"{step_name(step)}.parquet")
    for step in (steps - 10, steps):
        checkpoint = folder.checkpoint_dir(step)
        shutil.copytree(short.checkpoint_dir(20), checkpoint)
        state = json.loads((checkpoint / "trainer" / "state.json").read_text())
        plain = {name: value for name, value in state.items() if "xxh3" not in name}
        (checkpoint / "trainer" / "state.json").write_text(json.dumps({**plain, "step": step}))
    folder.write_summary({"status": "FINISHED", "steps": steps, "of_steps": steps})
    return folder


def many_runs(short: RunFolder, runs_dir: Path, count: int) -> Path:
    """Copy `short` `count` times, without its checkpoints and completions."""
    for number in range(count):
        shutil.copytree(
            short.path,
            runs_dir / f"run-{number}",
            ignore=shutil.ignore_patterns("checkpoints", "samples", "tokens"),
        )
        folder = RunFolder(runs_dir / f"run-{number}")
        folder.write_config(to_yaml(resolve([read_assignments([*SETTINGS, f"seed={number}"])])))
        summary = json.loads((short.path / "summary.json").read_text())
        folder.write_summary(summary | summary_fields(folder.path))
    return runs_dir


def measure(*arguments: str) -> tuple[float, float]:
    """Run `bandpo` and return its processor time in seconds and its peak memory in MB."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "bandpo_cli", *arguments], stdout=output, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
        if status:
            output.seek(0)
            sys.exit(f"bandpo {' '.join(arguments)} failed:\n{output.read().decode()[-2000:]}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


def checkpoint_time(folder: RunFolder) -> tuple[float, float]:
    """Return the processor time of the decision which checkpoints to remove; the memory is not measured."""
    start = time.process_time()
    prune_checkpoints(folder, CheckpointConfig(keep_last=2))
    return time.process_time() - start, math.nan


def print_table(title: str, sizes: Sequence[int], rows: dict[str, list[tuple[float, float]]]) -> None:
    """Print a row per command."""
    print(f"{title:12}" + "".join(f"{size:>20,}" for size in sizes) + f"{'exponent':>10}")
    for name, values in rows.items():
        cells = "".join(f"{seconds:>11.2f} s{memory:>4,.0f} MB" for seconds, memory in values)
        grown = [seconds - values[0][0] for seconds, _ in values[1:]]
        exponent = (
            math.log(grown[-1] / grown[0]) / math.log(sizes[-1] / sizes[1])
            if len(grown) > 1 and min(grown) > 0
            else math.nan
        )
        print(f"{name:12}{cells}{exponent:>10.2f}", flush=True)


def main() -> None:
    """Make the folders, measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, nargs="*", default=[1000, 10000, 50000])
    parser.add_argument("--runs", type=int, nargs="*", default=[20, 200, 2000])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="growth-", dir=options.folder))
    # In a process of its own: the peak memory of a child is at least that of the process that forks it.
    measure("train", "--runs-dir", str(place), "--name", "short", *(f"--set={text}" for text in SETTINGS))
    short = RunFolder(place / "short")
    rows: dict[str, list[tuple[float, float]]] = {}
    for steps in options.steps:
        runs_dir = place / f"steps-{steps}"
        folder = long_run(short, runs_dir, steps)
        where = ("--runs-dir", str(runs_dir))
        rows.setdefault("checkpoint", []).append(checkpoint_time(folder))
        for name, arguments in {
            "show": ("show", folder.name, *where),
            "runs": ("runs", *where),
            "plot": ("plot", folder.name, *where),
            "report": ("report", folder.name, *where, "--out", str(place / f"report-{steps}")),
            "resume": ("train", "--resume", folder.name, *where, "--steps", str(steps + 1)),
        }.items():
            rows.setdefault(name, []).append(measure(*arguments))
    if options.steps:
        print_table("steps", options.steps, rows)
    rows = {}
    for count in options.runs:
        runs_dir = many_runs(short, place / f"runs-{count}", count)
        where = ("--runs-dir", str(runs_dir))
        rows.setdefault("runs", []).append(measure("runs", *where))
        out = str(place / f"report-of-{count}")
        rows.setdefault("report", []).append(measure("report", str(runs_dir), "--out", out))
    if options.runs:
        print_table("runs", options.runs, rows)
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
