"""Sampling engines by name, and the function that builds the one of a config."""

from __future__ import annotations

from bandpo_cli.config.run import RunConfig, SamplingConfig
from bandpo_cli.config.sampling import check_engine, resolve_engine
from bandpo_cli.models.load import Policy
from bandpo_cli.registries import ENGINES, load_attribute
from bandpo_cli.sampling.base import Sampler, SamplingParams
from bandpo_cli.sampling.transformers_sampler import TransformersSampler

__all__ = ["Sampler", "SamplingParams", "build_sampler"]


def build_transformers_sampler(config: SamplingConfig, policy: Policy) -> Sampler:
    """Return the sampler that runs the trainer's own model."""
    return TransformersSampler(policy.model, policy.pad_id, config.max_sequences)


def build_vllm_sampler(config: SamplingConfig, policy: Policy) -> Sampler:
    """Return a vLLM engine with the weights of the policy."""
    from bandpo_cli.sampling.vllm_sampler import VllmSampler  # vLLM takes seconds to import

    return VllmSampler(config, policy)


def build_sampler(config: RunConfig, policy: Policy) -> Sampler:
    """Return the engine that `sampling.engine` names.

    Raises:
        ConfigError: the engine is not installed.
        UserError: the engine cannot start with this model and these settings.
    """
    engine = resolve_engine(config.sampling.engine, on_gpu=policy.device.type == "cuda")
    check_engine(engine)
    sampler: Sampler = load_attribute(ENGINES[engine].build)(config.sampling, policy)
    return sampler
