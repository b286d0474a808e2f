"""Time per step with rollouts sampled one step ahead (`sampling.max_lag: 1`) against sampling before each update.

    python benchmarks/lag.py [--rounds 3] [--steps 6] [--only default|long] [--engine transformers|vllm] [KEY=VALUE ...]

The regimes are those of `ranks.py`, on a CPU unless `model.device=cuda` is among the settings KEY=VALUE. Each round
trains the first steps of the same run with both settings in turn, each in a process of its own, so that a busy machine
slows both. The first two steps are not counted: the first batch is sampled in place. On a CPU, trainer and engine
process have half of the threads each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from ranks import COMMON, REGIMES, save_model

from bandpo_cli.config.layers import read_assignments, resolve
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.base import build_task
from bandpo_cli.training import loop
from bandpo_cli.training.components import build_components

Records = list[dict[str, Any]]

LAGS = (0, 1)
UNCOUNTED = 2
PHASES = ("step", "sample", "logprobs", "update", "sync")


def train_steps(options: argparse.Namespace) -> None:
    """Train the first steps in this process and write the lines of metrics.jsonl as JSON to `options.place`."""
    path = {} if options.regime == "default" else {"model": {"path": str(options.place / "model")}}
    # One step more than is trained: nothing is sampled ahead in the last one.
    own = {"steps": options.steps + 1, "sampling": {"engine": options.engine, "max_lag": options.lag}}
    config = resolve([COMMON, REGIMES[options.regime], path, own, read_assignments(options.settings)])
    if config.model.device == "cpu":
        torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder), "run")
        components = build_components(config, build_task(config.task))
        with closing(components), closing(loop.train(config, components, run)) as reports:
            records = [report.record for report in islice(reports, options.steps)]
    (options.place / f"{options.lag}.json").write_text(json.dumps(records))


def run(regime: str, lag: int, options: argparse.Namespace, place: Path) -> Records:
    """Train in a process of its own and return the lines of metrics.jsonl that count."""
    arguments = ["--regime", regime, "--lag", str(lag), "--place", str(place), "--steps", str(options.steps)]
    command = [sys.executable, __file__, *arguments, "--engine", options.engine, *options.settings]
    subprocess.run(command, check=True)
    records: Records = json.loads((place / f"{lag}.json").read_text())
    lags = {record.get("sampler/lag", 0) > 0 for record in records[UNCOUNTED:]}
    if lags != {lag > 0}:
        raise ValueError(f"sampling.max_lag = {lag}: the steps have another lag")
    return records[UNCOUNTED:]


def measure(regime: str, options: argparse.Namespace, place: Path) -> None:
    """Measure a regime and print its table."""
    records: dict[int, Records] = {lag: [] for lag in LAGS}
    ratios = []
    for number in range(options.rounds):
        found = {lag: run(regime, lag, options, place) for lag in (LAGS if number % 2 == 0 else LAGS[::-1])}
        seconds = {lag: statistics.median(each["time/step"] for each in found[lag]) for lag in LAGS}
        for lag in LAGS:
            records[lag] += found[lag]
        ratios.append(seconds[0] / seconds[1])
        print(f"{regime}, round {number + 1}: {seconds[0]:.3f} s per step, {seconds[1]:.3f} s", flush=True)
    print(f"\n{regime}: {len(records[0])} steps of each counted; median seconds")
    print(f"{'':12}" + "".join(f"{phase:>10}" for phase in PHASES))
    for lag in LAGS:
        values = (statistics.median(each.get(f"time/{name}", 0) for each in records[lag]) for name in PHASES)
        print(f"max_lag {lag:<4}" + "".join(f"{value:10.3f}" for value in values))
    print(
        f"steps per second, max_lag 1 / max_lag 0: median over rounds {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", choices=list(REGIMES))
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--regime", help=argparse.SUPPRESS)
    parser.add_argument("--lag", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.regime:
        train_steps(options)
        return
    with tempfile.TemporaryDirectory(prefix="bandpo-lag-") as folder:
        save_model(Path(folder) / "model")
        for regime in [options.only] if options.only else REGIMES:
            measure(regime, options, Path(folder))


if __name__ == "__main__":
    main()
