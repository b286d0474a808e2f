"""Measurements without limits: updates on new shapes, decoding steps, the shapes of prime-rl's published baselines."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch

from scripts.gpu_check.kernels import SMALL_CARD_BYTES
from scripts.gpu_check.results import Measured, Skipped
from scripts.gpu_check.work import Work

if TYPE_CHECKING:
    from bandpo_cli.config.run import RunConfig

ROUNDS = 5
"""Batches with new shapes that `check_first_shapes` trains on."""
SEQUENCES = (32, 128, 512, 1024)
TINY_SEQUENCES = (4, 8)
PROMPT_TOKENS = 16
"""Tokens of a prompt in the shapes of prime-rl's baselines; all others are trained."""


class Updates:
    """A policy and its optimizer that train on completions of any lengths, which nothing has sampled."""

    def __init__(self, config: RunConfig) -> None:
        from bandpo_cli.models.load import load_policy
        from bandpo_cli.training.optimizer import Optimizer

        self._config = config
        self.policy = load_policy(config.model)
        self._optimizer = Optimizer(self.policy.model, config.optim, total_updates=100)
        self._wait = torch.cuda.synchronize if self.policy.device.type == "cuda" else (lambda: None)

    def seconds(self, lengths_PG: Sequence[Sequence[int]], prompt_tokens: int) -> float:
        """Return the seconds of an update on groups of completions with these numbers of tokens."""
        from bandpo_cli.methods.loss import policy_loss
        from bandpo_cli.training.experience import prepare_updates
        from bandpo_cli.training.update import update_policy

        config = self._config
        groups = [_group(number, lengths, prompt_tokens) for number, lengths in enumerate(lengths_PG)]
        advantages_PG = torch.ones(len(groups), len(lengths_PG[0]))
        advantages_PG[:, ::2] = -1.0
        self._wait()
        begin = time.perf_counter()
        loss = policy_loss(config.bounds, config.objective)
        experiences = prepare_updates(self.policy, None, groups, advantages_PG, loss, config, False)
        update_policy(self.policy, self._optimizer, experiences, config)
        self._wait()
        seconds = time.perf_counter() - begin
        self._optimizer.zero_grad()
        return seconds


def _group(number: int, lengths: Sequence[int], prompt_tokens: int) -> Any:
    """Return a group of completions with these numbers of tokens."""
    from bandpo_cli.types import CORRECT, WRONG, Completion, Group, Problem, Rollout

    problem, prompt = Problem(f"p{number}", "", "1", "random", "none"), (5,) * prompt_tokens
    rollouts = []
    for index, length in enumerate(lengths):
        completion = Completion([6] * length, [-10.0] * length, "length", 0)
        rollouts.append(Rollout(problem, "", prompt, completion, "", (CORRECT, WRONG)[index % 2]))
    return Group(problem, tuple(rollouts))


def check_first_shapes(work: Work) -> Measured:
    """Time updates on lengths that were not seen before, and again on the same ones.

    Both without the attention of cuDNN, as in a run, and with it: it builds a plan for each new shape.
    """
    size, draw = work.size, random.Random(0)
    updates = Updates(work.config("0.5b", optim={"updates": 1}))

    def lengths_PG() -> list[list[int]]:
        lengths = range(size.max_tokens // 4, size.max_tokens + 1)
        return [draw.choices(lengths, k=size.samples) for _ in range(size.prompts)]

    measured = Measured()
    try:
        for name, with_cudnn in (("", False), ("_with_cudnn", True)):
            torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
            updates.seconds(lengths_PG(), size.prompt_chars)  # starts everything else
            new, known = [], []
            for _ in range(ROUNDS):
                shapes = lengths_PG()
                new.append(updates.seconds(shapes, size.prompt_chars))
                known.append(updates.seconds(shapes, size.prompt_chars))
            measured.values[f"new_shapes{name}_s"] = statistics.median(new)
            measured.values[f"known_shapes{name}_s"] = statistics.median(known)
            measured.values[f"new_over_known{name}"] = statistics.median(new) / statistics.median(known)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)
    return measured


def check_compiled(work: Work) -> Measured:
    """Time updates with and without `model.compile`, on lengths that both have seen, and the first one with it."""
    size, seconds = work.size, {}
    lengths_PG = [[size.max_tokens] * size.samples for _ in range(size.prompts)]
    measured = Measured()
    for name, compiled in (("plain", False), ("compiled", True)):
        updates = Updates(work.config("0.5b", model={"compile": compiled}, optim={"updates": 1}))
        measured.values[f"first_{name}_s"] = updates.seconds(lengths_PG, size.prompt_chars)
        seconds[name] = statistics.median(
            updates.seconds(lengths_PG, size.prompt_chars) for _ in range(ROUNDS)
        )
        measured.values[f"{name}_s"] = seconds[name]
    measured.values["compiled_over_plain"] = seconds["compiled"] / seconds["plain"]
    return measured


