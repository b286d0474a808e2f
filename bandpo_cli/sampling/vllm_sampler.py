"""Sampling with vLLM: a separate engine in the trainer's process that loads the policy's weights after every update.

The engine starts with random weights and the policy's config, so it only ever runs weights that a sync loaded. A sync
ends with a check that the engine runs them. With several ranks, each of them has an engine with all weights.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel

from bandpo_cli.config.batch_and_sampling import SamplingConfig
from bandpo_cli.errors import RunError, UserError, find_out_of_memory, log, warn_on_failure
from bandpo_cli.models.load import Policy, release_cached_memory
from bandpo_cli.models.weights import checkpoint_weights
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.processes.watch import progress
from bandpo_cli.sampling.sampler import (
    EngineModel,
    Requests,
    Sampler,
    SampleRequest,
    SamplingParams,
    StaleEngineError,
    Stream,
    Turn,
    error_text,
)
from bandpo_cli.sampling.sync_check import SyncCheck
from bandpo_cli.sampling.tool_calls import StopStrings
from bandpo_cli.sampling.vllm_worker import (
    ComparedWeights,
    Weights,
    as_numbers,
    engine_threads,
    prepare_environment,
    preserve_process_group,
    preserve_process_state,
    stderr_on_failure,
)
from bandpo_cli.types import Completion

if TYPE_CHECKING:
    import vllm


GIB = 2**30
V1_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
V1_WARNING = (
    "vLLM runs its older model runner (V1), which draws the random numbers of every completion separately at each "
    "token; for the newer one, unset VLLM_USE_V2_MODEL_RUNNER and check that triton is installed"
)
UNESTIMATED_FRACTION = 0.5
"""vLLM's share of a GPU where `sampling.vllm.memory_fraction` is null and the memory of the model is not estimated."""
CPU_CACHE_BLOCK = 32
"""Tokens per block of the key-value cache on a CPU (vLLM's default is 128): prompts share only complete blocks."""
VLLM_LARGEST_GRAPH = 512
"""Sequences up to which vLLM 0.32 captures CUDA graphs by default; larger batches run without a graph."""
MAX_QUEUED = 8192
"""Completions in the engine's queue beyond which no request is added: more than an engine decodes at a time."""


