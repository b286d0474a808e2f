"""TRL's GRPOTrainer on the embedded model and task, for `against_trl.py`. Prints the seconds per step as JSON.

Runs in an environment with both trl and bandpo. A step is a step of bandpo: a batch of 64 × 16 completions and 4
updates on it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bandpo_cli.config.run import RunConfig
from bandpo_cli.grading.countdown import grade_countdown
from bandpo_cli.models.load import embedded_model_path
from bandpo_cli.tasks.base import build_task


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Callback that records the time at the end of every batch, which is `updates` steps of the trainer."""

    def __init__(self, updates: int) -> None:
        self._updates = updates
        self.times: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._updates == 0:
            self.times.append(time.perf_counter())


def main() -> None:
    """Train and print the seconds per step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    steps = parser.parse_args().steps

    config = RunConfig()
    task = build_task(config.task)
    problems = {problem.prompt: problem for problem in task.train_problems()}

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [grade_countdown(problems[p], c).reward for p, c in zip(prompts, completions, strict=True)]

    prompts_per_step, samples = config.sampling.prompts, config.sampling.samples
    updates = config.optim.updates
    clock = StepClock(updates)
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=str(embedded_model_path()),
            reward_funcs=[reward],
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in problems]),
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=output,
                use_cpu=True,
                bf16=False,
                max_steps=steps * updates,
                per_device_train_batch_size=prompts_per_step * samples // updates,
                steps_per_generation=updates,
                gradient_accumulation_steps=1,
                gradient_checkpointing=False,
                num_generations=samples,
                max_completion_length=config.sampling.max_tokens,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                beta=0.0,
                loss_type="grpo",
                learning_rate=config.optim.lr,
                max_grad_norm=config.optim.max_grad_norm,
                logging_steps=10**6,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
        )
        trainer.train()
    seconds = [later - earlier for earlier, later in zip(clock.times[:-1], clock.times[1:], strict=True)]
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
