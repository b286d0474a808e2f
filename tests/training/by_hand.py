"""Log-probs, rewards and advantages of recorded completions, without the functions that training uses."""

from __future__ import annotations

import copy
import statistics

import torch

from bandpo_cli.config.run import RunConfig
from bandpo_cli.training.components import Components
from tests.training.recording import Sampled, Weights


def plain_logprobs(
    components: Components, weights: Weights, groups: list[list[Sampled]], temperature: float
) -> list[float]:
    """Return log π of every sampled token by one unpadded forward pass per completion."""
    model = copy.deepcopy(components.policy.model)
    model.load_state_dict(weights)
    found: list[float] = []
    for each in (sampled for group in groups for sampled in group):
        prompt, tokens = each.prompt_ids, each.completion.token_ids
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        rows = torch.log_softmax(logits / temperature, dim=-1).tolist()
        found += [row[token] for row, token in zip(rows, tokens, strict=True)]
    return found


def shaped(each: Sampled, config: RunConfig) -> float:
    """Return the grader's reward on the scale from wrong to correct, less the penalty for the last tokens."""
    reward, length = config.reward, len(each.completion.token_ids)
    scaled = reward.wrong + (reward.correct - reward.wrong) * each.grade.reward
    if not reward.overlong_buffer:
        return scaled
    free = config.sampling.max_tokens - reward.overlong_buffer
    return scaled - reward.overlong_penalty * max(0, length - free) / reward.overlong_buffer


def token_advantages(groups: list[list[Sampled]], config: RunConfig) -> list[float]:
    """Return (reward − group mean)/(group standard deviation + 1e-6) at each token of each completion."""
    found: list[float] = []
    for group in groups:
        rewards = [shaped(each, config) for each in group]
        mean, scale = statistics.fmean(rewards), statistics.stdev(rewards) + 1e-6
        for each, reward in zip(group, rewards, strict=True):
            found += [(reward - mean) / scale] * len(each.completion.token_ids)
    return found