class VllmSampler(Sampler):
    """`vllm.LLM` in this process; see `Sampler` for the contract of each method.

    Attributes:
        check: the comparison of log-probs with the policy's model after a sync.
    """

    streams = True

    def __init__(self, config: SamplingConfig, policy: Policy | EngineModel) -> None:
        """Start the engine and load the policy's weights into it as version 0; all ranks of the policy do so together.

        Without the policy it has no weights until `load`. Raise UserError if vLLM cannot be imported, or it refuses the
        model or the settings. Raise StaleEngineError if the first sync failed.
        """
        own = None if isinstance(policy, EngineModel) else policy
        ranks = SINGLE if own is None else own.ranks
        self._settings, self._version, self._asleep, self._has_woken = config.vllm, 0, False, False
        self._sleeps = config.vllm.sleep and policy.device.type == "cuda"
        # The group of the ranks stays; one that the engine creates ends with it.
        self._preserve_group = preserve_process_group if dist.is_initialized() else nullcontext
        self.check = SyncCheck(own, config.max_prompt_tokens + config.max_tokens)
        model = policy if isinstance(policy, EngineModel) else EngineModel.of(policy.model)
        self._llm, self._threads = _start(config, model, ranks, self._sleeps)
        self._stops = StopStrings(policy.tokenizer, config.stop) if config.stop else None
        self._max_model_len: int = self._llm.model_config.max_model_len
        self._converted: set[str] | None = None
        if own is None:
            return
        try:
            self.sync(own.model, version=0)
        except BaseException as error:
            with warn_on_failure("the vLLM engine could not be closed"):
                self.close()
            if not isinstance(error, RunError) or isinstance(error, StaleEngineError):
                raise
            raise UserError(f"sampling.engine = 'vllm': vLLM cannot run this model here: {error}") from error
        if policy.device.type == "cuda" and self._model_runner() == V1_RUNNER:
            log.warning("%s", V1_WARNING)

    def sample_stream(self, requests: Requests, params: SamplingParams, in_order: bool = True) -> Stream:
        """Yield number and completions [P][n] of each request; see `Sampler`."""
        assert not self._asleep, "sync wakes the engine before it samples"
        more, numbers, no_more = iter(requests), count(), SampleRequest([], -1)
        waiting: dict[int, list[str]] = {}  # the ids of the prompts of each request, by its number
        sizes: dict[int, int] = {}  # the number of completions of each of these requests
        outputs: dict[str, Any] = {}
        try:
            while True:
                request: SampleRequest | None = None
                while sum(sizes.values()) < MAX_QUEUED:
                    if (request := next(more, no_more)) is None or request is no_more:
                        break
                    waiting[number := next(numbers)] = self._enqueue(request, params)
                    sizes[number] = len(request.prompts_P) * request.turns(params)[0]
                if request is no_more and not waiting:
                    return
                if any(item not in outputs for ids in waiting.values() for item in ids):
                    with self._engine_call():
                        stepped = self._llm.llm_engine.step()
                    progress()
                    finished = {output.request_id: output for output in stepped if output.finished}
                    if not finished:  # most steps; a search in thousands of conversations takes a millisecond
                        continue
                    outputs |= finished
                for number, ids in [*waiting.items()]:
                    if all(item in outputs for item in ids):
                        ended, _ = [outputs.pop(item) for item in waiting.pop(number)], sizes.pop(number)
                        groups = [[_completion(one, self._version) for one in item.outputs] for item in ended]
                        if groups:
                            self.check.observe(ended[0].prompt_token_ids, groups[0][0])
                        yield number, groups
                    elif in_order:
                        break
        finally:
            if unfinished := [item for ids in waiting.values() for item in ids if item not in outputs]:
                with self._engine_call():
                    self._llm.llm_engine.abort_request(unfinished)

    def _enqueue(self, request: SampleRequest, params: SamplingParams) -> list[str]:
        """Add the prompts of a request to the engine's queue and return their ids; UserError for unsupported ones."""
        samples, turns_P = request.turns(params)
        for prompt, turn in zip(request.prompts_P, turns_P, strict=True):
            if len(prompt) + turn.max_tokens > self._max_model_len:
                raise UserError(
                    f"a prompt of {len(prompt)} tokens and sampling.max_tokens = {turn.max_tokens} exceed the "
                    f"engine's limit of {self._max_model_len} tokens (sampling.max_prompt_tokens + sampling.max_tokens)"
                )
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in request.prompts_P]
        of_prompts = [_vllm_params(params, samples, turn) for turn in turns_P]
        with self._engine_call():
            ids = self._llm.enqueue(prompts, of_prompts, use_tqdm=False)
        # vLLM's ids are `<number>-<random>`, and its outputs have the number alone.
        numbers = [item.partition("-")[0] for item in ids]
        if self._stops is not None and params.stops:
            states = self._llm.llm_engine.output_processor
            for completion in chain.from_iterable(states.external_req_ids[number] for number in numbers):
                _end_at_strings(states.request_states[completion].detokenizer, self._stops)
        return numbers

    @contextmanager
    def _engine_call(self) -> Iterator[None]:
        """Set the engine's number of threads, and raise RunError where vLLM fails."""
        with _one_line_errors(RunError, "vLLM failed while sampling"), engine_threads(self._threads):
            yield

    def sleep(self) -> int:
        """Free the GPU memory of weights and cache; the weights are not saved, since the next sync loads new ones."""
        if not self._sleeps or self._asleep:
            return 0
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        self._llm.sleep(level=2)
        self._asleep = True
        if self._settings.tensor_parallel > 1:  # PyTorch of this process does not count that of the workers
            return 0
        # vLLM returns cached memory too, which PyTorch no longer counts.
        return torch.cuda.mem_get_info()[0] - free - (reserved - torch.cuda.memory_reserved())

    def sync(self, model: PreTrainedModel, version: int) -> None:
        """Load the weights and check that the engine runs them, see `load`; all ranks must call this together."""
        self.load(checkpoint_weights(model), version, model)

    def load(self, weights: Weights, version: int, model: PreTrainedModel | None = None) -> None:
        """Load the weights, clear the cache of the old ones, and check them; see `Sampler`.

        The check is complete where `SyncCheck.scheduled` says so, and after the first sleep: it compares tensors, and
        with the policy's model also log-probs. Every sync checks that all weights were loaded, and the version.
        """
        with self.check.scheduled(always=self._asleep and not self._has_woken) as is_complete:
            self._has_woken |= self._asleep
            compared = ComparedWeights(weights, self._settings.tensor_parallel)
            self._transfer(compared if is_complete else weights, version)
            self._compare_tensors(compared, version)
            self._version = version
            if is_complete and model is not None:
                self.check.check(model, version, self)

    def _transfer(self, weights: Weights, version: int) -> None:
        """Send the weights to all workers, and clear the cache of the old ones."""
        in_process = self._settings.tensor_parallel == 1
        with _one_line_errors(StaleEngineError, f"vLLM could not load version {version} of the weights"):
            self._wake_if_asleep(["weights"])
            # The worker in this process takes one tensor at a time; other processes get all of them from CPU memory.
            sent = iter(weights) if in_process else [(name, tensor.cpu()) for name, tensor in weights]
            skipped = self._llm.collective_rpc("policy_load", args=(sent, version))
            self._wake_if_asleep(["kv_cache"])
            self._asleep = False
            cache_cleared = self._llm.reset_prefix_cache()
        for lines in filter(None, skipped):
            raise StaleEngineError(
                f"vLLM loaded version {version} of the weights only in part: {lines[0]} ({len(lines)} in total)"
            )
        if not cache_cleared:
            raise StaleEngineError(f"vLLM kept cached prompts of the weights before version {version}")

    def describe(self) -> dict[str, str]:
        """Return the engine's name, vLLM's version, and which of its classes runs the model (0.32 has two for GPUs)."""
        import vllm

        return {"engine": "vllm", "version": str(vllm.__version__), "model_runner": self._model_runner()}

    def close(self) -> None:
        """Shut the engine down; afterwards this process can start another one."""
        if not hasattr(self, "_llm"):
            return
        try:
            with self._preserve_group():
                self._llm.llm_engine.engine_core.shutdown()
        finally:
            del self._llm
            gc.collect()
            release_cached_memory()

    def _model_runner(self) -> str:
        """Return module and name of the class that runs the model."""
        return str(self._llm.collective_rpc("policy_runner", args=())[0])

    def _wake_if_asleep(self, tags: list[str]) -> None:
        """Allocate the memory of `tags`: weights before the load and the cache after it, to lower the peak."""
        if self._asleep:
            release_cached_memory()
            self._llm.wake_up(tags=tags)

    def _compare_tensors(self, weights: ComparedWeights, version: int) -> None:
        """Compare the version of the last load, and bit by bit the tensors that the engine stores unchanged.

        A matrix that differs at the first sync is one that vLLM stores in another form on this device: later checks
        leave it out. The log-probs of the first sync show whether it was loaded, as the engine starts with random
        weights.
        """
        differing, expected = set(), as_numbers(weights.fingerprints)
        for loaded_version, fingerprints in self._llm.collective_rpc("policy_state", args=(weights.shapes,)):
            if loaded_version != version:
                raise StaleEngineError(f"vLLM runs version {loaded_version} of the weights, not {version}")
            differing |= {name for name in fingerprints if fingerprints[name] != expected[name]}
        if self._converted is None:
            matrices = {name for name, shape in weights.shapes.items() if len(shape) == 2}
            self._converted = {name for name in differing & matrices if "embed" not in name}
        for name in sorted(differing - self._converted):
            raise StaleEngineError(f"vLLM does not run version {version} of the weights: {name} differs")


