"""Fraction of a run's time that its checkpoints take, for the embedded default model unless settings change it.

    python benchmarks/checkpoints.py [--steps 40] [--folder FOLDER] [--set KEY=VALUE ...]

The time of checkpoints is the one for which training waits: time/checkpoint, and without a thread
(checkpoint.background=false, and the last step) that of removing older ones afterwards, which is not in metrics.jsonl.
The fraction is relative to the time from the first step to the last, evaluations included; the checkpoint at the end of
every run counts as a regular one.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

from shared import command_line

from bandpo_cli.config.layers import read_assignments, resolve
from bandpo_cli.storage.checkpoints import model_checkpoints
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.base import build_task
from bandpo_cli.training import checkpoint_writer, loop
from bandpo_cli.training.components import build_components


def main() -> None:
    """Train and print the times."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    config = resolve([{"steps": options.steps}, read_assignments(options.set)])
    runs_dir = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=options.folder))
    folder = RunFolder.create(runs_dir, "run")
    removing: list[float] = []

    def timed_prune(*arguments: object) -> None:
        start = time.perf_counter()
        prune_checkpoints(*arguments)  # type: ignore[arg-type]
        if threading.current_thread() is threading.main_thread():
            removing.append(time.perf_counter() - start)

    prune_checkpoints = checkpoint_writer.prune_checkpoints
    components = build_components(config, build_task(config.task))
    start = time.perf_counter()
    with mock.patch.object(checkpoint_writer, "prune_checkpoints", timed_prune):
        for _ in loop.train(config, components, folder):
            pass
    seconds = time.perf_counter() - start
    components.close()
    writing = [record["time/checkpoint"] for record in folder.read_metrics() if "time/checkpoint" in record]
    latest = max(model_checkpoints(folder).values())
    size = sum(path.stat().st_size for path in latest.rglob("*") if path.is_file())
    shutil.rmtree(runs_dir)
    count, every = len(writing), config.checkpoint.every
    print(f"{count} checkpoints of {size / 2**20:.1f} MiB in {options.steps} steps, every {every}")
    print(f"waiting   {1000 * statistics.median(writing):7.1f} ms, at most {1000 * max(writing):.1f} ms")
    print(f"removing  {1000 * statistics.median(removing):7.1f} ms, at most {1000 * max(removing):.1f} ms")
    fraction = (sum(writing) + sum(removing)) / seconds
    print(f"fraction  {fraction:7.2%} of {seconds:.1f} s")


if __name__ == "__main__":
    main()
