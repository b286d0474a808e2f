"""Memory that the trainer gives back before the sampler wakes up and before an evaluation."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from bandpo_cli.models import load
from bandpo_cli.models.load import release_cached_memory
from bandpo_cli.training import loop
from tests.training.recording import prepare_run


def test_no_gradient_and_no_value_per_token_is_held_when_the_sampler_syncs(
    tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients take 4 bytes per parameter, and the values of all tokens of a step some hundred megabytes.

    An evaluation begins with an empty cache.
    """
    prepared = prepare_run(tmp_path / "run", small_model, {"steps": 2, "model": {"dtype": "bfloat16"}})
    optimizer = prepared.components.optimizer
    experiences: list[weakref.ref[Any]] = []
    at_sync: list[tuple[bool, bool]] = []
    prepare, sync = loop.prepare_updates, prepared.components.sampler.sync

    def remember(*arguments: Any, **settings: Any) -> Any:
        batches = prepare(*arguments, **settings)
        experiences.extend(weakref.ref(batch) for batch in batches)
        return batches

    order: list[str] = []
    sample_batches = loop.sample_batches

    def evaluate(*arguments: Any, **settings: Any) -> Any:
        order.append("evaluate")
        return sample_batches(*arguments, **settings)

    def observe(*arguments: Any) -> None:
        gradients = [item.grad is not None for pair in optimizer._narrow for item in pair]
        at_sync.append((any(gradients), any(experience() is not None for experience in experiences)))
        sync(*arguments)

    monkeypatch.setattr(loop, "release_cached_memory", lambda: order.append("release"))
    monkeypatch.setattr(loop, "sample_batches", evaluate)
    monkeypatch.setattr(loop, "prepare_updates", remember)
    monkeypatch.setattr(prepared.components.sampler, "sync", observe)
    gc.disable()  # nothing may depend on the time of a collection
    try:
        list(loop.train(prepared.config, prepared.components, prepared.folder))
    finally:
        gc.enable()
    assert order == ["release", "evaluate"] * 2
    assert at_sync == [(False, False)] * 2
    assert len(experiences) == 4  # two updates per step: the references are to objects that existed


@pytest.mark.parametrize("initialized", [True, False])
def test_the_cache_is_emptied_after_garbage_collection_if_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, initialized: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(load.gc, "collect", lambda: calls.append("collect"))
    release_cached_memory()
    assert calls == (["collect", "empty"] if initialized else [])
