"""Settings of sampling (`sampling:`), and the choice of the engine without importing any engine."""

import os
from importlib.util import find_spec
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import AUTO_ENGINE, ENGINES
from bandpo_cli.settings_validation import Positive, Section, require


class VllmConfig(Section):
    """Settings of the vLLM engine."""

    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the GPU's memory for the engine's weights and cache; the trainer uses the same GPU, unless
    `sampling.max_lag` gives the engine one of its own. null: what a full batch needs, and at most what the trainer
    leaves by the estimate; a run writes the share that it used into its config.yaml. Ignored on a CPU."""
    kv_cache_gb: Positive = 2.0
    """Size of the key-value cache on a CPU, GiB. Ignored on a GPU."""
    tensor_parallel: PositiveInt = 1
    """Number of GPUs per engine."""
    eager: bool = False
    """Run without CUDA graphs and compilation: faster to start, slower to sample."""
    sleep: bool = True
    """Free the engine's GPU memory while the trainer updates. No effect with `sampling.max_lag`."""
    prefix_caching: bool = True
    """Compute each prompt once for all its completions."""


class SamplingConfig(Section):
    """Sampling of the batch of rollouts of one step."""

    engine: Annotated[str, AfterValidator(ENGINES.check_name)] = AUTO_ENGINE
    """`auto` is vllm where it is installed and there is a GPU, else transformers."""
    prompts: PositiveInt = 64
    """Prompts per step (P)."""
    samples: Annotated[int, Field(ge=2)] = 16
    """Completions per prompt (G): the group that advantages are relative to."""
    temperature: Positive = 1.0
    """Logits are divided by this before sampling, and in the policy that is trained."""
    max_tokens: PositiveInt = 8
    """Maximum number of tokens in a completion, its end-of-sequence token included."""
    max_prompt_tokens: PositiveInt = 64
    """Problems with a longer prompt are dropped and counted."""
    max_sequences: PositiveInt = 2048
    """Maximum number of completions decoded in parallel; more are sampled in several batches."""
    dynamic: bool = False
    """Dynamic sampling (DAPO): groups whose rewards are all equal have no gradient, so they are dropped and replaced
    from further prompts."""
    dynamic_batches: PositiveInt = 10
    """With `dynamic`: maximum number of batches sampled for one step; the step then uses the groups it has."""
    max_lag: Annotated[int, Field(ge=0, le=1)] = 0
    """Steps by which the weights that sample a batch may be older than those that train on it. With 1 a process of the
    engine samples the batch of the next step while the trainer updates; the importance correction is on."""
    weight_transfer: Literal["host", "cuda-ipc"] = "host"
    """Path of the weights to the engine process (`max_lag`): memory of the host, or a buffer on the trainer's GPU that
    both processes map. `cuda-ipc` needs a GPU that both can see; no GPU has run it yet."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Truncated sampling is refused for training: the ratio needs the full distribution."""
    vllm: VllmConfig = VllmConfig()

    @model_validator(mode="after")
    def _check_engine_and_distribution(self) -> Self:
        require(
            not self.max_lag or self.vllm.tensor_parallel == 1,
            f"max_lag = {self.max_lag}: the engine process of a rank has one GPU, so vllm.tensor_parallel = "
            f"{self.vllm.tensor_parallel} must be 1",
        )
        for name, untruncated in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
            value = getattr(self, name)
            require(
                value == untruncated,
                f"{name} = {value}: truncated sampling is refused for training: the ratio π/π_old needs π_old to be "
                f"the full distribution that the loss differentiates; leave it at {untruncated}",
            )
        return self


def is_installed(package: str | None) -> bool:
    """Return whether a package can be imported; True for None, no package. A folder of that name is no package."""
    spec = None if package is None else find_spec(package)
    return package is None or (spec is not None and spec.origin is not None)


def check_engine(engine: str, device: str, max_lag: int = 0) -> None:
    """Raise ConfigError if the package of an engine is not installed, or the engine cannot use the policy's GPU
    or the system.

    vLLM in the trainer's process always runs on the first visible GPU. A process of its own (`max_lag`) chooses one.
    """
    if max_lag and not hasattr(os, "memfd_create"):
        raise ConfigError(
            f"sampling.max_lag = {max_lag}: the engine process needs Linux; set sampling.max_lag=0"
        )
    kind, _, card = device.partition(":")
    name = resolve_engine(engine, on_gpu=kind == "cuda")
    if not ENGINES[name].shares_weights and card.isdecimal() and int(card) > 0 and not max_lag:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        chosen = visible[int(card)] if int(card) < len(visible) else card
        raise ConfigError(
            f"model.device = '{device}': the {name} engine runs on the first visible GPU; type "
            f"CUDA_VISIBLE_DEVICES={chosen} before the command, and leave model.device out"
        )
    if engine != AUTO_ENGINE and not is_installed(package := ENGINES[engine].package):
        raise ConfigError(
            f"sampling.engine = '{engine}': the package {package} is not installed; {ENGINES[engine].install}, "
            f"or use --sampler {resolve_engine(AUTO_ENGINE, on_gpu=False)}"
        )


def check_tensor_parallel(tensor_parallel: int, ranks: int) -> None:
    """Raise ConfigError for an engine that is spread over GPUs if each of several ranks has an engine."""
    if ranks > 1 and tensor_parallel > 1:
        raise ConfigError(
            f"sampling.vllm.tensor_parallel = {tensor_parallel}: each of {ranks} ranks has an engine on its own GPU; "
            "set it to 1, or start one rank"
        )


def resolve_engine(engine: str, on_gpu: bool) -> str:
    """Return `engine`, and for `auto` vllm where it is installed and the policy is on a GPU, else transformers."""
    if engine != AUTO_ENGINE:
        return engine
    for name, entry in ENGINES.items():
        if on_gpu and entry.preferred_on_gpu and is_installed(entry.package):
            return name
    return next(name for name, entry in ENGINES.items() if entry.package is None)
