"""Time per training step, compared with TRL's GRPOTrainer on the same work, and its share per phase.

    make bench-trl                                          (creates a separate environment for TRL)
    make bench-trl TRL_FLAGS="--data FOLDER --rounds 5"     (FOLDER has gsm8k_train.jsonl and gsm8k_test.jsonl)

There are two regimes (`trl_regimes.py`). In each, both sample the same prompts, grade them with the same function and
apply the same number of updates, with the same model and machine. Their runs alternate, and the first step of every
run is excluded. bandpo is run as the command, so its steps include writing files. A round gives one ratio, that of the
medians of its two runs; reported are the ratio of the medians of all steps, and the range of those of the rounds.

The regime on GSM8K is left out where there is no data: --data, else the environment variable BANDPO_DATA, else
`../shared/data` beside the repository.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared import command_line, train
from trl_regimes import NEEDS_DATA, REGIMES

PHASES = ("sample", "grade", "logprobs", "update")
HERE = Path(__file__).resolve().parent
PYTHONPATH = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
"""The grader of a regime is a function of trl_regimes.py."""
Step = dict[str, float]
"""Seconds of a step by phase; `step` is all of it."""


def run_bandpo(config: Path, steps: int) -> list[Step]:
    """Run `bandpo train` and return its seconds per step, without the first step."""
    records = train("--config", str(config), steps=steps, PYTHONPATH=PYTHONPATH)[1:]
    return [{name: record[f"time/{name}"] for name in (*PHASES, "step")} for record in records]


def run_trl(python: str, config: Path, steps: int) -> list[Step]:
    """Run TRL in its own environment and return its seconds per step, without the first step."""
    command = [python, str(HERE / "trl_steps.py"), "--config", str(config), "--steps", str(steps)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PYTHONPATH}
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    steps_of_trl: list[Step] = json.loads(done.stdout.strip().splitlines()[-1])
    return steps_of_trl[1:]


def median(steps: Sequence[Step]) -> float:
    """Return the median seconds per step."""
    return statistics.median(step["step"] for step in steps)


def report(name: str, rounds: Sequence[tuple[list[Step], list[Step]]]) -> dict[str, Any]:
    """Print the times of a regime and return them for --json."""
    sides = {
        "bandpo": [step for ours, _ in rounds for step in ours],
        "TRL": [step for _, theirs in rounds for step in theirs],
    }
    ratio = median(sides["bandpo"]) / median(sides["TRL"])
    by_round = [median(ours) / median(theirs) for ours, theirs in rounds]
    print(f"\n{name}")
    for side, steps in sides.items():
        seconds = [step["step"] for step in steps]
        spread = f"({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} steps)"
        print(f"  {side:<7}{median(steps):7.2f} s   {spread}")
    print(
        f"  bandpo's time is {ratio:.2f} of TRL's (medians; {min(by_round):.2f} to {max(by_round):.2f} by round)"
    )
    means = {side: phase_means(steps) for side, steps in sides.items()}
    print("  seconds per phase, means of all steps:     bandpo      TRL")
    for phase in (*PHASES, "other"):
        print(f"    {phase:<37}{means['bandpo'][phase]:9.3f}{means['TRL'][phase]:9.3f}")
    return {"regime": name, "ratio": ratio, "ratio_by_round": by_round, "phases": means, "steps": sides}


def phase_means(steps: Sequence[Step]) -> Step:
    """Return the mean seconds of each phase; `other` is what the phases leave of the step."""
    means = {phase: statistics.fmean(step[phase] for step in steps) for phase in PHASES}
    return means | {"other": statistics.fmean(step["step"] for step in steps) - sum(means.values())}


def data_folder(named: Path | None) -> Path | None:
    """Return the folder of GSM8K; None where there is none.

    Args:
        named: the folder that --data names, which must have the files.
    """
    default = os.environ.get("BANDPO_DATA") or HERE.parents[1] / "shared" / "data"
    folder = Path(named or default).resolve()
    if (folder / "gsm8k_train.jsonl").is_file():
        return folder
    if named is not None:
        sys.exit(f"{folder} has no gsm8k_train.jsonl")
    return None


def main() -> None:
    """Run both alternately in each regime and print the times."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--trl-python", required=True, help="path of the Python in the environment that has trl"
    )
    parser.add_argument("--regime", choices=REGIMES, action="append", help="default: all")
    parser.add_argument("--data", type=Path, help="folder of gsm8k_train.jsonl and gsm8k_test.jsonl")
    parser.add_argument("--rounds", type=int, default=3, help="number of runs of bandpo and of TRL")
    parser.add_argument("--steps", type=int, default=6, help="steps per run; the first one is excluded")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()

    data = data_folder(arguments.data)
    reports = []
    for name in arguments.regime or REGIMES:
        if name in NEEDS_DATA and data is None:
            print(f"\n{name}: left out, there is no gsm8k_train.jsonl (--data)")
            continue
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "config.yaml"
            config.write_text(json.dumps(REGIMES[name](Path(folder), data)))  # JSON is YAML
            rounds = []
            for number in range(1, arguments.rounds + 1):
                ours = run_bandpo(config, arguments.steps)
                rounds.append((ours, run_trl(arguments.trl_python, config, arguments.steps)))
                print(f"{name}: round {number} of {arguments.rounds} done", file=sys.stderr)
        reports.append(report(name, rounds))
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=1) + "\n")


if __name__ == "__main__":
    main()
