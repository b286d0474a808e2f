"""TRL's GRPOTrainer on a regime of `against_trl.py`. Prints the seconds per step and phase as JSON.

Runs in an environment with both trl and bandpo. A step is a step of bandpo: a batch of completions and all updates on
it. The prompts and their order are those of bandpo's run.

Phases: `sample`, `grade` and `logprobs` are the times of the trainer's methods for generation, rewards and old
log-probs; `update` is the rest of its training steps, optimizer included.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bandpo_cli.config.layers import read_config, resolve
from bandpo_cli.config.run import EMBEDDED_MODEL, RunConfig
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.models.load import embedded_model_path
from bandpo_cli.sampling.prompt_encoding import PromptEncoder, drop_long_prompts
from bandpo_cli.tasks.task import ProblemStream, build_task
from bandpo_cli.types import derive_seed


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Callback that records the seconds of every batch, which is `updates` steps of the trainer.

    Attributes:
        steps: seconds by phase per batch.
        phases: seconds by phase since the last batch ended.
    """

    def __init__(self, updates: int) -> None:
        self._updates = updates
        self._start = 0.0
        self.steps: list[dict[str, float]] = []
        self.phases: Counter[str] = Counter()

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time added to a phase; calls with gradient are part of the update."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if phase == "logprobs" and torch.is_grad_enabled():
                return function(*args, **kwargs)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.phases[phase] += time.perf_counter() - start
            return result

        return call

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._updates:
            return
        now = time.perf_counter()
        phases = {phase: self.phases[phase] for phase in ("sample", "grade", "logprobs")}
        total = now - self._start
        self.steps.append({**phases, "update": total - sum(phases.values()), "step": total})
        self._start = now
        self.phases.clear()


def make_trainer(config: RunConfig, steps: int, output: str, clock: StepClock) -> GRPOTrainer:
    """Return the trainer with the model, prompts, grader and batch sizes of the config."""
    path = str(embedded_model_path()) if config.model.path == EMBEDDED_MODEL else config.model.path
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(path), config.model.prompts)
    problems = drop_long_prompts(encoder, "training", build_task(config.task).train_problems(), config, [])
    stream = ProblemStream(problems, derive_seed(config.seed, "problems"))
    prompts, samples, updates = config.sampling.prompts, config.sampling.samples, config.optim.updates
    chosen = stream.next(prompts * steps)
    texts = [prompt.text for prompt in encoder.encode(chosen)]
    by_text = dict(zip(texts, chosen, strict=True))
    grader = GraderPool(config.grading)

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [grade.reward for grade in grader.grade([by_text[prompt] for prompt in prompts], completions)]

    trainer = GRPOTrainer(
        model=path,
        reward_funcs=[reward],
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            max_steps=steps * updates,
            per_device_train_batch_size=prompts * samples // updates,
            steps_per_generation=updates,
            gradient_accumulation_steps=1,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            num_generations=samples,
            max_completion_length=config.sampling.max_tokens,
            temperature=config.sampling.temperature,
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
    for phase, name in {
        "sample": "_generate",
        "grade": "_calculate_rewards",
        "logprobs": "_get_per_token_logps_and_entropies",
    }.items():
        setattr(trainer, name, clock.timed(phase, getattr(trainer, name)))
    return trainer


def main() -> None:
    """Train and print the seconds per step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    config = resolve([read_config(arguments.config)])
    clock = StepClock(config.optim.updates)
    with tempfile.TemporaryDirectory() as output:
        make_trainer(config, arguments.steps, output, clock).train()
    print(json.dumps(clock.steps))


if __name__ == "__main__":
    main()
