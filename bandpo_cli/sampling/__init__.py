"""Token in, token out: the engines, and rollouts made with them."""

from __future__ import annotations

from collections.abc import Callable

from bandpo_cli.config.run import SamplingConfig
from bandpo_cli.models.load import Policy
from bandpo_cli.sampling.base import Sampler, SamplingParams
from bandpo_cli.sampling.transformers_sampler import TransformersSampler

__all__ = ["Sampler", "SamplingParams", "build_sampler"]


def _transformers(config: SamplingConfig, policy: Policy) -> Sampler:
    return TransformersSampler(policy.model, policy.pad_id, config.max_sequences)


ENGINES: dict[str, Callable[[SamplingConfig, Policy], Sampler]] = {
    "auto": _transformers,
    "transformers": _transformers,
}


def build_sampler(config: SamplingConfig, policy: Policy) -> Sampler:
    """Build the engine that the config names."""
    return ENGINES[config.engine](config, policy)
