"""Fraction of a run's time that its checkpoints take, for the bundled default model unless settings change it.

    python benchmarks/checkpoints.py [--steps 40] [--set KEY=VALUE ...]

The time of checkpoints is the time for which training waits, `time/checkpoint`. The fraction is relative to the time of
all steps, evaluations included; the checkpoint at the end of every run counts as a regular one.
"""

import json
import statistics
import tempfile
from pathlib import Path

from shared import bandpo, command_line


def main() -> None:
    """Train and print the times."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
        settings = [word for setting in options.set for word in ("--set", setting)]
        place = ("--runs-dir", folder, "--name", "run", "--no-mlflow")
        bandpo("train", "--steps", str(options.steps), *settings, *place)
        run = Path(folder) / "run"
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        latest = max((run / "checkpoints").glob("step-*"))
        size = sum(path.stat().st_size for path in latest.rglob("*") if path.is_file())
    waiting = [record["time/checkpoint"] for record in records if "time/checkpoint" in record]
    seconds = sum(record["time/step"] for record in records)
    print(f"{len(waiting)} checkpoints of {size / 2**20:.1f} MiB in {options.steps} steps")
    print(f"waiting   {1000 * statistics.median(waiting):7.1f} ms, at most {1000 * max(waiting):.1f} ms")
    print(f"fraction  {sum(waiting) / seconds:7.2%} of {seconds:.1f} s")


if __name__ == "__main__":
    main()
