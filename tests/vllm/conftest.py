"""Engines that start once per module: each start takes seconds, and a process can have one engine at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from bandpo_cli.sampling import sync_check

if TYPE_CHECKING:
    from tests.vllm.engines import Running


@pytest.fixture(scope="module", autouse=True)
def every_sync_is_checked_completely() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync_check, "CHECK_EVERY", 1)
        yield


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    """Start the engine of `qwen2` or `llama`, by an indirect parameter; a call of some tests exceeds its batch."""
    import torch.distributed

    from tests.vllm.engines import Running, process_state, random_policy, silent, start

    policy, before = random_policy(request.param), process_state()
    with silent():
        sampler = start(policy, max_sequences=64)
    assert process_state() == before
    engine = weakref.ref(sampler._llm)
    yield Running(policy, sampler)
    sampler.close()
    sampler.close()
    assert engine() is None, "its memory is free for another one"
    assert not torch.distributed.is_initialized()
