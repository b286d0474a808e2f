"""Batches in the queue of a vLLM engine, with a stand-in for the engine: it needs no vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from bandpo_cli.sampling.vllm_sampler import stream_outputs

SAMPLES = 4


class Engine:
    """`LLM` and its engine: each step ends the newest request, so that requests end in the reverse order."""

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
        return [*running, SimpleNamespace(request_id=number, finished=True, prompt=prompt)]

    def abort_request(self, ids: list[str]) -> None:
        assert self.in_call
        self.aborted += ids

    @contextmanager
    def call(self) -> Iterator[None]:
        self.in_call = True
        try:
            yield
        finally:
            self.in_call = False


def stream(engine: Any, sizes: list[int], max_queued: int) -> Iterator[list[Any]]:
    """Return the stream of batches of these sizes; prompts are numbered (batch, place)."""
    request = SimpleNamespace(n=SAMPLES)
    batches = (
        ([(batch, place) for place in range(size)], [request] * size) for batch, size in enumerate(sizes)
    )
    return stream_outputs(engine, batches, engine.call, max_queued)


@pytest.mark.parametrize(("max_queued", "most"), [(1, 3), (3 * SAMPLES + 1, 5), (10**6, 9)])
def test_batches_come_back_in_order_however_many_are_queued(max_queued: int, most: int) -> None:
    """No code of the caller runs within a call of the engine."""
    engine, sizes, found = Engine(), [3, 1, 2, 3], []
    for outputs in stream(engine, sizes, max_queued):
        assert not engine.in_call
        found.append([output.prompt for output in outputs])
    assert found == [[(batch, place) for place in range(size)] for batch, size in enumerate(sizes)]
    assert engine.most_queued == most
    assert engine.aborted == []


def test_closing_the_stream_drops_unfinished_requests() -> None:
    engine = Engine()
    outputs = stream(engine, [1, 1, 3], 2 * SAMPLES)
    assert [item.prompt for item in next(outputs)] == [(0, 0)]
    assert [item.prompt for item in next(outputs)] == [(1, 0)]
    outputs.close()  # type: ignore[attr-defined]
    assert engine.aborted == []
    engine = Engine(failing_step=2)
    outputs = stream(engine, [3], 10**6)
    with pytest.raises(RuntimeError, match="out of order"):
        next(outputs)
    assert sorted(engine.aborted) == sorted(number for number, _ in engine.queue)
    assert len(engine.aborted) == 2
