"""Runs of different numbers of ranks, compared: completions, loss, gradient norm and final weights.

    python benchmarks/rank_equality.py                        # 1, 2 and 4 ranks, and resumes of 1 as 2 and 2 as 1
    python benchmarks/rank_equality.py --ranks 1 2 -- --set model.lora.rank=16 --set objective.reference_kl=0.01
    python benchmarks/rank_equality.py --ranks 1 2 -- --sampler vllm

Everything after `--` goes to each `bandpo train`. A resume continues a run after step 2 with another number of ranks.
The first line of the table is what the others are compared with. All processes have one thread.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors.torch import load_file
from shared import bandpo, command_line

SETTINGS = [
    "sampling.prompts=16",
    "sampling.samples=8",
    "evaluation.every=0",
    "checkpoint.every=1",
    "checkpoint.keep_last=100",
    "tracking.mlflow=false",
]
STOPPED_AFTER = 2
"""The step after which a run is resumed."""


def main() -> None:
    """Train, resume, and print a line per run."""
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--resume", nargs="*", default=["1:2", "2:1"], metavar="FROM:TO", help="numbers of ranks"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("arguments", nargs="*", help="of bandpo train, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bandpo-ranks-") as folder:
        runs = Path(folder)
        settings = [word for setting in SETTINGS for word in ("--set", setting)]
        names = []
        for ranks in options.ranks:
            names.append(f"{ranks}-ranks")
            train(
                runs,
                ranks,
                ["--name", names[-1], "--steps", str(options.steps), *settings, *options.arguments],
            )
        for pair in options.resume:
            before, after = map(int, pair.split(":"))
            names.append(f"{before}-then-{after}")
            copy = runs / names[-1]
            shutil.copytree(runs / f"{before}-ranks", copy)
            (copy / "summary.json").unlink()
            for checkpoint in (copy / "checkpoints").glob("step-*"):
                if int(checkpoint.name.partition("-")[2]) > STOPPED_AFTER:
                    shutil.rmtree(checkpoint)
            train(runs, after, ["--resume", names[-1]])
        print(f"{'run':14} {'other completions':>18} {'loss':>9} {'gradient norm':>14} {'weights':>9}")
        for name in names:
            print_differences(name, runs / names[0], runs / name, options.steps)


def train(runs: Path, ranks: int, arguments: Sequence[str]) -> None:
    """Run `bandpo train` with this number of ranks."""
    bandpo("train", "--runs-dir", str(runs), "--nproc", str(ranks), *arguments, OMP_NUM_THREADS="1")


def print_differences(name: str, expected: Path, found: Path, steps: int) -> None:
    """Print the largest differences of a run from another one."""
    columns = [texts(path, steps) for path in (expected, found)]
    different = sum(one != other for one, other in zip(*columns, strict=True))
    one, other = (lines(path) for path in (expected, found))
    metrics = {
        key: max(abs(a[key] - b[key]) for a, b in zip(one, other, strict=True))
        for key in ("optim/loss", "optim/grad_norm")
    }
    left, right = (weights(path, steps) for path in (expected, found))
    assert left.keys() == right.keys()
    weight = max((left[key].double() - right[key].double()).abs().max().item() for key in left)
    print(
        f"{name:14} {different:>6} of {len(columns[0]):>8,} {metrics['optim/loss']:>9.1e} "
        f"{metrics['optim/grad_norm']:>14.1e} {weight:>9.1e}"
    )


def texts(run: Path, steps: int) -> list[str]:
    """Return all completions of a run, in order."""
    tables = [pq.read_table(run / f"samples/step-{step:06d}.parquet") for step in range(1, steps + 1)]
    return [text for table in tables for text in table["text"].to_pylist()]


def lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path, steps: int) -> dict[str, Any]:
    """Return the weights of the last checkpoint, or its adapters."""
    folder = run / f"checkpoints/step-{steps:06d}"
    files = [folder / name for name in ("model.safetensors", "adapter_model.safetensors")]
    return load_file(next(file for file in files if file.exists()))


if __name__ == "__main__":
    main()
