"""Sampling with vLLM: an engine of its own beside the trainer, given the policy's weights after every update.

The engine starts with random weights and the policy's own config, so it can only ever run what a sync gave it; and
every sync ends with a check that it does.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from bandpo_cli.config.run import SamplingConfig
from bandpo_cli.errors import RunError, UserError
from bandpo_cli.models.load import Policy
from bandpo_cli.sampling.base import SamplingParams, StaleEngineError, TokenIds
from bandpo_cli.sampling.vllm_worker import (
    Weights,
    compared_shapes,
    engine_threads,
    fingerprint,
    policy_weights,
    prepare_environment,
    preserve_process_state,
    stderr_on_failure,
)
from bandpo_cli.types import Completion, FinishReason

if TYPE_CHECKING:
    import vllm

GIB = 2**30
TEMPERATURES = (0.01, 2.0)
"""vLLM samples within these or at 0: below it would quietly take 0.01, above it refuses."""
CPU_BLOCK = 32
"""Tokens in a block of the key-value cache on a CPU (vLLM's own is 128 there): whole blocks are what prompts share."""
PROBE_TOLERANCE = {
    ("cpu", torch.float32): 1e-3,
    # Some of vLLM's attention kernels multiply float32 in TF32, whose mantissa has 10 bits.
    ("cuda", torch.float32): 2e-2,
}
"""Mean gap in nats at which the probe after a sync fails, where all else agrees; see `HALF_PRECISION_TOLERANCE`."""
HALF_PRECISION_TOLERANCE = 0.25
"""The same for 16-bit weights, whose kernels round each on their own."""


class VllmSampler:
    """`vllm.LLM` in this process; see `Sampler` for what each method promises.

    Attributes:
        probe_gap: mean difference in nats between the engine's and the trainer's log-probs of a fixed sequence, as
            the last sync measured it.
    """

    shares_weights = False

    def __init__(self, config: SamplingConfig, policy: Policy) -> None:
        """Start the engine and give it the policy's weights as version 0.

        Raises:
            UserError: vLLM cannot be imported, or refuses the model or the settings.
            StaleEngineError: the first sync was no success.
        """
        self._settings = config.vllm
        self._sleeps = config.vllm.sleep and policy.device.type == "cuda"
        self._asleep = False
        self._llm, self._threads = _start(config, policy.model, self._sleeps)
        self._longest: int = self._llm.model_config.max_model_len
        self._version = 0
        self.probe_gap = float("nan")
        try:
            self.sync(policy.model, version=0)
        except StaleEngineError:
            self.close()
            raise
        except RunError as error:
            self.close()
            raise UserError(f"sampling.engine = 'vllm': it cannot run this model here: {error}") from error

    def sample(
        self, prompts_P: Sequence[TokenIds], params: SamplingParams, seed: int
    ) -> list[list[Completion]]:
        """Return [P][n] completions; see `Sampler`.

        Raises:
            UserError: a prompt leaves no room for `max_tokens`, or the temperature is none that vLLM samples at.
        """
        assert not self._asleep, "sync wakes the engine before it samples"
        self._check(prompts_P, params)
        # Completion i of a request is drawn with the request's seed + i, so requests are n apart.
        first = random.Random(seed).getrandbits(62)
        seeds = [first + index * params.samples for index in range(len(prompts_P))]
        outputs = self._generate(prompts_P, [_request(params, seed) for seed in seeds])
        return [[self._completion(output) for output in request.outputs] for request in outputs]

    def sleep(self) -> None:
        """Give the GPU memory of weights and cache back: the next sync brings weights anyway, so none are kept."""
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = True

    def sync(self, model: PreTrainedModel, version: int) -> None:
        """Load the weights, drop what was computed with the old ones, and check that the engine runs the new.

        Raises:
            StaleEngineError: it does not, or vLLM failed to load them.
        """
        weights = policy_weights(model)
        try:
            self._wake(["weights"])
            left_out = self._llm.collective_rpc("policy_load", args=(self._portable(weights), version))
            self._wake(["kv_cache"])
            self._asleep = False
            fresh = self._llm.reset_prefix_cache()
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise StaleEngineError(
                f"vLLM could not load version {version} of the weights: {_line(error)}"
            ) from error
        for lines in left_out:
            if lines:
                raise StaleEngineError(
                    f"vLLM took version {version} of the weights in part: {lines[0]} ({len(lines)} such)"
                )
        if not fresh:
            raise StaleEngineError(f"vLLM kept cached prompts of the weights before version {version}")
        self._compare_tensors(weights, version)
        self._compare_logprobs(model, version)
        self._version = version

    def close(self) -> None:
        """End the engine; another may be started in this process after it."""
        if hasattr(self, "_llm"):
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _check(self, prompts_P: Sequence[TokenIds], params: SamplingParams) -> None:
        longest = max((len(prompt) for prompt in prompts_P), default=0)
        if longest + params.max_tokens > self._longest:
            raise UserError(
                f"a prompt of {longest} tokens and sampling.max_tokens = {params.max_tokens} exceed the "
                f"{self._longest} tokens of sampling.max_prompt_tokens + sampling.max_tokens, which the engine holds"
            )
        low, high = TEMPERATURES
        if params.temperature and not low <= params.temperature <= high:
            raise UserError(
                f"temperature = {params.temperature:g}: vLLM samples at {low:g} to {high:g}, or at 0; "
                "choose one of those, or use --sampler transformers"
            )

    def _generate(self, prompts: Sequence[TokenIds], requests: list[vllm.SamplingParams]) -> list[Any]:
        try:
            with engine_threads(self._threads):
                outputs: list[Any] = self._llm.generate(
                    [{"prompt_token_ids": list(prompt)} for prompt in prompts], requests, use_tqdm=False
                )
        except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
            raise RunError(f"vLLM failed while sampling: {_line(error)}") from error
        return outputs

    def _completion(self, output: Any) -> Completion:
        reason: FinishReason = output.finish_reason
        if reason not in ("stop", "length"):
            raise RunError(f"vLLM ended a completion with {reason!r}")
        return Completion(tuple(output.token_ids), tuple(output.logprobs.logprobs), reason, self._version)

    def _wake(self, tags: list[str]) -> None:
        """Weights are woken before they are loaded and the cache after: they need not both fit beside old copies."""
        if self._asleep:
            self._llm.wake_up(tags=tags)

    def _portable(self, weights: Weights) -> Weights:
        """Weights for workers in other processes go through the CPU's memory."""
        if self._settings.tensor_parallel == 1:
            return weights
        return [(name, tensor.cpu()) for name, tensor in weights]

    def _compare_tensors(self, weights: Weights, version: int) -> None:
        """Compare the stamp, and bit by bit the tensors that the engine holds as they came."""
        shapes = compared_shapes(weights, self._settings.tensor_parallel)
        ours = {name: tensor for name, tensor in weights if name in shapes}
        for stamped, found in self._llm.collective_rpc("policy_state", args=(shapes,)):
            if stamped != version:
                raise StaleEngineError(f"vLLM runs version {stamped} of the weights, not {version}")
            for name, theirs in found.items():
                if theirs != fingerprint(ours[name], shapes[name]):
                    raise StaleEngineError(
                        f"vLLM does not run version {version} of the weights: {name} differs"
                    )

    def _compare_logprobs(self, model: PreTrainedModel, version: int) -> None:
        """Compare log-probs of a fixed sequence, which depend on every weight, fused and repacked ones too.

        It is asked for twice: once to be continued, which reads cached prompts, and once for its own log-probs.
        """
        length = min(self._longest - 1, 2 * CPU_BLOCK + 8)
        vocabulary = model.config.get_text_config().vocab_size
        ids = [(7919 * place + 3) % vocabulary for place in range(length)]
        continued, read = self._generate([ids, ids], [_probe(None), _probe(0)])
        token = continued.outputs[0].token_ids[0]
        theirs = torch.tensor([*read.prompt_logprobs.logprobs, continued.outputs[0].logprobs.logprobs[0]])
        ours = _sequence_logprobs(model, [*ids, token])
        gaps = (ours - theirs).abs()
        self.probe_gap = max(gaps[:-1].mean().item() if length > 1 else 0.0, gaps[-1].item())
        limit = PROBE_TOLERANCE.get((model.device.type, model.dtype), HALF_PRECISION_TOLERANCE)
        if not self.probe_gap <= limit:
            raise StaleEngineError(
                f"vLLM does not compute what version {version} of the weights does: log-probs of a fixed sequence are "
                f"{self.probe_gap:.3g} nats apart, at most {limit:g} is due to rounding"
            )


def _start(config: SamplingConfig, model: PreTrainedModel, sleeps: bool) -> tuple[vllm.LLM, int]:
    """Return the engine and the number of torch threads that it was compiled under."""
    prepare_environment()
    try:
        with preserve_process_state(), stderr_on_failure():
            import vllm

            llm = vllm.LLM(**_engine_settings(config, model, sleeps))
            return llm, torch.get_num_threads()
    except ImportError as error:
        raise UserError(f"sampling.engine = 'vllm': it cannot be imported: {_line(error)}") from error
    except (ValueError, RuntimeError, OSError, AssertionError) as error:
        raise UserError(f"sampling.engine = 'vllm': the engine did not start: {_line(error)}") from error


def _engine_settings(config: SamplingConfig, model: PreTrainedModel, sleeps: bool) -> dict[str, Any]:
    settings = config.vllm
    longest = config.max_prompt_tokens + config.max_tokens
    arguments = {
        "model": str(_config_folder(model)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the model's own could set top-p, top-k or a repetition penalty
        "logprobs_mode": "processed_logprobs",  # those of the divided logits
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": 0,
        "max_model_len": longest,
        "max_num_seqs": config.max_sequences,
        "max_num_batched_tokens": max(8192, longest, config.max_sequences),
        "enable_prefix_caching": settings.prefix_caching,
        "tensor_parallel_size": settings.tensor_parallel,
        "enforce_eager": settings.eager,
        "enable_sleep_mode": sleeps,
        "worker_extension_cls": "bandpo_cli.sampling.vllm_worker.PolicyWorker",
    }
    if model.device.type == "cuda":
        return arguments | {"gpu_memory_utilization": settings.memory_fraction}
    return arguments | {
        "kv_cache_memory_bytes": int(settings.kv_cache_gb * GIB),
        "block_size": CPU_BLOCK,
        # With a seed a request, vLLM 0.32 fails on a CPU ("CPU Generator does not use offset") when the step's tokens
        # end in the middle of a prompt.
        "enable_chunked_prefill": False,
    }


def _config_folder(model: PreTrainedModel) -> Path:
    """Write the policy's own config where vLLM reads it; the same config has the same path, as compile caches need."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    digest = hashlib.blake2b(config.to_json_string().encode(), digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"bandpo-vllm-{os.getuid()}" / digest
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as fresh:  # runs that start together never read half a file
        config.save_pretrained(fresh)
        os.replace(Path(fresh) / "config.json", folder / "config.json")
    return folder


def _request(params: SamplingParams, seed: int, prompt_logprobs: int | None = None) -> vllm.SamplingParams:
    from vllm import SamplingParams as Request

    return Request(
        n=params.samples,
        temperature=params.temperature,
        max_tokens=params.max_tokens,
        stop_token_ids=list(params.stop_ids),
        ignore_eos=True,  # what ends a completion is in stop_ids, and nothing else does
        seed=seed,
        logprobs=0,
        prompt_logprobs=prompt_logprobs,
        flat_logprobs=True,
        detokenize=False,
    )


def _probe(prompt_logprobs: int | None) -> vllm.SamplingParams:
    one_token = SamplingParams(samples=1, temperature=1.0, max_tokens=1, stop_ids=())
    return _request(one_token, 0, prompt_logprobs)


@torch.no_grad()
def _sequence_logprobs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Return the trainer's log-probs of ids[1:], float32 on the CPU."""
    tokens = torch.tensor([ids], device=model.device)
    logprobs = torch.log_softmax(model(input_ids=tokens).logits[0, :-1].float(), dim=-1)
    return logprobs.gather(-1, tokens[0, 1:, None]).squeeze(1).cpu()


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