def _end_at_strings(detokenizer: Any, stops: StopStrings) -> None:
    """End a completion at a stop string: vLLM ends it where `update` returns one, and drops the later tokens.

    vLLM's own stop strings need a tokenizer in the engine, and its text is without special tokens.
    """
    token_ids = detokenizer.token_ids

    def update(new_token_ids: Sequence[int], stop_terminated: bool) -> str | None:
        checked = len(token_ids)
        token_ids.extend(new_token_ids)
        if (end := stops.end(token_ids, checked)) is None:
            return None
        del token_ids[end:]
        return "stop string"

    detokenizer.update = update


def _completion(output: Any, version: int) -> Completion:
    if output.finish_reason not in ("stop", "length"):
        raise RunError(f"vLLM ended a completion with {output.finish_reason!r}")
    return Completion(output.token_ids, output.logprobs.logprobs, output.finish_reason, version)


@contextmanager
def _one_line_errors(kind: type[RunError], failure: str) -> Iterator[None]:
    """Raise `kind` with the first line of an error of vLLM; an out-of-memory error is raised unchanged."""
    try:
        yield
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        if find_out_of_memory(error):
            raise
        raise kind(f"{failure}: {error_text(error)}") from error


def _start(config: SamplingConfig, model: EngineModel, ranks: Ranks, sleeps: bool) -> tuple[vllm.LLM, int]:
    """Start the engine; return it with the number of torch threads under which it was compiled."""
    prepare_environment()
    try:
        with preserve_process_state(), preserve_process_group(), stderr_on_failure():
            import vllm

            # Without a local name: vLLM keeps an error of its imports, and the error keeps the locals of this frame.
            return vllm.LLM(**_engine_settings(config, model, sleeps, ranks)), torch.get_num_threads()
    except ImportError as error:
        raise UserError(f"sampling.engine = 'vllm': vLLM cannot be imported: {error_text(error)}") from error
    except (ValueError, RuntimeError, OSError, AssertionError) as error:
        if find_out_of_memory(error):
            raise
        text, fraction = error_text(error), config.vllm.memory_fraction or UNESTIMATED_FRACTION
        if "memory" in text.lower():  # the names that vLLM uses in its errors about memory
            share = f"gpu_memory_utilization is sampling.vllm.memory_fraction = {fraction:g}"
            text += f" ({share}, max_model_len is sampling.max_prompt_tokens + sampling.max_tokens)"
        raise UserError(f"sampling.engine = 'vllm': the engine did not start: {text}") from error


