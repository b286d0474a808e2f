"""A program for the test of several ranks: train with vLLM, and store completions, metrics and weights.

    torchrun --nproc-per-node 2 -m tests.vllm.train_ranks FOLDER STEPS [SETTINGS]

Rank 0 writes `FOLDER/trained.pt`.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import torch

from bandpo_cli.config.layers import resolve
from bandpo_cli.metric_names import without_clock
from bandpo_cli.models.weights import checkpoint_weights
from bandpo_cli.ranks import connected, ranks_from_environment
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training.components import build_components
from bandpo_cli.training.loop import train

SETTINGS = {
    "sampling": {
        "engine": "vllm",
        "prompts": 9,
        "samples": 8,
        "vllm": {"kv_cache_gb": 0.5, "eager": True},
    },
    # A large eps: AdamW divides the gradient by its own size, and so a rounding error of a gradient near 0, too.
    "optim": {"warmup_steps": 0, "updates": 3, "lr": 1e-4, "eps": 1e-4},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 0},
}
"""Nine prompts: two ranks have four and five."""


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    config = resolve([SETTINGS, {"steps": steps + 1}, json.loads(sys.argv[3] if len(sys.argv) > 3 else "{}")])
    ranks = ranks_from_environment()
    with connected(ranks, "cpu"):
        run = RunFolder.create(folder, "run") if ranks.is_main else RunFolder(folder / "run")
        components = build_components(config, build_task(config.task), ranks)
        try:
            reports = train(config, components, run)
            # The first report is of the evaluation before training, if there is one.
            lines = [without_clock(report.record) for report in islice(reports, steps)]
            reports.close()
            weights = {
                key: checkpoint_weight.clone()
                for key, checkpoint_weight in checkpoint_weights(components.policy.model)
            }
            gap = components.sampler.probe_gap  # type: ignore[attr-defined]
        finally:
            components.close()
        equal = len({repr(item) for item in ranks.gather(lines)}) == 1
        ranks.wait()  # after the engines have ended, the ranks are still connected
    if ranks.is_main:
        columns = ["problem_id", "text", "reward", "length"]
        tables = [
            pq.read_table(run.path / f"samples/step-{line['step']:06d}.parquet", columns=columns)
            for line in lines
        ]
        completions = [table.to_pylist() for table in tables]
        torch.save(
            {"lines": lines, "completions": completions, "weights": weights, "gap": gap, "equal": equal},
            folder / "trained.pt",
        )


if __name__ == "__main__":
    main()