def decode_values(work: Work, sampler: Any) -> dict[str, float]:
    """Return vLLM's milliseconds per decoding step by the number of sequences, and its processor time per sequence.

    The processor time is that of this thread outside of the executor: scheduling, outputs, and the sampler's own loop.
    """
    from bandpo_cli.sampling.sampler import SamplingParams

    size, values = work.size, {}
    params = SamplingParams(size.samples, 1.0, size.max_tokens, stop_ids=())
    for count in TINY_SEQUENCES if work.tiny else SEQUENCES:
        prompts = [[2 + index, *[5] * (size.prompt_chars - 1)] for index in range(count // size.samples)]
        with _step_marks(sampler._llm.llm_engine) as marks:
            sampler.sample(prompts, params, seed=count)
        # All sequences run in the second half of the first one's steps.
        steps = [*pairwise(marks[size.max_tokens // 2 : size.max_tokens])]
        wall, processor = (
            statistics.median(later[i] - earlier[i] for earlier, later in steps) for i in (0, 1)
        )
        values[f"ms_per_step_{count}"] = 1e3 * wall
        values[f"python_us_per_sequence_{count}"] = 1e6 * processor / count
    return values


@contextmanager
def _step_marks(engine: Any) -> Iterator[list[tuple[float, float]]]:
    """Add the time and this thread's processor time to the list at the start of each step of an engine in this process.

    The processor time leaves out the methods of the executor, which run the model.
    """
    marks: list[tuple[float, float]] = []
    in_model, plain_step = 0.0, engine.step

    def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal in_model
            begin, result = time.thread_time(), plain(*args, **kwargs)
            in_model += time.thread_time() - begin
            if isinstance(result, Future):  # the engine waits for the GPU in it
                result.result = counted(result.result)  # type: ignore[method-assign]
            return result

        return call

    def step() -> Any:
        marks.append((time.perf_counter(), time.thread_time() - in_model))
        return plain_step()

    executor = engine.engine_core.engine_core.model_executor
    with ExitStack() as stack:
        for name in ("execute_model", "sample_tokens"):
            stack.enter_context(patch.object(executor, name, counted(getattr(executor, name))))
        stack.enter_context(patch.object(engine, "step", step))
        yield marks


class Baseline(NamedTuple):
    """A measurement that prime-rl publishes (benchmarks/baselines of its repository), on one H100.

    Attributes:
        tokens: tokens of each of the two sequences of an update, with gradient checkpointing.
        rank: of LoRA; None for training of all weights.
        utilisation: as prime-rl counts FLOPs, not as `perf/model_flop_utilisation` does.
    """

    shape: str
    tokens: int
    rank: int | None
    utilisation: float
    tokens_per_s: float


H100_FLOPS = 989e12  # by which prime-rl divides
PRIME_RL = {
    "prime-rl-0.6b-16k": Baseline("qwen3-0.6b", 16_384, None, 0.111, 11_896),
    "prime-rl-0.6b-64k": Baseline("qwen3-0.6b", 65_536, None, 0.268, 10_147),
    "prime-rl-4b-lora": Baseline("qwen3-4b", 16_384, 16, 0.217, 6_229),
}


def check_prime_rl(work: Work, name: str) -> Measured:
    """Time an update in the shapes of a baseline of prime-rl, beside what it publishes."""
    from bandpo_cli.training.performance import PackedWork

    if work.on_gpu and torch.cuda.get_device_properties(work.device).total_memory < SMALL_CARD_BYTES:
        raise Skipped("the shapes are those of a card with 80 GB")
    baseline = PRIME_RL[name]
    tokens = 4 * PROMPT_TOKENS if work.tiny else baseline.tokens
    model: dict[str, Any] = {"gradient_checkpointing": True}
    if baseline.rank is not None:
        model["lora"] = {"rank": baseline.rank}
    optim = {"updates": 1, "micro_batch_tokens": tokens}
    updates = Updates(work.config(baseline.shape, model=model, optim=optim))
    lengths_PG = [[tokens - PROMPT_TOKENS] * 2]
    updates.seconds(lengths_PG, PROMPT_TOKENS)
    if work.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with PackedWork(updates.policy.model).counted() as counted:
        seconds = updates.seconds(lengths_PG, PROMPT_TOKENS)
    measured = Measured(
        {"tokens_per_s": 2 * tokens / seconds, "prime_rl_tokens_per_s": baseline.tokens_per_s}
    )
    measured.values["prime_rl_utilisation"] = baseline.utilisation
    if counted.peak is not None:
        flops_per_token = baseline.utilisation * H100_FLOPS / baseline.tokens_per_s
        as_prime_rl_counts = flops_per_token * measured.values["tokens_per_s"] / counted.peak
        measured.values["utilisation_as_prime_rl_counts"] = as_prime_rl_counts
        measured.values["utilisation"] = counted.flops / seconds / counted.peak
    if work.on_gpu:
        measured.values["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return measured
