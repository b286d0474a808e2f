"""vLLM worker module, without vLLM: restored process state, fingerprints of weights, and the worker's report."""

import os
import weakref
from collections.abc import Iterable, Iterator
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bandpo_cli.models.weights import checkpoint_weights
from bandpo_cli.sampling.vllm_worker import (
    ComparedWeights,
    PolicyWorker,
    engine_threads,
    fingerprint,
    prepare_environment,
    preserve_process_group,
    preserve_process_state,
    stderr_on_failure,
)
from tests.conftest import random_model


def test_process_state_is_restored_after_an_error(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    set_threads, threads, rng_state = torch.set_num_threads, torch.get_num_threads(), torch.get_rng_state()

    @preserve_process_state()
    def start() -> None:
        torch.set_num_threads(threads + 1)
        torch.set_num_threads = lambda count: None
        torch.manual_seed(5)
        os.environ["LD_PRELOAD"] = "libgomp.so"
        os.environ["LD_LIBRARY_PATH"] = "/after"
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        start()
    assert torch.set_num_threads is set_threads
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert "LD_PRELOAD" not in os.environ
    assert os.environ["LD_LIBRARY_PATH"] == "/before"


def test_the_process_group_of_the_ranks_is_kept(tmp_path):
    """vLLM destroys its own groups, and then the default one, which all other groups depend on."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        destroy, own = dist.destroy_process_group, dist.new_group([0])
        with preserve_process_group():
            dist.destroy_process_group(own)
            dist.destroy_process_group()
            dist.destroy_process_group(dist.group.WORLD)
        assert dist.destroy_process_group is destroy
        assert dist.is_initialized()
        dist.barrier()
        with pytest.raises(KeyError):
            dist.get_process_group_ranks(own)
    finally:
        dist.destroy_process_group()
    with preserve_process_group():
        assert dist.destroy_process_group is destroy


def test_engine_threads_restores_threads_and_random_state():
    threads, rng_state = torch.get_num_threads(), torch.get_rng_state()
    with engine_threads(threads + 1):
        assert torch.get_num_threads() == threads + 1
        torch.rand(3)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), rng_state)


def test_stderr_is_printed_only_after_a_failure(capfd, monkeypatch):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)

    @stderr_on_failure()
    def start(message: bytes, fails: bool = False) -> None:
        os.write(2, message)
        if fails:
            raise ValueError("no engine")

    start(b"Warning: NUMA binding\n")
    assert capfd.readouterr().err == ""
    with pytest.raises(ValueError, match="no engine"):
        start(b"the cause\n", fails=True)
    assert capfd.readouterr().err == "the cause\n"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    start(b"requested\n")
    assert capfd.readouterr().err == "requested\n"


def test_logging_level_of_the_user_is_not_changed(monkeypatch):
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    prepare_environment()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_single_bit_changes_the_fingerprint(dtype):
    tensor = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    original = fingerprint(tensor, (6, 5))
    assert original == fingerprint(tensor.clone(), (6, 5))
    for index in range(30):
        other = tensor.clone()
        bits = other.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[other.element_size()]).flatten()
        bits[index] ^= 1
        assert fingerprint(other, (6, 5)) != original


def test_fingerprint_equals_its_formula():
    """Computed by hand: the bits as integers, times 1, 3, 5, ..., modulo 2^64, as a signed number."""
    tensor = torch.tensor([[1.0, -2.0], [0.5, 3.0], [9.0, 9.0]])
    expected = sum(
        factor * int.from_bytes(torch.tensor(value).numpy().tobytes(), "little", signed=True)
        for factor, value in zip((1, 3, 5, 7), (1.0, -2.0, 0.5, 3.0), strict=True)
    )
    assert fingerprint(tensor, (2, 2)) == (expected + 2**63) % 2**64 - 2**63


def test_all_weights_are_compared_and_tied_weights_appear_once():
    model = random_model("qwen2")
    compared = ComparedWeights(checkpoint_weights(model), tensor_parallel=1)
    names = [name for name, _ in compared]
    assert len(names) == len(set(names))
    assert "lm_head.weight" not in names  # tied in this model
    assert compared.shapes["model.norm.weight"] == (32,)
    assert compared.shapes["model.embed_tokens.weight"] == (23, 32)
    assert set(compared.shapes) == set(names)
    state = model.state_dict()
    assert compared.fingerprints == {
        name: fingerprint(state[name], shape) for name, shape in compared.shapes.items()
    }
    spread = ComparedWeights(checkpoint_weights(model), tensor_parallel=2)
    list(spread)
    assert {len(shape) for shape in spread.shapes.values()} == {1}, "matrices are sharded over the GPUs"


def test_the_first_1024_rows_of_a_matrix_are_compared():
    tensor = torch.randn(1030, 2)
    original = fingerprint(tensor, (1030, 2))
    tensor[1024:] = 0.0
    assert fingerprint(tensor, (1030, 2)) == original
    tensor[1023, 1] = 0.0
    assert fingerprint(tensor, (1030, 2)) != original
    vector = torch.randn(1030)
    assert fingerprint(vector, (1030,)) != fingerprint(torch.cat([vector[:-1], torch.zeros(1)]), (1030,))


def test_a_tensor_is_free_once_the_next_one_is_taken():
    """A sharded policy makes each tensor when it is taken: at no time are all of them in memory."""
    references: list[weakref.ref[torch.Tensor]] = []

    def made_when_taken() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(4):
            assert all(reference() is None for reference in references[:-1])
            tensor = torch.full((3,), float(index))
            references.append(weakref.ref(tensor))
            yield f"norm{index}.weight", tensor
            del tensor

    for name, tensor in (compared := ComparedWeights(made_when_taken(), tensor_parallel=1)):
        assert compared.fingerprints[name] == fingerprint(tensor, (3,))
        del tensor
    assert len(compared.fingerprints) == len(references) == 4


class Engine(nn.Module):
    """A model as vLLM stores it: padded rows, two projections packed into one."""

    packed_modules_mapping: ClassVar = {"fused": ["q", "k"]}

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, bias=False)
        self.embed = nn.Embedding(8, 4)
        self.layer = nn.ModuleDict({"fused": nn.Linear(4, 6, bias=False)})

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            parameter, first = {
                "layer.q.weight": ("layer.fused.weight", 0),
                "layer.k.weight": ("layer.fused.weight", 4),
            }.get(name, (name, 0))
            self.get_parameter(parameter)[first : first + len(tensor)] = tensor
            loaded.add(parameter)
        return loaded


class Worker(PolicyWorker):
    """The extension on top of a worker that reloads weights as vLLM's does.

    It reads the first `max_read` tensors, and passes all but `dropped` to the model's loader.
    """

    def __init__(self) -> None:
        self.model = Engine()
        self.model_runner = self
        self.dropped: str | None = None
        self.max_read = 9

    def get_model(self) -> nn.Module:
        return self.model

    def reload_weights(self, weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        read = (pair for _, pair in zip(range(self.max_read), weights_iterator, strict=False))
        self.model.load_weights(pair for pair in read if pair[0] != self.dropped)


def random_weights() -> list[tuple[str, torch.Tensor]]:
    return [
        ("norm.weight", torch.randn(4)),
        ("embed.weight", torch.randn(5, 4)),
        ("layer.q.weight", torch.randn(4, 4)),
        ("layer.k.weight", torch.randn(2, 4)),
    ]


def test_complete_load_sets_the_version_and_matches_the_fingerprints():
    worker, weights = Worker(), random_weights()
    assert worker.policy_state({})[0] is None
    assert worker.policy_runner() == f"{__name__}.Worker"
    compared = ComparedWeights(weights, 1)
    assert worker.policy_load(iter(compared), 7) == []
    version, found = worker.policy_state(compared.shapes)
    assert version == 7
    assert found == compared.fingerprints
    assert set(found) == {name for name, _ in weights}
    assert "load_weights" not in vars(worker.model), "the model's own loader must be restored"


def test_a_part_of_a_packed_tensor_that_is_not_new_is_noticed():
    """vLLM reports the packed tensor as loaded if one of its parts is."""
    worker = Worker()
    worker.policy_load(random_weights(), 1)
    worker.dropped = "layer.k.weight"
    compared = ComparedWeights(random_weights(), 1)
    assert worker.policy_load(iter(compared), 2) == []
    found = worker.policy_state(compared.shapes)[1]
    assert {name for name in found if found[name] != compared.fingerprints[name]} == {"layer.k.weight"}


def test_incomplete_load_names_the_weights_and_sets_no_version():
    worker = Worker()
    worker.policy_load(random_weights(), 1)
    worker.dropped = "norm.weight"
    assert worker.policy_load(random_weights(), 2) == ["norm.weight was not filled"]
    assert worker.policy_version is None
    worker.dropped, worker.max_read = None, 2
    taken: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in random_weights():
            taken.append(name)
            yield name, tensor

    assert worker.policy_load(weights(), 3) == [
        "layer.k.weight was not read",
        "layer.q.weight was not read",
        "layer.fused.weight was not filled",
    ]
    assert worker.policy_version is None
    assert len(taken) == 4, "each rank takes all tensors, so that no rank waits for another one"


def test_tensor_of_another_shape_is_not_compared():
    """A shard of a bias or of an embedding cannot be compared with the complete tensor."""
    shards = {"norm.weight": (2,), "embed.weight": (9, 4), "gone.weight": (4,)}
    packed = {"layer.q.weight": (4, 4), "layer.k.weight": (3, 4)}
    assert Worker().policy_state(shards | packed)[1] == {}
