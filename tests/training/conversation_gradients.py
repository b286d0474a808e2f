"""Training steps on conversations of the calculator task, and the same steps by hand: plain loops over whole sequences.

By hand a conversation is one completion of all its tokens, with a mask of those that were sampled.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.experiments.plan import prepare_task
from bandpo_cli.models.load import load_policy
from bandpo_cli.models.weights import checkpoint_weights
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.training import loop
from bandpo_cli.training.build import build_components
from bandpo_cli.types import Group, Rollout

Weights = dict[str, torch.Tensor]
CLIP = 0.02


def config_of(**sections: Any) -> RunConfig:
    """Return the settings of two steps with two updates each, in which ratios leave their bounds."""
    common = {
        "steps": 2,
        "task": {"name": "calculator"},
        "bounds": {"method": "clip", "eps_low": CLIP, "eps_high": CLIP},
        "sampling": {"prompts": 8, "samples": 4},
        # A large eps: AdamW divides the gradient by its own size, which would magnify rounding errors.
        "optim": {
            "updates": 2, "lr": 5e-4, "warmup_steps": 0, "eps": 1e-3, "weight_decay": 0.0, "max_grad_norm": None,
            "micro_batch_tokens": 200,
        },
        "evaluation": {"every": 0},
        "checkpoint": {"every": 0},
        "tracking": {"mlflow": False},
        "grading": {"workers": 1},
    }  # fmt: skip
    return resolve([common, sections])


def train(ranks: Ranks, folder: Path, config: RunConfig) -> tuple[list[list[list[Group]]], Weights]:
    """Train; return the groups of each update of each step, and the weights after the last step."""
    run = (
        RunFolder.create(folder, f"on-{ranks.size}")
        if ranks.is_main
        else RunFolder(folder / f"on-{ranks.size}")
    )
    components, taken = build_components(config, prepare_task(config), ranks), []

    def recorded(policy: Any, optimizer: Any, experiences: Sequence[Any], *others: Any) -> Any:
        parts = ([item, item.left_out] if item.left_out else [item] for item in experiences)
        taken.append([[group for part in pair for group in part.groups] for pair in parts])
        return update_policy(policy, optimizer, experiences, *others)

    update_policy = loop.update_policy
    try:
        with mock.patch.object(loop, "update_policy", recorded):
            for _ in loop.train(config, components, run):
                pass
        weights = {name: weight.clone() for name, weight in checkpoint_weights(components.policy.model)}
    finally:
        components.close()
    return taken, weights


def by_hand(config: RunConfig, steps: Sequence[Sequence[Sequence[Group]]]) -> tuple[Weights, Weights, int]:
    """Train on the groups; return the weights before and after, and the number of tokens with a clipped ratio."""
    model = load_policy(config.model, ranks=SINGLE, seed=config.seed).model
    before = {name: weight.clone() for name, weight in checkpoint_weights(model)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optim = config.optim
    adamw = torch.optim.AdamW(trained, optim.lr, optim.betas, optim.eps, optim.weight_decay)
    clipped = 0
    for updates in steps:
        with torch.no_grad():
            old = {
                id(rollout): logprobs(model, rollout)
                for groups in updates for group in groups for rollout in group.rollouts_G
            }  # fmt: skip
        for groups in updates:
            losses = []
            for group in groups:
                rewards = [rollout.grade.reward for rollout in group.rollouts_G]
                for rollout, reward in zip(group.rollouts_G, rewards, strict=True):
                    advantage = (reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-6)
                    ratios = (logprobs(model, rollout) - old[id(rollout)]).exp()
                    gains = torch.minimum(ratios * advantage, ratios.clamp(1 - CLIP, 1 + CLIP) * advantage)
                    clipped += int((gains.detach() < (ratios * advantage).detach()).sum())
                    sampler = torch.tensor(rollout.completion.logprobs)
                    weights = (
                        (old[id(rollout)] - sampler)
                        .exp()
                        .clamp(max=config.objective.importance_cap or math.inf)
                    )
                    losses.append(-(weights * gains).mean())
            adamw.zero_grad()
            torch.stack(losses).mean().backward()
            adamw.step()
    return before, dict(checkpoint_weights(model)), clipped


def logprobs(model: Any, rollout: Rollout) -> torch.Tensor:
    """Return log π of the sampled tokens of a conversation, from one pass over all its tokens."""
    completion, ids, mask = rollout.completion, list(rollout.prompt_ids), [False] * len(rollout.prompt_ids)
    for index, token in enumerate(completion.token_ids):
        for insertion in completion.inserted:
            if insertion.position == index:
                ids += insertion.token_ids
                mask += [False] * len(insertion.token_ids)
        ids.append(token)
        mask.append(True)
    table = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(dim=-1)
    every = table[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return every[torch.tensor(mask[1:])]


def check(config: RunConfig, steps: Sequence[Sequence[Sequence[Group]]], weights: Weights) -> None:
    """Check that the steps by hand end with the same weights, and that the test has something to compare."""
    for updates in steps:
        rollouts = [rollout for groups in updates for group in groups for rollout in group.rollouts_G]
        assert len(rollouts) == 32
        assert sum(len(rollout.completion.inserted) == 1 for rollout in rollouts) >= 3
        assert {rollout.grade.correct for rollout in rollouts} == {False, True}
    before, after, clipped = by_hand(config, steps)
    assert clipped > 5
    assert weights.keys() == after.keys()
    moved = torch.cat([(after[name] - before[name]).flatten() for name in after])
    differs = torch.cat([(after[name] - weights[name]).flatten() for name in after])
    assert moved.norm() > 1e-2
    assert differs.norm() < 1e-3 * moved.norm()
