"""TRL's GRPOTrainer with the Band, and without it for comparison: the shipped model on countdown, on a CPU.

    pip install "bandpo[trl]"
    python examples/trl_band.py
    python examples/trl_band.py --without-band

The two runs differ in the class of the trainer and its settings alone. One takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bandpo_cli.config.run import RunConfig
from bandpo_cli.grading.countdown import grade_countdown
from bandpo_cli.integrations.trl import BandGRPOConfig, BandGRPOTrainer
from bandpo_cli.models.load import embedded_model_path
from bandpo_cli.tasks.task import build_task

UPDATES = 8
"""Optimizer steps per batch of completions: 4 quarters of the batch, twice. At the first one the ratio is 1."""

METRICS = ("reward", "entropy", "clip_ratio/high_mean", "clip_ratio/low_mean")


class PrintMetrics(TrainerCallback):  # type: ignore[misc]
    """Callback that prints the metrics of every batch, and keeps them in `history`."""

    def __init__(self) -> None:
        self.history: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "reward" in logs:
            self.history.append({"batch": len(self.history) + 1} | {name: logs[name] for name in METRICS})
            print("  ".join(f"{name} {value:.4g}" for name, value in self.history[-1].items()), flush=True)


def train(
    batches: int, band: dict[str, Any] | None, seed: int = 0, learning_rate: float = 1e-4
) -> list[dict[str, float]]:
    """Train on countdown and return the metrics per batch.

    Args:
        batches: batches of 32 prompts × 8 completions.
        band: settings of the Band; None for TRL's fixed interval [0.8, 1.2].
    """
    problems = {problem.prompt: problem for problem in build_task(RunConfig().task).train_problems()}

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [grade_countdown(problems[p], c).reward for p, c in zip(prompts, completions, strict=True)]

    printer = PrintMetrics()
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder, "max_steps": batches * UPDATES, "logging_steps": UPDATES, "seed": seed,
            "per_device_train_batch_size": 64, "steps_per_generation": UPDATES // 2, "num_iterations": 2,
            "gradient_accumulation_steps": 1, "num_generations": 8, "max_completion_length": 8,
            "learning_rate": learning_rate, "lr_scheduler_type": "constant",
            "temperature": 1.0, "top_p": 1.0, "top_k": 0, "gradient_checkpointing": False,
            "use_cpu": True, "bf16": False, "dataloader_pin_memory": False,
            "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        }  # fmt: skip
        trainer_class = GRPOTrainer if band is None else BandGRPOTrainer
        trainer = trainer_class(
            model=str(embedded_model_path()),
            reward_funcs=[reward],
            args=GRPOConfig(**settings) if band is None else BandGRPOConfig(**settings, **band),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in problems]),
            callbacks=[printer],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return printer.history


def main() -> None:
    """Train as the command line says, and write the metrics if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--without-band", action="store_true", help="TRL's own trainer, with its interval [0.8, 1.2]"
    )
    parser.add_argument("--divergence", default="kl")
    parser.add_argument("--delta", type=float, default=0.05)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--history", type=Path, help="write the metrics per batch to this file, as JSON")
    given = parser.parse_args()
    band = None if given.without_band else {"band_divergence": given.divergence, "band_delta": given.delta}
    history = train(given.batches, band, given.seed, given.learning_rate)
    if given.history:
        given.history.write_text(json.dumps(history, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
