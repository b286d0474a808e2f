"""Checkpoints with one flipped bit each: all must be noticed, and the resumed run must equal an uninterrupted one.

    python benchmarks/bit_flips.py [--flips 100] [--resumes 5] [--seed 0] [--set KEY=VALUE ...]

A small run (the bundled model, a checkpoint every 2 of 6 steps) is stopped after step 5. Each flip changes one random
bit of the checkpoint of step 4; the byte is chosen uniformly over the bytes of all files, and each file gets at least
one flip. The plan of a resume must use the checkpoint of step 2, with a warning that names the file. The first flips,
of different files, are resumed to the end and compared. Exit code 0 when all are noticed and equal.
"""

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # equality bit for bit requires the same number of threads

from shared import command_line, content_of_run

from bandpo_cli.config.layers import read_assignments, resolve
from bandpo_cli.experiments.resume_and_fork import plan_resume
from bandpo_cli.experiments.run import resume, train
from bandpo_cli.storage.run_folder import RunFolder

SETTINGS = [
    "steps=6", "sampling.prompts=4", "sampling.samples=4", "optim.updates=2", "optim.lr=1e-4", "evaluation.every=2",
    "evaluation.problems=4", "evaluation.samples=4", "evaluation.k=[1,4]", "checkpoint.every=2",
    "checkpoint.keep_last=null", "tracking.mlflow=false",
]  # fmt: skip


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def chosen_flips(files: list[Path], count: int, source: random.Random) -> list[tuple[Path, int]]:
    """Return the file and the bit of each flip: one for each file first."""
    sizes = [path.stat().st_size for path in files]
    chosen = [*files, *source.choices(files, sizes, k=max(count - len(files), 0))][:count]
    return [(path, source.randrange(8 * path.stat().st_size)) for path in chosen]


def main() -> None:
    """Flip, plan and resume."""
    parser = command_line(__doc__)
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--resumes", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    runs_dir = Path(tempfile.mkdtemp(prefix="bit-flips-"))
    config = resolve([read_assignments([*SETTINGS, *options.set])])
    complete = RunFolder(train(config, runs_dir, "complete").folder)
    folder = RunFolder(runs_dir / "stopped")
    shutil.copytree(complete.path, folder.path)
    (folder.path / "summary.json").unlink()
    shutil.rmtree(folder.checkpoint_dir(6))
    folder.metrics_path.write_bytes(b"".join(folder.metrics_path.read_bytes().splitlines(True)[:6]))
    checkpoint = folder.checkpoint_dir(4)
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    noticed, equal, resumed = 0, 0, 0
    for path, bit in chosen_flips(files, options.flips, random.Random(options.seed)):
        flip(path, bit)
        plan = plan_resume(folder, (), runs_dir)
        name = path.relative_to(checkpoint).as_posix()
        if plan.step == 2 and any(f"step-000004: {name}" in warning for warning in plan.warnings):
            noticed += 1
        else:
            print(f"not noticed: bit {bit} of {name}")
        if resumed < options.resumes:
            resumed += 1
            again = RunFolder(runs_dir / f"resumed-{resumed}")
            shutil.copytree(folder.path, again.path)
            resume(again.name, runs_dir)
            equal += content_of_run(again.path) == content_of_run(complete.path)
        flip(path, bit)
    assert plan_resume(folder, (), runs_dir).step == 4, "without a flip the checkpoint of step 4 is used"
    shutil.rmtree(runs_dir)
    print(f"{noticed} of {options.flips} flips in {len(files)} files noticed, with the file's name")
    print(f"{equal} of {resumed} resumed runs equal the uninterrupted run")
    sys.exit(noticed < options.flips or equal < resumed)


if __name__ == "__main__":
    main()
