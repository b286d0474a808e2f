"""Sampler interface: prompts as token ids in, completions as token ids out; and the engine that every machine has.

`TransformersSampler` samples with the trainer's own model: it always has the policy's current weights and needs no
second copy.
"""

import copy
from abc import ABC, abstractmethod
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from bandpo_cli.config.batch_and_sampling import SamplingConfig, check_engine, is_installed, resolve_engine
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError, first_line, log
from bandpo_cli.models.attention import growing_cache
from bandpo_cli.models.load import Policy
from bandpo_cli.models.weights import forward_dtype, layers_for_sampling, unsharded
from bandpo_cli.processes.watch import progress
from bandpo_cli.registries import ENGINES, load_attribute
from bandpo_cli.sampling.tool_calls import StopStrings
from bandpo_cli.types import FLOAT_TYPE, TOKEN_TYPE, Completion, FinishReason

TokenIds = Sequence[int]
Weights = Iterable[tuple[str, Tensor]]  # Tensors under their names in a checkpoint

KEPT_UNTIL = 0.9  # Ended completions are removed from the batch when at most this share of it is running
DRAWN_STEPS = 64  # Tokens of a completion for which random numbers are drawn at a time


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one sampling call. There is no top-p or top-k: both would make π_old another distribution."""

    samples: int  # completions per prompt (n)
    temperature: float  # divisor of the logits; reported log-probs are those of the divided logits
    max_tokens: int  # per completion, its end token included
    stop_ids: tuple[int, ...]  # of the tokens that end a completion
    entropy: bool = False  # report the entropy at each token (`Completion.entropies`), if the engine can
    stops: bool = True  # end completions at the stop strings of the engine's settings, too


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


Requests = Iterable[SampleRequest | None]
Stream = Generator[tuple[int, list[list[Completion]]], None, None]
"""The argument and the result of `Sampler.sample_stream`."""


class Sampler(ABC):
    """Samples completions from the policy's current weights: an engine defines `sample_stream` and `sync`.

    A training step samples (in one or more calls), then calls `sleep`, and after the update `sync`.
    """

    shares_weights = False  # the engine runs the trainer's own model; see `is_exact` for its log-probs
    streams = False  # it samples several requests at a time, and no turn of a conversation waits for another

    @abstractmethod
    def sample_stream(self, requests: Requests, params: SamplingParams, in_order: bool = True) -> Stream:
        """Yield the number of each request, from 0, and its completions [P][n].

        The completions are the same for the same weights, prompts, seeds, parameters and machine, so that prompts can
        be distributed over several requests and processes. Closing the generator drops the unfinished ones.

        Args:
            requests: taken as the sampler has room for them; they may depend on the completions of earlier ones. None
                stands for no request at present, and does not count: the sampler continues with those that it has.
            in_order: yield in the order of the requests; otherwise each request as soon as it has ended.

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

        Raise StaleEngineError if the engine does not run the given weights, or it failed to load them. Raise RunError
        if the process of the engine ended. An out-of-memory error is raised as in `sample_stream`.
        """

    def load(self, weights: Weights, version: int) -> None:
        """Load all weights in an engine process, whose trainer checks the engine's samples; errors as in `sync`."""
        raise NotImplementedError

    def sleep(self) -> int:
        """Release accelerator memory to the trainer if the engine supports it; the next `sync` wakes the engine.

        Return the bytes of this process that were released and that PyTorch still counts as allocated.
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

    The config names the model's class in `architectures`; the dtype is that of forward passes. Stop strings need the
    tokenizer.
    """

    config: PreTrainedConfig
    dtype: torch.dtype
    device: torch.device
    tokenizer: PreTrainedTokenizerBase | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Return what an engine on the model's device needs to know of the model."""
        config = copy.deepcopy(model.config)
        # `fully_shard` replaces the class of a model by a subclass of it and of `FSDPModule`.
        class_ = next(item for item in type(model).__mro__ if not issubclass(item, FSDPModule))
        config.architectures = [class_.__name__]
        return cls(config, forward_dtype(model), model.device)


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


