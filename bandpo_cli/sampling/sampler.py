"""Sampler interface: prompts as token ids in, completions as token ids out. All engines implement it."""

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.sampling import check_engine, is_installed, resolve_engine
from bandpo_cli.errors import RunError, UserError, first_line
from bandpo_cli.models.load import Policy, is_on_cuda, read_config
from bandpo_cli.models.weights import forward_dtype, model_class
from bandpo_cli.registries import ENGINES, load_attribute
from bandpo_cli.types import Completion

TokenIds = Sequence[int]
Weights = Iterable[tuple[str, torch.Tensor]]
"""Tensors under their names in a checkpoint."""

log = logging.getLogger("bandpo_cli")


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one sampling call. There is no top-p or top-k: both would make π_old another distribution.

    Attributes:
        samples: completions per prompt (n).
        temperature: divisor of the logits; reported log-probs are those of the divided logits.
        max_tokens: maximum tokens per completion, its end token included.
        stop_ids: ids of the tokens that end a completion.
        entropy: report the entropy at each token (`Completion.entropies`), if the engine can.
    """

    samples: int
    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    entropy: bool = False


class Turn(NamedTuple):
    """One further turn of a conversation: the seed of its completion, and its maximum number of tokens."""

    seed: int
    max_tokens: int


class SampleRequest(NamedTuple):
    """Prompts that are sampled together, and their seed; the random numbers of prompt i depend on `seed + i` alone.

    With `turns_P`, each prompt is a conversation that has one completion, by its own seed and limit.
    """

    prompts_P: Sequence[TokenIds]
    seed: int
    turns_P: Sequence[Turn] | None = None

    def turns(self, params: SamplingParams) -> tuple[int, Sequence[Turn]]:
        """Return the number of completions per prompt, and seed and limit of each prompt [P]."""
        if self.turns_P is not None:
            return 1, self.turns_P
        return params.samples, [Turn(self.seed + i, params.max_tokens) for i in range(len(self.prompts_P))]


class Sampler(ABC):
    """Samples completions from the policy's current weights: an engine defines `sample_stream` and `sync`.

    A training step samples (in one or more calls), then calls `sleep`, and after the update `sync`.

    Attributes:
        shares_weights: the engine runs the trainer's own model; see `is_exact` for its log-probs.
        streams: the engine samples several requests at the same time. The turns of a conversation are then requests of
            their own, and none waits for another; otherwise those of several conversations are one request.
    """

    shares_weights = False
    streams = False

    @abstractmethod
    def sample_stream(
        self, requests: Iterable[SampleRequest | None], params: SamplingParams, in_order: bool = True
    ) -> Generator[tuple[int, list[list[Completion]]], None, None]:
        """Yield the number of each request, from 0, and its completions [P][n].

        The completions are the same for the same weights, prompts, seeds, parameters and machine, so that prompts can
        be distributed over several requests and processes. The sampler takes requests as it has room for them. Closing
        the generator drops the unfinished ones.

        Args:
            requests: they may depend on the completions of earlier ones. None stands for no request at present, and
                does not count: the sampler continues with those that it has.
            in_order: yield in the order of the requests; otherwise each request may be yielded as soon as it has ended.

        Raises:
            UserError: the engine does not support a prompt or the parameters.
            RunError: the engine failed, or its process ended or was closed by another thread. An out-of-memory error
                is raised unchanged, from another process as EngineMemoryError.
        """

    def sample(
        self, prompts_P: Sequence[TokenIds], params: SamplingParams, seed: int
    ) -> list[list[Completion]]:
        """Return the completions [P][n] of a single request; see `sample_stream`."""
        ((_, completions_PG),) = self.sample_stream([SampleRequest(prompts_P, seed)], params)
        return completions_PG

    @abstractmethod
    def sync(self, model: PreTrainedModel, version: int) -> None:
        """Load the weights of the policy's model, which have had `version` optimizer updates.

        Raises:
            StaleEngineError: the engine does not run the given weights, or it failed to load them.
            RunError: the process of the engine ended. An out-of-memory error is raised as in `sample_stream`.
        """

    def load(self, weights: Weights, version: int) -> None:
        """Load all weights without the policy; errors as in `sync`.

        Only an engine with weights of its own has the method. The caller checks what the engine then samples.
        """
        raise NotImplementedError

    def sleep(self) -> int:
        """Release accelerator memory to the trainer if the engine supports it; the next `sync` wakes the engine.

        Returns:
            Bytes of this process that were released and that PyTorch still counts as allocated.
        """
        return 0

    def describe(self) -> dict[str, str]:
        """Return the engine's name, and what else decides how it computes, for env.json."""
        return {"engine": type(self).__name__}

    def close(self) -> None:  # noqa: B027
        """Free the engine's resources."""


