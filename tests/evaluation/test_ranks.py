"""Evaluation with several ranks: the batches of one rank, on every rank, whatever the times of sampling and grading."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bandpo_cli.evaluation.batches import Batch
from bandpo_cli.evaluation.evaluate import sample_batches
from bandpo_cli.ranks import SINGLE, Ranks
from bandpo_cli.sampling.base import SampleRequest, SamplingParams
from bandpo_cli.sampling.rollouts import EncodedPrompt
from bandpo_cli.types import Completion, Grade, Problem
from tests.training.several_ranks import run_ranks

SAMPLES = 2


def problems(name: str, number: int) -> list[Problem]:
    return [Problem(f"{name}-{index}", "?", "1", name, "countdown") for index in range(number)]


SETS = {"a": problems("a", 11), "b": problems("b", 1), "c": problems("c", 4)}


class Engine:
    """Engine, encoder and grader. Completions follow the contract of `Sampler`: prompt i depends on `seed + i`.

    Sampling communicates, as that of a sharded model does, and fails if the ranks are not at the same call.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.calls = ranks, 0
        self.prompts: list[int] = []
        self.random = random.Random(ranks.rank)
        self.tokenizer = SimpleNamespace(
            batch_decode=lambda ids, skip_special_tokens: [str(each) for each in ids]
        )

    def encode(self, problems_P: Sequence[Problem]) -> list[EncodedPrompt]:
        return [EncodedPrompt("?", (1,)) for _ in problems_P]

    def sample(self, prompts_P: Sequence[Any], params: SamplingParams, seed: int) -> list[list[Completion]]:
        self.calls += 1
        self.prompts.append(len(prompts_P))
        assert self.ranks.gather(("sample", self.calls)) == [("sample", self.calls)] * self.ranks.size
        return [
            [Completion(((seed + i) % 9973 + k,), (-1.0,), "stop", 0) for k in range(params.samples)]
            for i in range(len(prompts_P))
        ]

    def grade(self, problems_N: Sequence[Problem], texts_N: Sequence[str]) -> list[Grade]:
        time.sleep(self.random.choice([0.0, 0.02]))
        return [Grade(len(text) % 2, correct=len(text) % 2 == 1, verdict="wrong") for text in texts_N]


class Streaming(Engine):
    """Takes two requests before it returns the completions of the first one."""

    def sample_stream(
        self, requests: Iterator[SampleRequest], params: SamplingParams
    ) -> Iterator[list[list[Completion]]]:
        queue: list[SampleRequest] = []
        for request in requests:
            queue.append(request)
            if len(queue) == 2:
                first = queue.pop(0)
                yield self.sample(first.prompts_P, params, first.seed)
        for request in queue:
            yield self.sample(request.prompts_P, params, request.seed)


def evaluated(ranks: Ranks, kind: type[Engine], per_batch: int = 3) -> tuple[list[Batch], list[int]]:
    """Return the batches, and the number of prompts of each sampling call on this rank."""
    engine: Any = kind(ranks)
    params = SamplingParams(SAMPLES, 1.0, 10, (0,))
    batches = list(
        sample_batches(engine, engine, engine.grade, SETS, params, per_batch * SAMPLES, 7, 0, ranks=ranks)
    )
    return batches, engine.prompts


@pytest.mark.parametrize(("kind", "size"), [(Engine, 2), (Streaming, 2), (Engine, 3)])
def test_several_ranks_give_the_batches_of_one(tmp_path: Path, kind: type[Engine], size: int) -> None:
    expected, prompts = evaluated(SINGLE, kind)
    assert [batch.key for batch in expected] == [(0, 0), (0, 3), (0, 6), (0, 9), (1, 0), (2, 0), (2, 3)]
    results = run_ranks(size, tmp_path, evaluated, kind)
    for batches, _ in results:
        assert batches == expected
    shares = [share for _, share in results]
    assert [sum(each) for each in zip(*shares, strict=True)] == prompts == [3, 3, 3, 2, 1, 3, 1]
    assert 0 in shares[0], "a rank without a problem of a batch takes part in it"
    assert max(max(each) - min(each) for each in zip(*shares, strict=True)) == 1


def test_the_completions_of_a_problem_do_not_depend_on_the_size_of_the_batches() -> None:
    """They have a seed per problem; those of two problems and of two sets differ."""
    small, large = ([row for batch in evaluated(SINGLE, Engine, n)[0] for row in batch.rows] for n in (2, 7))
    assert [(row["problem_id"], row["text"]) for row in small] == [
        (row["problem_id"], row["text"]) for row in large
    ]
    assert len({row["text"] for row in small[::SAMPLES]}) == 16
