"""What is compared after a weight sync, bit by bit, without an engine: the fingerprints and the worker's account."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from bandpo_cli.sampling.vllm_worker import (
    PolicyWorker,
    Weights,
    compared_shapes,
    fingerprint,
    policy_weights,
)
from tests.conftest import random_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_one_bit_changes_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = fingerprint(tensor, (6, 5))
    assert whole == fingerprint(tensor.clone(), (6, 5))
    for place in range(30):
        other = tensor.clone()
        bits = other.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[other.element_size()]).flatten()
        bits[place] ^= 1
        assert fingerprint(other, (6, 5)) != whole


def test_the_fingerprint_is_that_of_the_formula() -> None:
    """Counted by hand: the bits as whole numbers, times 1, 3, 5, ..., modulo 2^64 with a sign."""
    tensor = torch.tensor([[1.0, -2.0], [0.5, 3.0], [9.0, 9.0]])
    expected = sum(
        place * int.from_bytes(torch.tensor(value).numpy().tobytes(), "little", signed=True)
        for place, value in zip((1, 3, 5, 7), (1.0, -2.0, 0.5, 3.0), strict=True)
    )
    assert fingerprint(tensor, (2, 2)) == (expected + 2**63) % 2**64 - 2**63


def test_two_values_that_change_places_are_seen() -> None:
    assert fingerprint(torch.tensor([1.0, 2.0]), (2,)) != fingerprint(torch.tensor([2.0, 1.0]), (2,))


def test_norms_and_embedding_rows_are_compared_and_tied_weights_sent_once() -> None:
    weights = policy_weights(random_model("qwen2"))
    names = [name for name, _ in weights]
    assert len(names) == len(set(names))
    assert "lm_head.weight" not in names  # Qwen2 here ties it
    shapes = compared_shapes(weights, tensor_parallel=1)
    assert shapes["model.norm.weight"] == (32,)
    assert shapes["model.embed_tokens.weight"] == (23, 32)
    assert not any("proj.weight" in name for name in shapes)
    assert "model.embed_tokens.weight" not in compared_shapes(weights, tensor_parallel=2)


class Engine(nn.Module):
    """A model as vLLM holds it: rows padded, two projections fused into one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, bias=False)
        self.embed = nn.Embedding(8, 4)
        self.fused = nn.Linear(4, 6, bias=False)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            held, first = {"q.weight": ("fused.weight", 0), "k.weight": ("fused.weight", 3)}.get(
                name, (name, 0)
            )
            self.get_parameter(held)[first : first + len(tensor)] = tensor
            loaded.add(held)
        return loaded


class Worker(PolicyWorker):
    """The extension over a worker that reloads as vLLM's does: what its model's loader takes."""

    def __init__(self) -> None:
        self.model = Engine()
        self.model_runner = self
        self.drop: str | None = None
        self.read = 9

    def get_model(self) -> nn.Module:
        return self.model

    def reload_weights(self, weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None:  # type: ignore[override]
        taken = (pair for _, pair in zip(range(self.read), weights_iterator, strict=False))
        self.model.load_weights(pair for pair in taken if pair[0] != self.drop)


def given() -> Weights:
    return [
        ("norm.weight", torch.randn(4)),
        ("embed.weight", torch.randn(5, 4)),
        ("q.weight", torch.randn(3, 4)),
        ("k.weight", torch.randn(3, 4)),
    ]


def test_a_whole_set_is_stamped_and_held_as_it_came() -> None:
    worker, weights = Worker(), given()
    shapes = compared_shapes(weights, 1)
    assert worker.policy_state(shapes)[0] is None
    assert worker.policy_load(weights, 7) == []
    version, found = worker.policy_state(shapes)
    assert version == 7
    assert found == {name: fingerprint(dict(weights)[name], shape) for name, shape in shapes.items()}
    assert set(found) == {"norm.weight", "embed.weight"}
    assert "load_weights" not in vars(worker.model), "the loader is the model's own again"


def test_what_is_left_out_is_named_and_nothing_is_stamped() -> None:
    worker = Worker()
    worker.policy_load(given(), 1)
    worker.drop = "norm.weight"
    assert worker.policy_load(given(), 2) == ["norm.weight was not filled"]
    assert worker.policy_version is None
    worker.drop, worker.read = None, 3
    assert worker.policy_load(given(), 3) == ["k.weight was not read"]
    assert worker.policy_version is None


def test_a_tensor_held_in_another_shape_is_not_compared() -> None:
    """A shard of a bias or of an embedding says nothing about the whole."""
    found = Worker().policy_state({"norm.weight": (2,), "embed.weight": (9, 4), "gone.weight": (4,)})[1]
    assert found == {}
