"""Requests in the queue of a vLLM engine, with a stand-in for the engine: it needs no vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from bandpo_cli.errors import RunError
from bandpo_cli.sampling import vllm_sampler
from bandpo_cli.sampling.sampler import SampleRequest, SamplingParams, Turn
from bandpo_cli.sampling.vllm_sampler import VllmSampler

SAMPLES = 4
PARAMS = SamplingParams(SAMPLES, 1.0, 1, ())


class Engine:
    """`LLM` and its engine: each step ends the newest prompt, so that prompts end in the reverse order."""

    def __init__(self, failing_step: int = 0) -> None:
        self.llm_engine, self.failing_step = self, failing_step
        self.queue: list[tuple[str, Any]] = []
        self.most_queued = self.started = self.steps = 0
        self.aborted: list[str] = []
        self.in_call = False

    def enqueue(self, prompts: list[Any], requests: list[Any], use_tqdm: bool) -> list[str]:
        assert self.in_call
        assert not use_tqdm
        ids = [str(self.started + place) for place in range(len(prompts))]
        self.started += len(prompts)
        self.queue += zip(ids, prompts, strict=True)
        self.most_queued = max(self.most_queued, len(self.queue))
        return [f"{item}-0123abcd" for item in ids]

    def step(self) -> list[Any]:
        assert self.in_call
        self.steps += 1
        if self.steps == self.failing_step:
            raise RuntimeError("out of order")
        number, prompt = self.queue.pop()
        running = [SimpleNamespace(request_id=value, finished=False) for value, _ in self.queue]
        ids = prompt["prompt_token_ids"]
        logprobs = SimpleNamespace(logprobs=[-1.0] * len(ids))
        output = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="stop")
        ended = SimpleNamespace(request_id=number, finished=True, prompt_token_ids=ids, outputs=[output])
        return [*running, ended]

    def abort_request(self, ids: list[str]) -> None:
        assert self.in_call
        self.aborted += ids

    @contextmanager
    def threads(self, count: int) -> Iterator[None]:
        """Stand for `engine_threads`, the context of every call of the engine."""
        self.in_call = True
        try:
            yield
        finally:
            self.in_call = False


def stream_sampler(engine: Engine) -> VllmSampler:
    sampler = object.__new__(VllmSampler)
    about = {
        "_llm": engine,
        "_threads": 1,
        "_asleep": False,
        "_max_model_len": 9,
        "_version": 0,
        "_stops": None,
    }
    vars(sampler).update(about, check=SimpleNamespace(observe=lambda *_: None))
    return sampler


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that starts a stream of requests of these numbers of prompts; prompts are (request, place)."""

    def started(engine: Engine, sizes: list[int], max_queued: int, turns: bool = False) -> Iterator[Any]:
        monkeypatch.setattr(vllm_sampler, "_vllm_params", lambda *parameters: parameters)
        monkeypatch.setattr(vllm_sampler, "engine_threads", engine.threads)
        monkeypatch.setattr(vllm_sampler, "MAX_QUEUED", max_queued)
        sampler = stream_sampler(engine)
        requests = (
            SampleRequest([(number, place) for place in range(size)], number)
            for number, size in enumerate(sizes)
        )
        return sampler.sample_stream(requests, PARAMS, in_order=not turns)

    return started


def prompts_of(groups: Any) -> list[tuple[int, ...]]:
    return [tuple(completion.token_ids) for (completion,) in groups]


@pytest.mark.parametrize(("max_queued", "most"), [(1, 3), (3 * SAMPLES + 1, 5), (10**6, 9)])
def test_requests_come_back_in_order_however_many_are_queued(start, max_queued, most):
    """No code of the caller runs within a call of the engine."""
    engine, sizes, found = Engine(), [3, 1, 2, 3], []
    for _, groups in start(engine, sizes, max_queued):
        assert not engine.in_call
        found.append(prompts_of(groups))
    assert found == [[(number, place) for place in range(size)] for number, size in enumerate(sizes)]
    assert engine.most_queued == most
    assert engine.aborted == []


def test_closing_the_stream_drops_unfinished_requests(start):
    engine = Engine()
    groups = start(engine, [1, 1, 3], 2 * SAMPLES)
    assert prompts_of(next(groups)[1]) == [(0, 0)]
    assert prompts_of(next(groups)[1]) == [(1, 0)]
    groups.close()
    assert engine.aborted == []
    engine = Engine(failing_step=2)
    with pytest.raises(RunError, match="out of order"):
        next(start(engine, [3], 10**6))
    assert sorted(engine.aborted) == sorted(number for number, _ in engine.queue)
    assert len(engine.aborted) == 2


def test_turns_come_as_they_end_and_lead_to_further_requests(start):
    """The engine ends the newest prompt first; a request that is not there yet holds up no other one."""
    engine = Engine()
    stream = start(engine, [1, 1, 3], 10**6, turns=True)
    assert [(number, prompts_of(groups)) for number, groups in stream] == [
        (2, [(2, 0), (2, 1), (2, 2)]), (1, [(1, 0)]), (0, [(0, 0)]),
    ]  # fmt: skip
    sampler, taken = stream_sampler(engine), []

    def requests() -> Iterator[SampleRequest | None]:
        yield SampleRequest([(0, 0)], 0)
        yield SampleRequest([(1, 0)], 0)
        yield None
        while not taken:
            yield None
        yield SampleRequest([(2, taken[0])], 0, [Turn(5, 3)])

    for number, _ in sampler.sample_stream(requests(), PARAMS, in_order=False):
        taken.append(number)
    assert taken == [1, 2, 0]


def test_a_turn_counts_as_one_completion_in_the_queue(start):
    """Not as `samples` of them: the engine's queue holds as many conversations as completions."""
    engine = Engine()
    start(engine, [], 8)  # sets the limit
    requests = (SampleRequest([(number, 0)], 0, [Turn(number, 3)]) for number in range(20))
    assert len([*stream_sampler(engine).sample_stream(requests, PARAMS, in_order=False)]) == 20
    assert engine.most_queued == 8
