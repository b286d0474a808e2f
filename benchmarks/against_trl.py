"""One training step of the embedded model beside TRL's GRPOTrainer, and where our time goes.

    make bench-trl        (makes an environment of its own for TRL)

Both sides sample 64 prompts × 16 completions of at most 8 tokens, grade them with the same verifier, and apply 4
updates, on the same model, problems and machine, in turn: ours, theirs, ours, theirs, ... The first step of every
run is left out on both sides. Ours is the command itself, with the files that it writes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PARTS = ("sample", "grade", "logprobs", "update")
HERE = Path(__file__).parent


def ours(steps: int) -> list[dict[str, float]]:
    """Run `bandpo train` and return its records after the first step."""
    with tempfile.TemporaryDirectory() as runs:
        command = [
            sys.executable, "-m", "bandpo_cli", "train", "--steps", str(steps), "--runs-dir", runs, "--name", "bench",
            "--no-mlflow", "--set", "evaluation.every=0",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        lines = (Path(runs) / "bench" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][1:]


def theirs(python: str, steps: int) -> list[float]:
    """Run TRL in its own environment and return its seconds a step after the first."""
    command = [python, str(HERE / "trl_steps.py"), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"TRL's side failed:\n{done.stderr[-3000:]}")
    seconds: list[float] = json.loads(done.stdout.strip().splitlines()[-1])["seconds"]
    return seconds[1:]


def spread(seconds: Sequence[float]) -> str:
    """Return median and range, seconds."""
    return f"{statistics.median(seconds):6.2f} s   ({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} steps)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", required=True, help="the Python of the environment that has trl")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=6, help="steps a run, the first of which is left out")
    arguments = parser.parse_args()

    records: list[dict[str, float]] = []
    trl_seconds: list[float] = []
    for number in range(1, arguments.rounds + 1):
        records += ours(arguments.steps)
        trl_seconds += theirs(arguments.trl_python, arguments.steps)
        print(f"round {number} of {arguments.rounds} done", file=sys.stderr)

    our_seconds = [record["time/step"] for record in records]
    ratio = statistics.median(our_seconds) / statistics.median(trl_seconds)
    print(f"bandpo  {spread(our_seconds)}")
    print(f"TRL     {spread(trl_seconds)}")
    print(f"bandpo's time is {ratio:.2f} of TRL's (medians)\n\nwhere bandpo's time goes, mean of all steps")
    total = statistics.fmean(our_seconds)
    shares = {part: statistics.fmean(record[f"time/{part}"] for record in records) for part in PARTS}
    shares["the rest"] = total - sum(shares.values())
    for part, seconds in shares.items():
        print(f"  {part:<10}{seconds:7.3f} s {seconds / total:7.1%}")


if __name__ == "__main__":
    main()
