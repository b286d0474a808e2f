"""Memory of a rank of a sharded model: the counts equal the allocations that torch's profiler records.

The ranks are torch's fake process group: one process runs the code of rank 0 of four, and nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from bandpo_cli.config.layers import resolve
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.memory import Device, estimate_memory, fsdp_bytes, stored_parameters
from bandpo_cli.models.packing import Row, collate
from bandpo_cli.models.sharding import local_tensor, shard, unsharded
from bandpo_cli.models.weights import checkpoint_weights
from bandpo_cli.ranks import Ranks
from tests.conftest import random_model

RANKS = 4
MACHINE, GPU = (Device("a device", 2**50, 2**50, on_gpu) for on_gpu in (False, True))
MANY_WORDS = 8192
"""Words for which the parameters outside of the layers are most of the model."""


@pytest.fixture
def rank_0_of_4() -> Iterator[Ranks]:
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=fake.FakeStore())
    yield Ranks(0, RANKS, 0)
    dist.destroy_process_group()


def qwen2(words: int, tied: bool, dtype: torch.dtype) -> PreTrainedModel:
    shape = {
        "vocab_size": words, "hidden_size": 64, "intermediate_size": 255, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied,
    }  # fmt: skip
    return Qwen2ForCausalLM(Qwen2Config(**shape)).to(dtype).eval()


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes that a call has allocated at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    assert recorded.profiler is not None
    events = [item for item in recorded.profiler.kineto_results.events() if item.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda item: item.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def train_twice(model: PreTrainedModel) -> None:
    """Add the gradients of two micro-batches of one token each, so that activations take no memory."""
    batch = collate([Row([1], [[1]])], torch.device("cpu"))
    for _ in range(2):
        logprobs = token_logprobs(model, batch).logprobs
        logprobs.backward(torch.ones_like(logprobs))
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "tied", "dtype"),
    [
        (64, True, torch.bfloat16),
        (64, False, torch.bfloat16),
        (64, True, torch.float32),
        (MANY_WORDS, False, torch.float32),
    ],
    ids=["layers", "layers, untied", "layers in float32", "outside of the layers"],
)
def test_the_peak_of_an_update_is_the_estimate(
    rank_0_of_4: Ranks, words: int, tied: bool, dtype: torch.dtype
) -> None:
    model = qwen2(words, tied, dtype)
    update, reduction, *_ = fsdp_bytes(model, RANKS)
    gradients = 4 * stored_parameters(model.parameters(), RANKS)[1]
    shard(model, rank_0_of_4, torch.device("cpu"))
    train_twice(model)
    measured = peak_bytes(lambda: train_twice(model))
    # The gradient of the output layer belongs to the update; its activations take no memory.
    during = sum(update.values()) + words * 64 * dtype.itemsize
    assert 0.9 < measured / (gradients + max(during, sum(reduction.values()))) < 1.03


@pytest.mark.parametrize("words", [64, MANY_WORDS])
def test_the_peak_of_gathering_all_parameters_is_the_estimate(rank_0_of_4: Ranks, words: int) -> None:
    model = qwen2(words, False, torch.bfloat16)
    _, _, gathered, _ = fsdp_bytes(model, RANKS)
    shard(model, rank_0_of_4, torch.device("cpu"))

    def gather() -> None:
        with unsharded(model):
            pass

    gather()
    assert peak_bytes(gather) == pytest.approx(gathered["complete parameters"], rel=0.01)


def test_the_peak_of_sending_weights_is_the_estimate(rank_0_of_4: Ranks) -> None:
    model = qwen2(MANY_WORDS, True, torch.bfloat16)
    (estimate,) = fsdp_bytes(model, RANKS)[3].values()
    shard(model, rank_0_of_4, torch.device("cpu"))

    def send() -> None:
        for _, weight in checkpoint_weights(model):
            del weight

    assert 0.5 * estimate < peak_bytes(send) <= estimate


def test_a_model_without_gradients_holds_nothing_complete_after_its_passes(rank_0_of_4: Ranks) -> None:
    """As the reference model, of which an estimate has the share of a rank alone."""
    model = qwen2(64, True, torch.bfloat16).requires_grad_(False)
    shard(model, rank_0_of_4, torch.device("cpu"))
    with torch.no_grad():
        token_logprobs(model, collate([Row([1], [[1]])], torch.device("cpu")))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_the_first_rank_stores_its_share(rank_0_of_4: Ranks) -> None:
    """255 rows over 4 ranks are 64 rows on the first; a parameter that is not trained keeps its dtype."""
    model = qwen2(64, True, torch.bfloat16)
    model.get_input_embeddings().requires_grad_(False)
    stored, trained_stored = stored_parameters(model.parameters(), RANKS)
    reduction = fsdp_bytes(model, RANKS)[1]
    shard(model, rank_0_of_4, torch.device("cpu"))
    local = [local_tensor(parameter) for parameter in model.parameters()]
    assert sum(item.numel() for item in local) == stored
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(local_tensor(item).numel() for item in trained) == trained_stored
    assert stored - trained_stored == 64 * 64 // 4
    # The last norm, of 64, is the only trained parameter outside of the layers: bfloat16, float32 and a quarter.
    assert reduction == {"gradient outside of the layers to reduce": 2 * 64 + 4 * 64 + 4 * 16}


def test_components_of_the_estimate_of_a_rank_computed_by_hand(tmp_path: Path) -> None:
    real = random_model()
    real.save_pretrained(tmp_path)
    numel = real.num_parameters()
    # Of all parameters only the embedding, 23 rows of 32, is not divisible by 2: the first rank has 12 rows.
    share = (numel + 32) // 2
    layer = {
        "model": {"path": str(tmp_path), "dtype": "bfloat16"},
        "sampling": {"prompts": 7, "samples": 4, "max_prompt_tokens": 30, "max_tokens": 20},
        "optim": {"updates": 1},
        "objective": {"reference_kl": 0.1},
        "checkpoint": {"every": 0},
    }
    config = resolve([layer])
    estimate = estimate_memory(config, MACHINE, ranks=2)
    assert (estimate.parameters, estimate.ranks) == (numel, 2)
    assert estimate.always == {
        "weights (float32)": 4 * share,
        "AdamW": 8 * share,
        "reference model": 2 * share,
        "complete weights for a checkpoint": 2 * numel,
    }
    copied = {"copy for a checkpoint": 12 * share}  # masters and two moments of the rank
    in_background = resolve([layer, {"checkpoint": {"every": 10}}])
    assert estimate_memory(in_background, MACHINE, ranks=2).always == estimate.always | copied
    float32 = resolve([layer, {"checkpoint": {"every": 10}, "model": {"dtype": "float32"}}])
    assert estimate_memory(float32, MACHINE, ranks=2).always["copy for a checkpoint"] == 8 * share
    assert "complete weights for a checkpoint" not in estimate_memory(config, GPU, ranks=2).always
    assert estimate.update["gradients"] == estimate.reduction["gradients"] == 4 * share
    # The first rank samples 3 of 7 prompts, the second 4.
    assert "at most: key-value cache of 16 × 50 tokens" in estimate.sampling
    with_engine = estimate_memory(resolve([layer, {"sampling": {"engine": "vllm"}}]), GPU, ranks=2)
    assert with_engine.sampling["a complete weight, to send it to the engine"] == 2 * 2 * (64 * 32)