def _engine_settings(
    config: SamplingConfig, model: EngineModel, sleeps: bool, ranks: Ranks = SINGLE
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`; with several ranks each rank has an engine of its own."""
    settings = config.vllm
    max_model_len = config.max_prompt_tokens + config.max_tokens
    arguments = {
        "model": str(_config_folder(model.config)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the model's could set top-p, top-k or a repetition penalty
        "logprobs_mode": "processed_logprobs",  # of the logits divided by the temperature
        "dtype": str(model.dtype).removeprefix("torch."),
        "seed": 0,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_sequences,
        "max_num_batched_tokens": max(8192, max_model_len, config.max_sequences),
        "enable_prefix_caching": settings.prefix_caching,
        "tensor_parallel_size": settings.tensor_parallel,
        "enforce_eager": settings.eager,
        "cudagraph_capture_sizes": _graph_sizes(config),
        "enable_sleep_mode": sleeps,
        "worker_extension_cls": "bandpo_cli.sampling.vllm_worker.PolicyWorker",
    }
    if settings.float32_head:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if ranks.size > 1:
        # With another executor, vLLM would take all processes of the process group for workers of one engine. With this
        # one each group of `tensor_parallel` ranks is an engine, on the GPU of the environment variable LOCAL_RANK.
        arguments["distributed_executor_backend"] = "external_launcher"
    if model.device.type == "cuda":
        return arguments | {"gpu_memory_utilization": settings.memory_fraction or UNESTIMATED_FRACTION}
    return arguments | {
        "kv_cache_memory_bytes": int(settings.kv_cache_gb * GIB),
        "block_size": CPU_CACHE_BLOCK,
        # With one seed per request, vLLM 0.32 fails on a CPU ("CPU Generator does not use offset") if a scheduler step
        # ends in the middle of a prompt.
        "enable_chunked_prefill": False,
    }


def _graph_sizes(config: SamplingConfig) -> list[int] | None:
    """Return the batch sizes of CUDA graphs, to which vLLM pads smaller batches; None for its own, up to 512."""
    if config.vllm.eager or config.max_sequences <= VLLM_LARGEST_GRAPH:
        return None
    larger = range(VLLM_LARGEST_GRAPH, config.max_sequences, 64)
    return [1, 2, 4, *range(8, 256, 8), *range(256, VLLM_LARGEST_GRAPH, 16), *larger, config.max_sequences]


def _config_folder(config: PreTrainedConfig) -> Path:
    """Write the policy's config for vLLM; return its folder, which is the same for equal configs (compile caches)."""
    digest = hashlib.blake2b(config.to_json_string().encode(), digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"bandpo-vllm-{os.getuid()}" / digest
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as staging:  # concurrent runs never read an incomplete file
        config.save_pretrained(staging)
        os.replace(Path(staging) / "config.json", folder / "config.json")
    return folder


def _vllm_params(params: SamplingParams, samples: int, turn: Turn) -> vllm.SamplingParams:
    """Return vLLM's parameters of one prompt."""
    import vllm

    return vllm.SamplingParams(
        n=samples,
        temperature=params.temperature,
        max_tokens=turn.max_tokens,
        stop_token_ids=list(params.stop_ids),
        ignore_eos=True,  # only the tokens in stop_ids end a completion
        # vLLM samples completion k of a request with the request's seed + k, so the seeds must be far apart.
        seed=random.Random(turn.seed).getrandbits(62),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )
