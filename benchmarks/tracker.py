"""Cost of MLflow tracking: `bandpo train` without it, with a server that never answers, and with a local SQLite store.

    python benchmarks/tracker.py [--steps 15] [--rounds 3] [--keep DIR]

Each round runs the embedded default (evaluation off) once per variant, each in its own process: `none` with
tracking.mlflow=false; `hanging` with a server that accepts connections and never answers; `sqlite` with the default
store, which the first round creates. The output has the medians of the command's wall time, of the summed `time/step`
and of its processor time (the least affected by other processes), and their ratios to `none` within each round. A
hanging server costs seconds per run, independent of the number of steps: the last line relates them to a run of 130 s.
"""

import json
import os
import resource
import socket
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from shared import bandpo, command_line, seconds_of

DEFAULT_RUN_S = 130.0
"""Duration of the embedded default on 2 cores, seconds."""


@dataclass(frozen=True)
class Times:
    """Seconds of one command: wall time, sum of its steps, processor time."""

    wall: float
    steps: float
    cpu: float

    def line(self) -> str:
        """Return the times in columns."""
        return f"{self.wall:9.2f}{self.steps:9.2f}{self.cpu:9.2f}"


def run(variant: str, flags: Sequence[str], steps: int, runs_dir: Path, number: int) -> Times:
    """Run `bandpo train` once and return its times."""
    name = f"{variant}-{number}"
    words = ["--steps", str(steps), "--name", name, "--runs-dir", str(runs_dir), *flags]
    cpu = children_cpu()
    wall = seconds_of(lambda: bandpo("train", *words, "--set", "evaluation.every=0"))
    cpu = children_cpu() - cpu
    lines = (runs_dir / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return Times(wall, sum(json.loads(line)["time/step"] for line in lines), cpu)


def children_cpu() -> float:
    """Return the processor time of all child processes so far, seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(steps: int, rounds: int, runs_dir: Path) -> Mapping[str, list[Times]]:
    """Run every variant once per round, in an order that rotates from round to round."""
    found: dict[str, list[Times]] = {"none": [], "hanging": [], "sqlite": []}
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(256)
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        flags = {"none": ["--no-mlflow"], "hanging": ["--tracking-uri", uri], "sqlite": []}
        for number in range(rounds):
            order = list(found)[number % 3 :] + list(found)[: number % 3]
            for variant in order:
                found[variant].append(run(variant, flags[variant], steps, runs_dir, number))
                print(f"round {number + 1}  {variant:<10}{found[variant][-1].line()}", flush=True)
    return found


def report(found: Mapping[str, list[Times]]) -> None:
    """Print medians and ratios."""
    plain = found["none"]
    print(f"\n{'medians, s':<19}{'wall':>9}{'steps':>9}{'cpu':>9}      ratios to none, by round")
    for variant, times in found.items():
        middle = [statistics.median(column) for column in zip(*map(astuple, times), strict=True)]
        pairs = list(zip(map(astuple, times), map(astuple, plain), strict=True))
        ratios = [statistics.median(pair[i] / base[i] for pair, base in pairs) for i in range(3)]
        print(f"{variant:<19}{Times(*middle).line()}{Times(*ratios).line()}")
    extra = [value.wall - base.wall for value, base in zip(found["hanging"], plain, strict=True)]
    print(
        f"a hanging server: {statistics.median(extra):+.2f} s per run ({min(extra):+.2f} to {max(extra):+.2f}), "
        f"{statistics.median(extra) / DEFAULT_RUN_S:+.1%} of {DEFAULT_RUN_S:.0f} s"
    )


def main() -> None:
    """Parse the options, measure, and print the report."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=15, help="steps per run")
    parser.add_argument("--rounds", type=int, default=3, help="runs per variant")
    parser.add_argument("--keep", type=Path, help="folder for the runs; a temporary one by default")
    options = parser.parse_args()
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    with tempfile.TemporaryDirectory() as temporary:
        report(measure(options.steps, options.rounds, options.keep or Path(temporary)))


if __name__ == "__main__":
    main()
