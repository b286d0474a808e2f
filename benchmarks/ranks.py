"""Throughput of two ranks with one thread each against one rank with two threads, on the same work on a CPU.

    python benchmarks/ranks.py [--rounds 3] [--steps 6] [--only default|long]

Two regimes: the default run of the bundled model, and a Qwen2 with 5 million random weights (4 layers, width 256,
vocabulary 8,192) with completions of 128 tokens. Each round trains the first steps of the same run twice, with one rank
and with two; the first step of each is not counted. The two runs are required to have the same accuracy, length and
entropy at every step.
"""

import tempfile
from functools import partial
from pathlib import Path

from shared import Records, command_line, compare_runs, save_random_model, train

SHAPE = (8192, 256, 704, 4, 4, 2)
REGIMES: dict[str, list[str]] = {
    "default": [],
    "long": [
        "task.name=countdown",
        "optim.lr=5e-5",
        "sampling.prompts=16",
        "sampling.samples=4",
        "sampling.max_tokens=128",
        "optim.updates=2",
    ],
}
COLUMNS = (
    "time/step",
    "time/sample",
    "time/grade",
    "time/logprobs",
    "time/update",
    "perf/sampled_tokens_per_s",
)
SAME = ("train/accuracy", "train/response_length", "train/entropy")


def settings_of(regime: str, model: Path) -> list[str]:
    """Return the flags of a regime; all but the default one train the model in `model`."""
    settings = [*REGIMES[regime], "model.dtype=float32", "model.device=cpu"]
    if regime != "default":
        settings.append(f"model.path={model}")
    return [word for setting in settings for word in ("--set", setting)]


def check_equal(one: Records, other: Records) -> None:
    """Raise ValueError if the two runs did not do the same work."""
    for left, right in zip(one, other, strict=True):
        for key in SAME:
            if abs(left[key] - right[key]) > 1e-4:
                raise ValueError(f"step {left['step']}: {key} is {left[key]} and {right[key]}")


def main() -> None:
    """Measure and print the tables."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", choices=list(REGIMES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bandpo-ranks-") as folder:
        model = Path(folder)
        save_random_model(model, *SHAPE)
        for regime in [options.only] if options.only else REGIMES:
            latest: list[Records] = []

            def measured(ranks: int, regime: str = regime, latest: list[Records] = latest) -> Records:
                words = [*settings_of(regime, model), "--nproc", str(ranks)]
                latest.append(train(*words, steps=options.steps, OMP_NUM_THREADS=str(2 // ranks)))
                if len(latest) % 2 == 0:
                    check_equal(*latest[-2:])
                return latest[-1]

            variants = {"1 rank, 2 threads": partial(measured, 1), "2 ranks, 1 thread": partial(measured, 2)}
            compare_runs(regime, variants, options.rounds, 1, COLUMNS)


if __name__ == "__main__":
    main()
