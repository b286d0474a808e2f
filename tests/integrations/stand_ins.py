"""Stand-ins for the trainers of `bandpo_cli.integrations`: their documented interfaces, in a few lines each.

Tests that need a trainer's interface alone run with the stand-in, so that they run in every environment, and with the
installed package where there is one.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType
from typing import Any

import pytest
import torch

import bandpo_cli.integrations


@contextmanager
def integration(name: str, modules: dict[str, dict[str, Any]]) -> Iterator[ModuleType]:
    """Import `bandpo_cli.integrations.<name>` afresh with `modules` (attributes by name) in `sys.modules`."""
    path = f"bandpo_cli.integrations.{name}"
    with pytest.MonkeyPatch.context() as patch:
        for module_name, attributes in modules.items():
            module = ModuleType(module_name)
            vars(module).update(attributes)
            patch.setitem(sys.modules, module_name, module)
        patch.delitem(sys.modules, path, raising=False)
        patch.delattr(bandpo_cli.integrations, name, raising=False)
        module = importlib.import_module(path)
        try:
            yield module
        finally:
            del sys.modules[path]
            delattr(bandpo_cli.integrations, name)


@contextmanager
def partial_package(
    package: str, folders: Sequence[str], modules: Mapping[str, dict[str, Any]] | None = None
) -> Iterator[None]:
    """Make the modules of an installed package importable one by one; skip the test where it is not installed.

    `import verl` needs ray and more, and single modules of it need little.

    Args:
        folders: packages that become empty modules with the packages' folders, so that no `__init__.py` runs.
        modules: modules that are replaced, with the attributes that are taken from them.
    """
    try:
        installed = distribution(package)
    except PackageNotFoundError:
        pytest.skip(f"needs {package}")
    empty = {name: {"__path__": [str(installed.locate_file(name.replace(".", "/")))]} for name in folders}
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for name, attributes in (empty | dict(modules or {})).items():
            module = ModuleType(name)
            vars(module).update(attributes)
            patch.setitem(sys.modules, name, module)
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                if name.partition(".")[0] == package:
                    del sys.modules[name]


def with_parents(modules: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the modules and all packages above them, which are empty."""
    parents = {
        name.rsplit(".", count)[0]: {"__path__": []}
        for name in modules
        for count in range(1, name.count(".") + 1)
    }
    return parents | modules


BANDS: list[dict[str, Any]] = [
    {"divergence": "kl", "delta": 0.05, "max_ratio": 10.0},
    {"divergence": "tv", "delta": 0.1, "max_ratio": None},
]
"""Settings of the Band for the comparisons of losses."""

# ---- prime-rl: src/prime_rl/trainer/rl/loss.py, August 2026 ----------------------------------------------------------


@dataclass
class LossInputs:
    """One sequence, [seq] each."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = field(default=None)


@dataclass
class LossOutputs:
    """The loss of a sequence and its metrics, scalars."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


PRIME_RL = with_parents({"prime_rl.trainer.rl.loss": {"LossInputs": LossInputs, "LossOutputs": LossOutputs}})


# ---- TRL 1.16: trainer/grpo_config.py, trainer/grpo_trainer.py -------------------------------------------------------


@dataclass
class GRPOConfig:
    """The settings that concern the ratio, with TRL's defaults."""

    output_dir: str | None = None
    gradient_accumulation_steps: int = 1
    steps_per_generation: int | None = None
    num_iterations: int = 1
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    num_generations: int = 8
    use_cpu: bool = False
    bf16: bool | None = None
    report_to: str = "none"

    def __post_init__(self) -> None:
        self.steps_per_generation = self.steps_per_generation or self.gradient_accumulation_steps


class GRPOTrainer:
    """A trainer whose loss is the clipped objective, averaged over all tokens; the policy is a tensor of log-probs."""

    def __init__(self, model: Any, reward_funcs: Any, args: GRPOConfig, train_dataset: Any = None) -> None:
        self.args = args
        self.epsilon_low = args.epsilon
        self.epsilon_high = args.epsilon_high if args.epsilon_high is not None else args.epsilon

    def _compute_loss(self, model: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        old = inputs.get("old_per_token_logps")
        ratio = torch.exp(model - (model.detach() if old is None else old))
        advantages = inputs["advantages"][:, None]
        clamped = torch.clamp(ratio, 1 - self.epsilon_low, 1 + self.epsilon_high)
        return -torch.min(ratio * advantages, clamped * advantages).mean()


TRL = {"trl": {"__version__": "1.16.0", "GRPOConfig": GRPOConfig, "GRPOTrainer": GRPOTrainer}}
