"""Time for which training waits at a checkpoint: written by a thread, and written before training continues.

    python benchmarks/checkpoint_time.py [--checkpoints 8] [--folder FOLDER] [--set KEY=VALUE ...]

The model is a Qwen2 with 27 million random weights (8 layers, width 512, vocabulary 8,192), made on the spot with the
tokenizer of the bundled model, and trains on countdown; `--set model.path=FOLDER` names another model. After each step
a checkpoint is written, in turn by a thread, without one, and without one and without checksums, so that all see the
same load of the machine. The time of the step after a checkpoint includes what the thread takes away from it.
"""

import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from shared import command_line, save_random_model

from bandpo_cli.config.layers import read_assignments, resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.storage import checkpoints as stored_checkpoints
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training import checkpoint_writer, loop
from bandpo_cli.training.build import build_components
from bandpo_cli.training.checkpoint_writer import CheckpointWriter

Seconds = dict[str, dict[str, list[float]]]

KINDS = {"by a thread": True, "without a thread": False, "without checksums": False}
ORDER = [*KINDS, "by a thread", "without checksums", "without a thread"]
"""The kinds in turn. Of the two that are compared, each comes first in every other round."""


class NoHash:
    """Stands in for xxh3_64 and takes no time."""

    def __init__(self, _: bytes = b"") -> None:
        """Hash nothing."""

    update = __init__

    def hexdigest(self) -> str:
        """Return a placeholder."""
        return "none"


@contextmanager
def without_checksums(condition: bool) -> Iterator[None]:
    """Write checkpoints without computing checksums if `condition` is true."""
    with ExitStack() as stack:
        if condition:
            stack.enter_context(mock.patch.object(checkpoint_writer, "xxh3_64", NoHash))
            stack.enter_context(mock.patch.object(stored_checkpoints, "file_checksum", return_value="none"))
        yield


def measure(config: RunConfig, folder: RunFolder, checkpoints: int) -> tuple[Seconds, int]:
    """Train and write a checkpoint after each step; return the seconds by kind, and the bytes that the first copy took.

    `waited` is the time of a checkpoint in the thread that trains, `CPU` the processor time of all threads meanwhile,
    `next step` the time of the step after it.
    """
    components = build_components(config, build_task(config.task))
    seconds: Seconds = {kind: {"waited": [], "CPU": [], "next step": []} for kind in KINDS}
    copied = 0
    steps = loop.train(config, components, folder)
    next(steps)  # the first step is slower
    last = 1
    with CheckpointWriter(writer_config(config, True), components, folder) as background:
        direct = CheckpointWriter(writer_config(config, False), components, folder)
        for number in range(len(KINDS) * checkpoints):
            kind = ORDER[number % len(ORDER)]
            writer = background if KINDS[kind] else direct
            start = time.perf_counter()
            resident = resident_bytes()
            busy = time.process_time()
            with without_checksums(kind == "without checksums"):
                writer.prepare(last)
                copied = copied or resident_bytes() - resident
                writer.commit()
            seconds[kind]["CPU"].append(time.process_time() - busy)
            seconds[kind]["waited"].append(time.perf_counter() - start)
            before = time.perf_counter()
            last = next(steps).step
            seconds[kind]["next step"].append(time.perf_counter() - before)
            writer.wait()
    steps.close()
    components.close()
    return seconds, copied


def resident_bytes() -> int:
    """Return the memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def writer_config(config: RunConfig, background: bool) -> RunConfig:
    """Return the settings of a writer: a checkpoint per step, of which the last one is kept."""
    checkpoint = {"every": 1, "keep_last": 1, "keep_best": 0, "background": background}
    return resolve([config.model_dump(mode="json"), {"checkpoint": checkpoint}])


def main() -> None:
    """Measure and print the times."""
    parser = command_line(__doc__)
    parser.add_argument("--checkpoints", type=int, default=8, help="of each kind, at least 2")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="checkpoint-time-", dir=options.folder))
    save_random_model(place / "model", 8192, 512, 1408, 8, 8, 2)
    settings = {
        "steps": len(KINDS) * options.checkpoints + 3,
        "model": {"path": str(place / "model"), "dtype": "float32"},
        "task": {"name": "countdown"},
        "sampling": {"prompts": 8, "samples": 4, "max_tokens": 8},
        "evaluation": {"every": 0},
        "checkpoint": {"every": 0},
        "tracking": {"mlflow": False},
    }
    config = resolve([settings, read_assignments(options.set)])
    folder = RunFolder.create(place, "run")
    seconds, copied = measure(config, folder, options.checkpoints)
    (checkpoint,) = (folder.path / "checkpoints").iterdir()
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    shutil.rmtree(place)
    print(f"{options.checkpoints} checkpoints of {size / 2**20:,.0f} MiB of each kind, in turn; milliseconds")
    print(f"{'':18}{'waited':>9}{'at most':>9}{'first':>9}{'CPU':>9}{'next step':>11}{'at most':>9}")
    for kind, second in seconds.items():
        waited, after = second["waited"], second["next step"]
        shown = [
            (statistics.median(waited), 9),
            (max(waited), 9),
            (waited[0], 9),
            (statistics.median(second["CPU"]), 9),
        ]
        shown += [(statistics.median(after), 11), (max(after), 9)]
        print(f"{kind:18}" + "".join(f"{1000 * value:{width},.0f}" for value, width in shown))
    with_them, without = (seconds[kind]["waited"] for kind in ("without a thread", "without checksums"))
    differences = [one - other for one, other in zip(with_them, without, strict=True)]
    percent = 100 / statistics.mean(without)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    print(
        f"checksums take {percent * statistics.mean(differences):.1f}% of a write (standard error of the mean of the "
        f"pairs {percent * error:.1f}%, median {percent * statistics.median(differences):.1f}%)"
    )
    print(f"the copy takes {copied / 2**20:,.0f} MiB of memory")


if __name__ == "__main__":
    main()
