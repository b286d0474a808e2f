"""Tokens per second of conversations whose tool takes half a second, in proportion to a tool that takes no time.

    python benchmarks/conversations.py --model FOLDER                     # the vLLM engine
    python benchmarks/conversations.py --model FOLDER --engine transformers

Every message of the model counts as a call of the tool, so that a model need not know any. The two cases alternate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import Any
from unittest import mock

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import with_dtype
from bandpo_cli.grading.tools import ToolPool
from bandpo_cli.models.load import load_policy
from bandpo_cli.processes.ranks import is_gpu
from bandpo_cli.sampling import conversations, rollouts
from bandpo_cli.sampling.prompt_encoding import PromptEncoder
from bandpo_cli.sampling.sampler import Sampler, SampleRequest, SamplingParams, Turn, build_sampler
from bandpo_cli.types import Completion, Message, Problem

PROMPT_TOKENS, INSERTED_TOKENS = 128, 40
"""More than the prompts have, and more than is inserted between two turns."""


class EndingSampler(Sampler):
    """An engine whose turns end after `tokens` tokens, as if the model had sampled an end token."""

    def __init__(self, engine: Sampler, tokens: int) -> None:
        self._engine, self._tokens, self.streams = engine, tokens, engine.streams

    def sample_stream(
        self, requests: Iterable[SampleRequest | None], params: SamplingParams, in_order: bool = True
    ) -> Generator[tuple[int, list[list[Completion]]], None, None]:
        shorter = (None if request is None else self._shorter(request) for request in requests)
        for number, groups in self._engine.sample_stream(shorter, params, in_order):
            yield number, [[replace(item, finish_reason="stop") for item in group] for group in groups]

    def _shorter(self, request: SampleRequest) -> SampleRequest:
        turns = [Turn(turn.seed, min(turn.max_tokens, self._tokens)) for turn in request.turns_P or ()]
        return request._replace(turns_P=turns)

    def sync(self, model: Any, version: int) -> None:
        self._engine.sync(model, version)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tokens per second of both cases, and their ratio."""
    parser = argparse.ArgumentParser(description="Throughput of conversations with a slow tool.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--tool", choices=("wait", "blocking_wait"), default="wait")
    parser.add_argument("--workers", type=int, default=2, help="grading.workers")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="tokens per turn")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args(arguments)
    limit = options.turns * (options.tokens + INSERTED_TOKENS)
    # Without compilation, which takes minutes on a CPU; both cases run the same kernels.
    sampling: dict[str, Any] = {
        "engine": options.engine, "max_tokens": limit, "max_prompt_tokens": PROMPT_TOKENS, "vllm": {"eager": True}
    }  # fmt: skip
    task = {"name": "data", "train": "none.jsonl"}
    config = resolve([{"model": {"path": options.model}, "task": task, "sampling": sampling}])
    config = with_dtype(config, is_gpu(config.model.device))
    policy = load_policy(config.model, for_training=False)
    encoder = PromptEncoder(policy.tokenizer)
    problems = [
        Problem(f"{number}", (Message("user", f"Tell me about the number {number}."),), "", "", "")
        for number in range(options.conversations)
    ]
    prompts = [prompt.token_ids for prompt in encoder.encode(problems)]
    params = SamplingParams(1, 1.0, limit, ())
    tools = (f"benchmarks.waiting:{options.tool}",)

    def speed(sampler: Sampler, seconds: float, seed: int) -> float:
        call = {"type": "function", "function": {"name": options.tool, "arguments": {"seconds": seconds}}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        grading = GradingConfig(workers=options.workers, concurrency=options.conversations)
        with (
            closing(ToolPool(tools, grading)) as pool,
            mock.patch.object(conversations, "read_message", return_value=message),
        ):
            pool.start()
            talk = conversations.Conversations(encoder, pool, options.turns, 100)
            begin = time.perf_counter()
            requests = [(problems, SampleRequest(prompts, seed))]
            (groups,) = rollouts.stream_completions(sampler, requests, params, 0, talk)
            elapsed = time.perf_counter() - begin
        assert all(completion.conversation.turns == options.turns for (completion,) in groups)
        return sum(len(completion.token_ids) for (completion,) in groups) / elapsed

    with closing(build_sampler(config, policy)) as engine:
        sampler = EndingSampler(engine, options.tokens)
        speed(sampler, 0.0, 0)  # warm-up
        rounds = range(1, options.repeats + 1)
        pairs = [(speed(sampler, 0.0, seed), speed(sampler, options.seconds, seed)) for seed in rounds]
    without, slow = (median(column) for column in zip(*pairs, strict=True))
    print(
        f"{without:,.0f} tokens/s without, {slow:,.0f} with {options.seconds:g} s per call: {slow / without:.0%}"
    )


if __name__ == "__main__":
    main()
