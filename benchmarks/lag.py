"""Time per step with rollouts sampled one step ahead (`sampling.max_lag: 1`) against sampling before each update.

    python benchmarks/lag.py [--rounds 3] [--steps 6] [--only default|long] [--engine transformers|vllm] [KEY=VALUE ...]

The regimes are those of `ranks.py`, on a CPU unless `model.device=cuda` is among the settings KEY=VALUE. Each round
trains the first steps of the same run with both settings in turn. The first two steps are not counted: the first batch
is sampled in place. On a CPU, trainer and engine process have half of the threads each.
"""

import tempfile
from functools import partial
from pathlib import Path

from ranks import REGIMES, SHAPE, settings_of
from shared import Records, command_line, compare_runs, save_random_model, train

UNCOUNTED = 2
COLUMNS = ("time/step", "time/sample", "time/logprobs", "time/update", "time/sync")


def train_with_lag(lag: int, words: list[str], steps: int) -> Records:
    """Return the metrics of the first steps of a run with this `sampling.max_lag`."""
    records = train(*words, "--set", f"sampling.max_lag={lag}", steps=steps, OMP_NUM_THREADS="2")
    if {record.get("sampler/lag", 0) > 0 for record in records[UNCOUNTED:]} != {lag > 0}:
        raise ValueError(f"sampling.max_lag = {lag}: the steps have another lag")
    return records


def main() -> None:
    """Measure and print the tables."""
    parser = command_line(__doc__)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", choices=list(REGIMES))
    parser.add_argument("--engine", default="transformers")
    options = parser.parse_args()
    more = [word for setting in options.settings for word in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="bandpo-lag-") as folder:
        save_random_model(Path(folder), *SHAPE)
        for regime in [options.only] if options.only else REGIMES:
            words = [*settings_of(regime, Path(folder)), "--sampler", options.engine, *more]
            variants = {
                f"max_lag {lag}": partial(train_with_lag, lag, words, options.steps) for lag in (0, 1)
            }
            compare_runs(regime, variants, options.rounds, UNCOUNTED, COLUMNS)


if __name__ == "__main__":
    main()
