"""Many batches of requests in the queue of a vLLM engine at the same time, returned batch by batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import vllm

MAX_QUEUED = 8192
"""Completions in the engine's queue beyond which no further batch is added: more than an engine decodes at a time, and
a few hundred MB of host memory at most."""


@dataclass
class _Batch:
    """The requests of one batch, by the engine's numbers in order, and the outputs that have arrived."""

    numbers: Sequence[int]
    completions: int
    outputs: dict[int, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.outputs) == len(self.numbers)


def stream_outputs(
    llm: vllm.LLM,
    batches: Iterable[tuple[Sequence[Any], Sequence[vllm.SamplingParams]]],
    engine_call: Callable[[], AbstractContextManager[None]],
    max_queued: int = MAX_QUEUED,
) -> Generator[list[Any], None, None]:
    """Yield vLLM's `RequestOutput` of all prompts of each batch, in order.

    Args:
        batches: prompts and their parameters; taken as the queue has room.
        engine_call: context of every call of the engine. Between them other code of this process runs.
        max_queued: see `MAX_QUEUED`.
    """
    waiting: deque[_Batch] = deque()
    owners: dict[int, _Batch] = {}
    more = iter(batches)
    try:
        while True:
            while sum(batch.completions for batch in waiting) < max_queued:
                if (item := next(more, None)) is None:
                    break
                batch = _enqueue(llm, *item, engine_call)
                waiting.append(batch)
                owners |= dict.fromkeys(batch.numbers, batch)
            if not waiting:
                return
            while waiting and waiting[0].is_complete:
                first = waiting.popleft()
                yield [first.outputs[number] for number in first.numbers]
            if waiting:
                with engine_call():
                    outputs = llm.llm_engine.step()
                for output in outputs:
                    if output.finished:
                        number = int(output.request_id)
                        owners.pop(number).outputs[number] = output
    finally:
        if owners:
            with engine_call():
                llm.llm_engine.abort_request([str(number) for number in owners])


def _enqueue(
    llm: vllm.LLM,
    prompts: Sequence[Any],
    requests: Sequence[vllm.SamplingParams],
    engine_call: Callable[[], AbstractContextManager[None]],
) -> _Batch:
    """Add a batch to the queue; vLLM's ids are `<number>-<random>`, and its outputs have the number alone."""
    with engine_call():
        ids = llm.enqueue(prompts, requests, use_tqdm=False)
    numbers = [int(item.partition("-")[0]) for item in ids]
    return _Batch(numbers, sum(request.n for request in requests))