def build_sampler(config: RunConfig, policy: Policy | EngineModel) -> Sampler:
    """Return the engine that `sampling.engine` names; of a model it has no weights until `load`.

    Raise ConfigError if the engine is not installed, UserError if it cannot start with this model and these settings.
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


@dataclass(eq=False)
class TransformersSampler(Sampler):
    """Prefills each prompt once, repeats its cache n times, and removes ended completions from the batch.

    At most `max_sequences` completions are sampled at the same time, but at least those of one prompt.
    """

    model: PreTrainedModel
    pad_id: int
    max_sequences: int = 2048
    stops: StopStrings | None = None
    version: int = 0
    shares_weights = True

    def sync(self, model: PreTrainedModel, version: int) -> None:
        """Store the version; the weights are shared with the trainer and need no copy."""
        self.model, self.version = model, version

    @torch.no_grad()
    def load(self, weights: Weights, version: int) -> None:
        """Copy each weight into the parameter of its name; raise StaleEngineError unless all are those of the model."""
        missing, of_version = dict(self.model.named_parameters()), f"version {version} of the weights"
        for name, tensor in weights:
            parameter = missing.pop(name, None)
            if parameter is None or (parameter.shape, parameter.dtype) != (tensor.shape, tensor.dtype):
                raise StaleEngineError(
                    f"the engine process cannot load {of_version}: its model has no parameter {name} of shape "
                    f"{[*tensor.shape]} and dtype {tensor.dtype}"
                )
            parameter.copy_(tensor)
        for name in missing:
            raise StaleEngineError(
                f"the engine process received {of_version} only in part: {name} is missing ({len(missing)} in total)"
            )
        self.version = version

    def describe(self) -> dict[str, str]:
        """Return the engine's name."""
        return {"engine": "transformers"}

    def sample_stream(self, requests: Requests, params: SamplingParams, in_order: bool = True) -> Stream:
        """Sample one request after the other, at most `max_sequences` completions at a time; see `Sampler`."""
        for number, request in enumerate(filter(None, requests)):
            samples, turns_P = request.turns(params)
            batch_size = max(1, self.max_sequences // samples)
            groups: list[list[Completion]] = []
            with unsharded(self.model), layers_for_sampling(self.model), torch.inference_mode():
                for start in range(0, len(turns_P), batch_size):
                    part = slice(start, start + batch_size)
                    groups += self._sample_batch(request.prompts_P[part], params, samples, turns_P[part])
            yield number, groups

    def _sample_batch(
        self, prompts_P: Sequence[TokenIds], params: SamplingParams, n: int, turns_P: Sequence[Turn]
    ) -> list[list[Completion]]:
        """Prefill the prompts together, then sample one token of every unfinished completion per step."""
        device, max_tokens = self.model.device, max(turn.max_tokens for turn in turns_P)
        limits = torch.tensor([turn.max_tokens for turn in turns_P], device=device).repeat_interleave(n)
        rows = [torch.tensor(prompt) for prompt in prompts_P]
        ids = pad_sequence(rows, batch_first=True, padding_value=self.pad_id, padding_side="left").to(device)
        lengths = torch.tensor([len(prompt) for prompt in prompts_P], device=device)
        attended = (torch.arange(ids.shape[1], device=device) >= ids.shape[1] - lengths[:, None]).long()
        cache = growing_cache(self.model, ids.shape[1] + max_tokens)
        logits = self._forward(ids, attended, (attended.cumsum(dim=1) - 1).clamp(min=0), cache)
        cache.batch_repeat_interleave(n)
        logits, attended = logits.repeat_interleave(n, dim=0), attended.repeat_interleave(n, dim=0)
        positions = lengths.repeat_interleave(n)

        total = len(prompts_P) * n
        tokens = torch.full((total, max_tokens), self.pad_id, device=device)
        logprobs = torch.zeros(total, max_tokens, device=device)
        entropies = torch.zeros_like(logprobs) if params.entropy else None
        counts = limits.clone()
        stopped = torch.zeros(total, dtype=torch.bool, device=device)
        stop_ids = torch.tensor(params.stop_ids, device=device)
        active = torch.arange(total, device=device)
        running = torch.ones_like(stopped)
        random = random_numbers([turn.seed for turn in turns_P], n, max_tokens)
        for step, uniforms in enumerate(random):
            uniforms_B = uniforms.to(device)[active]
            sampled, sampled_logprobs, all_logprobs = sample_tokens(logits, uniforms_B, params.temperature)
            tokens[active, step], logprobs[active, step] = sampled, sampled_logprobs
            if entropies is not None:
                if params.temperature not in (0.0, 1.0):
                    all_logprobs = torch.log_softmax(logits, dim=-1)
                entropies[active, step] = torch.linalg.vecdot(all_logprobs.exp(), all_logprobs).neg_()
            ends = torch.isin(sampled, stop_ids) & running
            if self.stops is not None and params.stops:
                tails = tokens[active, max(0, step + 1 - self.stops.tail) : step + 1].tolist()
                matched = [self.stops.end(tail, len(tail) - 1) is not None for tail in tails]
                ends |= torch.tensor(matched, device=device) & running
            counts[active] = counts[active].masked_fill(ends, step + 1)
            stopped[active] |= ends
            running &= ~ends & (limits[active] > step + 1)
            left = int(running.sum())
            if not left:
                break
            # A removal copies the cache. Ended completions stay until they are a part of the batch that is worth it;
            # their further tokens are beyond their counts.
            if left <= KEPT_UNTIL * len(active):
                continuing = running.nonzero().squeeze(1)
                cache.batch_select_indices(continuing)
                active, sampled, attended = active[continuing], sampled[continuing], attended[continuing]
                running = running[continuing]
            attended = torch.cat([attended, attended.new_ones(len(active), 1)], dim=1)
            logits = self._forward(sampled[:, None], attended, (positions[active] + step)[:, None], cache)
        columns = [tokens.int(), logprobs, tokens[:, :0] if entropies is None else entropies]
        kinds, flat = (TOKEN_TYPE, FLOAT_TYPE, FLOAT_TYPE), []
        values = zip(*(column.cpu().numpy() for column in columns), strict=True)
        for rows_of_one, count, stop in zip(values, counts.tolist(), stopped.tolist(), strict=True):
            pairs = zip(kinds, rows_of_one, strict=True)
            of_tokens, of_logprobs, of_entropies = (array(kind, row[:count].tobytes()) for kind, row in pairs)
            reason: FinishReason = "stop" if stop else "length"
            flat.append(Completion(of_tokens, of_logprobs, reason, self.version, of_entropies))
        return [flat[i : i + n] for i in range(0, total, n)]

    def _forward(self, ids: Tensor, attended: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Run the model on new tokens and return the logits after the last one, float32 [B, V]."""
        progress()
        output = self.model(
            input_ids=ids, attention_mask=attended, position_ids=positions, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        return torch.as_tensor(output.logits[:, -1].float())


def build_transformers_sampler(config: SamplingConfig, policy: Policy) -> Sampler:
    """Return the sampler that runs the trainer's own model."""
    stops = StopStrings(policy.tokenizer, config.stop) if config.stop else None
    return TransformersSampler(policy.model, policy.pad_id, config.max_sequences, stops)


def random_numbers(seeds_P: Sequence[int], samples: int, max_tokens: int) -> Iterator[Tensor]:
    """Yield the random numbers of the next token of n completions of each of P prompts, [P·n] float64 in [0, 1).

    Those of a prompt depend on its seed alone, and every completion has one per token, also after its end: a
    completion depends neither on the other prompts of a batch nor on when other completions end.
    """
    generators = [np.random.Generator(np.random.Philox(key=seed)) for seed in seeds_P]
    for start in range(0, max_tokens, DRAWN_STEPS):
        shape = min(DRAWN_STEPS, max_tokens - start), samples
        drawn = np.stack([generator.random(shape) for generator in generators], axis=1)
        yield from torch.from_numpy(drawn).flatten(1)


def sample_tokens(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution.

    Args:
        logits: [B, V] float32; divided by `temperature`. At 0 the most likely token is chosen, with its log-prob at 1.
        uniforms: [B] float64 random numbers in [0, 1), one per row.

    Returns:
        (tokens [B] int64, their log-probs [B] float32 at this temperature, in nats, and those of all tokens [B, V]).
    """
    if temperature == 0:
        logprobs = torch.log_softmax(logits, dim=-1)
        best = logprobs.max(dim=-1)
        return best.indices, best.values, logprobs
    logprobs = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
    cumulative = logprobs.double().exp_().cumsum_(dim=-1)
    # Scaled by the last entry instead of 1, so that rounding leaves no point beyond the end. `right=True` skips tokens
    # of probability 0.
    points = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, points, right=True).clamp(max=logits.shape[-1] - 1)
    return tokens.squeeze(1), logprobs.gather(-1, tokens).squeeze(1), logprobs
