"""Time per training step of the embedded model, compared with TRL's GRPOTrainer, and its share per phase.

    make bench-trl        (creates a separate environment for TRL)

Both sample 64 prompts × 16 completions of at most 8 tokens, grade them with the same verifier, and apply 4 updates,
with the same model, problems and machine. Their runs alternate, and the first step of every run is excluded. bandpo is
run as the command, so its steps include writing files.
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

PHASES = ("sample", "grade", "logprobs", "update")
HERE = Path(__file__).parent


def run_bandpo(steps: int) -> list[dict[str, float]]:
    """Run `bandpo train` and return its metrics per step, without the first step."""
    with tempfile.TemporaryDirectory() as runs:
        command = [
            sys.executable, "-m", "bandpo_cli", "train", "--steps", str(steps), "--runs-dir", runs, "--name", "bench",
            "--no-mlflow", "--set", "evaluation.every=0",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        lines = (Path(runs) / "bench" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][1:]


def run_trl(python: str, steps: int) -> list[float]:
    """Run TRL in its own environment and return its seconds per step, without the first step."""
    command = [python, str(HERE / "trl_steps.py"), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the run of TRL failed:\n{done.stderr[-3000:]}")
    seconds: list[float] = json.loads(done.stdout.strip().splitlines()[-1])["seconds"]
    return seconds[1:]


def spread(seconds: Sequence[float]) -> str:
    """Return the median, range and number of the values, in seconds."""
    return f"{statistics.median(seconds):6.2f} s   ({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} steps)"


def main() -> None:
    """Run both alternately and print the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trl-python", required=True, help="path of the Python in the environment that has trl"
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of runs of bandpo and of TRL")
    parser.add_argument("--steps", type=int, default=6, help="steps per run; the first one is excluded")
    arguments = parser.parse_args()

    records: list[dict[str, float]] = []
    trl_seconds: list[float] = []
    for number in range(1, arguments.rounds + 1):
        records += run_bandpo(arguments.steps)
        trl_seconds += run_trl(arguments.trl_python, arguments.steps)
        print(f"round {number} of {arguments.rounds} done", file=sys.stderr)

    bandpo_seconds = [record["time/step"] for record in records]
    ratio = statistics.median(bandpo_seconds) / statistics.median(trl_seconds)
    print(f"bandpo  {spread(bandpo_seconds)}")
    print(f"TRL     {spread(trl_seconds)}")
    print(f"bandpo's time is {ratio:.2f} of TRL's (medians)\n\nbandpo's time per phase, mean of all steps")
    total = statistics.fmean(bandpo_seconds)
    shares = {phase: statistics.fmean(record[f"time/{phase}"] for record in records) for phase in PHASES}
    shares["other"] = total - sum(shares.values())
    for phase, seconds in shares.items():
        print(f"  {phase:<10}{seconds:7.3f} s {seconds / total:7.1%}")


if __name__ == "__main__":
    main()