@dataclass(frozen=True)
class EngineModel:
    """The data of the model for an engine with weights of its own, which can be sent to another process.

    `architectures` of the config names the model's class; the dtype is that of forward passes.
    """

    config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device


def engine_model(model: PreTrainedModel) -> EngineModel:
    """Return what an engine on the model's device needs to know of the model."""
    config = copy.deepcopy(model.config)
    config.architectures = [model_class(model).__name__]
    return EngineModel(config, forward_dtype(model), model.device)


class StaleEngineError(RunError):
    """The engine samples from other weights than the policy's, so its completions are not valid for training."""


def error_text(error: BaseException) -> str:
    """Return the error's class name and the first line of its text, in up to 1,000 characters (UserError's limit)."""
    return ": ".join(filter(None, [type(error).__name__, first_line(str(error), max_chars=1000)]))


def is_exact(sampler: Sampler, policy: Policy) -> bool:
    """Return whether the sampler's log-probs are the trainer's, but for the order of float32 additions.

    In 16 bits the trainer's own model samples from logits that are rounded to 16 bits, while the trainer computes the
    logits of packed rows in float32: the tokens are samples of a slightly different distribution.
    """
    return sampler.shares_weights and forward_dtype(policy.model) == torch.float32


def check_model(config: RunConfig) -> None:
    """Check from the model's config.json that the engine of the settings can run it, before its weights are loaded.

    Raises:
        UserError: the model is a mixture of experts, which the engine does not run, or its config cannot be read.
    """
    engine = resolve_engine(config.sampling.engine, is_on_cuda(config.model))
    if ENGINES[engine].runs_experts:
        return
    text = read_config(config.model).get_text_config()
    # transformers stores the experts of a layer in one tensor, under names that vLLM's loader does not know.
    experts = [value for key, value in text.to_dict().items() if key.endswith("experts")]
    if any(isinstance(count, int) and count > 1 for count in experts):
        raise UserError(
            f"model.path = {config.model.path!r}: {text.model_type} is a mixture of experts, which the {engine} engine "
            "cannot load from the trainer; use --sampler transformers"
        )


def build_sampler(config: RunConfig, policy: Policy | EngineModel) -> Sampler:
    """Return the engine that `sampling.engine` names.

    Args:
        policy: the policy, or its model for an engine that has no weights until `load`.

    Raises:
        ConfigError: the engine is not installed.
        UserError: the engine cannot start with this model and these settings.
    """
    on_gpu = policy.device.type == "cuda"
    engine = resolve_engine(config.sampling.engine, on_gpu)
    check_engine(engine, device="auto")  # of the GPU, the commands have checked it
    if on_gpu and not ENGINES[engine].preferred_on_gpu:
        name, better = next((name, entry) for name, entry in ENGINES.items() if entry.preferred_on_gpu)
        how = f"use it with: --sampler {name}"
        if not is_installed(better.package):
            how = f"install it with: {better.install}"
        log.warning("on a GPU the %s engine samples several times slower than %s; %s", engine, name, how)
    sampler: Sampler = load_attribute(ENGINES[engine].build)(config.sampling, policy)
    return sampler
