"""The memory estimate from shapes equals what a real model of that shape has and saves, also on a rank of several.

The ranks are torch's fake process group: one process runs the code of rank 0 of four, and nothing is communicated. The
counts of a rank equal the allocations that torch's profiler records.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import LoraSettings, ModelConfig
from bandpo_cli.errors import UserError
from bandpo_cli.models.attention import attention_elements
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.lora import add_adapters
from bandpo_cli.models.memory_estimate import (
    Device,
    NoEstimateError,
    activation_bytes,
    build_on_meta_device,
    estimate_memory,
    fsdp_bytes,
    stored_parameters,
)
from bandpo_cli.models.packing import Row, batch_rows, collate
from bandpo_cli.models.weights import (
    checkpoint_weights,
    checkpointed_layers,
    local_tensor,
    save_adapter,
    shard,
    unsharded,
)
from bandpo_cli.processes.ranks import Ranks
from tests.conftest import random_model
from tests.models.allocations import peak_bytes

TOKENS = 96
MACHINE = Device("this machine", 2**50, 2**50, on_gpu=False)
GPU = Device("a GPU", 2**50, 2**50)
HEADS, KEY_VALUE_HEADS, WIDTH = 4, 2, 8
"""Of `random_model`."""


@pytest.fixture(autouse=True)
def numel(tmp_path: Path) -> int:
    """Save a random model in `tmp_path` and return its number of parameters."""
    model = random_model()
    model.save_pretrained(tmp_path)
    return model.num_parameters()


def test_components_of_the_estimate_computed_by_hand(tmp_path, numel):
    layer = {
        "model": {"path": str(tmp_path), "dtype": "bfloat16", "gradient_checkpointing": True},
        "sampling": {"prompts": 8, "samples": 4, "max_prompt_tokens": 30, "max_tokens": 20},
        "objective": {"reference_kl": 0.1},
    }
    estimate = estimate_memory(resolve([layer]), MACHINE)
    assert estimate.always == {
        "weights": 2 * numel,
        "AdamW": 8 * numel,
        "master weights": 4 * numel,
        "reference model": 2 * numel,
        "copy for a checkpoint": 14 * numel,
    }
    assert estimate.update["gradients"] == 4 * numel
    assert estimate.update["gradient of the output layer"] == 23 * 32 * 2
    # 4 updates of 2 prompts with 4 completions. 2 tiles of 220 tokens and 23 words, smaller than the maximum of a tile;
    # 3 times the hidden states of width 32
    assert estimate.update["log-probs and their gradient"] == 2 * (30 + 4 * 20) * 4 * (2 * 23 + 3 * 32)
    cache = next(size for name, size in estimate.sampling.items() if "cache" in name)
    # sequences × tokens × (keys and values) × layers × key-value heads × head size × bytes
    assert cache == 32 * 50 * 2 * 2 * 2 * 8 * 2
    phases = (sum(phase.values()) for phase in (estimate.update, estimate.sampling))
    assert estimate.peak == sum(estimate.always.values()) + max(phases)


def test_with_lora_only_the_adapters_have_gradients_and_optimizer_state(tmp_path, numel):
    linear = [value for name, value in random_model().named_parameters() if "proj.weight" in name]
    adapters = sum(4 * sum(item.shape) for item in linear)
    assert len(linear) == 14
    model = {"path": str(tmp_path), "dtype": "bfloat16", "lora": {"rank": 4}}
    layer = {"model": model, "objective": {"reference_kl": 0.1}}
    estimate = estimate_memory(resolve([layer]), MACHINE)
    assert (estimate.parameters, estimate.trained) == (numel + adapters, adapters)
    assert estimate.always == {
        "weights": 2 * (numel + adapters),
        "AdamW": 8 * adapters,
        "master weights": 4 * adapters,
        "copy for a checkpoint": 14 * adapters,
    }
    assert estimate.update["gradients"] == 4 * adapters
    assert "gradient of the output layer" not in estimate.update
    full = estimate_memory(resolve([layer, {"model": {"lora": None}}]), MACHINE)
    assert full.trained == full.parameters == numel


def test_the_copy_for_a_checkpoint_is_estimated_where_one_is_taken(tmp_path, numel):
    """On a CPU, before the last of 100 steps: weights and two moments, 12 bytes per parameter of a float32 model."""
    for checkpoint, device, copied in (
        ({}, MACHINE, 12 * numel), ({}, GPU, None), ({"background": False}, MACHINE, None),
        ({"every": 0}, MACHINE, None), ({"every": 100}, MACHINE, None),
    ):  # fmt: skip
        config = resolve([{"model": {"path": str(tmp_path), "dtype": "float32"}, "checkpoint": checkpoint}])
        assert estimate_memory(config, device).always.get("copy for a checkpoint") == copied


def test_tokens_of_a_micro_batch(tmp_path):
    for prompts, micro_batch_tokens, ranks, tokens in (
        (8, 8, 1, 50),  # a row with one completion is never split, so a row of 30 + 20 tokens is one pass
        (8, 100, 1, 100),
        (2, 16384, 1, 110),  # all tokens of an update: a prompt and its 4 completions
        (2, 16384, 2, 70),  # shared by the ranks, which all have the prompt
    ):
        layer = {
            "model": {"path": str(tmp_path)},
            "sampling": {"prompts": prompts, "samples": 4, "max_prompt_tokens": 30, "max_tokens": 20},
            "optim": {"updates": 2, "micro_batch_tokens": micro_batch_tokens},
        }
        estimate = estimate_memory(resolve([layer]), MACHINE, ranks=ranks)
        assert f"activations of {tokens} tokens" in estimate.update


def saved_by_packed_rows(model: torch.nn.Module, rows: list[Row]) -> int:
    """Return the bytes of all distinct tensors that the layers save for packed rows, without the parameters."""
    saved: dict[int, torch.Tensor] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    batch = collate(rows, torch.device("cpu"))
    indices = {block.gather_index.data_ptr() for block in batch.packing.blocks}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mask = batch.input_ids.new_ones((1, 1, 1, 1), dtype=torch.bool)
        options = {"position_ids": batch.position_ids, "packing": batch.packing, "use_cache": False}
        model.base_model(batch.input_ids, attention_mask=mask, **options)
    tensors = [tensor for address, tensor in saved.items() if address not in parameters | indices]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor.is_floating_point())


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("kind", "lora", "prompt", "completion", "samples"),
    [
        ("qwen2", None, 300, 80, 4),  # copies of the prompt
        ("llama", LoraSettings(rank=4), 60, 16, 4),  # a mask
        ("llama", None, 60, 80, 1),  # one sequence
        ("qwen2", LoraSettings(rank=4), 300, 80, 4),
        ("qwen2", None, 60, 16, 4),
    ],
)
def test_estimated_activations_equal_those_of_packed_rows(tmp_path, kind, lora, prompt, completion, samples):
    real = random_model(kind)
    real.save_pretrained(tmp_path)
    settings = ModelConfig(path=str(tmp_path), lora=lora)
    if lora is not None:
        add_adapters(real, lora, seed=0, base="")
    meta = build_on_meta_device(settings)
    assert meta.num_parameters() == real.num_parameters()
    tokens = prompt + samples * completion
    ids = [index % 20 for index in range(tokens)]
    row = Row(ids[:prompt], [ids[:completion]] * samples)
    if samples > 1 and tokens <= 512:
        attention = 4 * HEADS * tokens * WIDTH + tokens**2
    else:
        attention = 2 * (HEADS + KEY_VALUE_HEADS) * WIDTH * samples * (prompt + completion)
    estimated = activation_bytes(meta, tokens, settings, attention, on_gpu=True)
    assert estimated == pytest.approx(saved_by_packed_rows(real, [row]), rel=0.05)


@pytest.mark.slow
def test_with_checkpointing_the_peak_of_a_backward_pass_is_the_estimate(tmp_path):
    """Measured at the allocator, without the gradients of parameters: activations and gradients of a layer."""
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 12}
    random_model(scale=1.0, **shape).save_pretrained(tmp_path)
    settings = ModelConfig(path=str(tmp_path), gradient_checkpointing=True, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval().requires_grad_(False)
    new_name = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.23 on
    (new_name or model.gradient_checkpointing_enable)({"use_reentrant": False})
    for layer in checkpointed_layers(model):
        layer.training = True
    batch = collate([Row([1] * 60, [[2] * 200] * 4)] * 2, torch.device("cpu"))
    tokens, width = batch.input_ids.shape[1], shape["hidden_size"] // HEADS
    embedded = torch.randn(1, tokens, shape["hidden_size"], requires_grad=True)
    layout = {"position_ids": batch.position_ids, "packing": batch.packing, "use_cache": False}

    def passes() -> None:
        mask = torch.ones((1, 1, 1, 1), dtype=torch.bool)
        hidden = model.base_model(inputs_embeds=embedded, attention_mask=mask, **layout).last_hidden_state
        torch.autograd.grad(hidden, embedded, torch.ones_like(hidden))

    passes()
    attention = 2 * (HEADS + KEY_VALUE_HEADS) * width * 2 * 4 * 260
    estimate = activation_bytes(build_on_meta_device(settings), tokens, settings, attention, on_gpu=False)
    assert peak_bytes(passes) == pytest.approx(estimate, rel=0.15)


@pytest.mark.parametrize("prompt", [64, 700, 3000])
@pytest.mark.parametrize("samples", [2, 16])
def test_attention_never_holds_more_than_the_estimate(tmp_path, prompt, samples):
    """Groups whose completions all have one length, packed as for training, up to the longest of 600 tokens."""
    text = build_on_meta_device(ModelConfig(path=str(tmp_path))).config
    config = resolve([{"sampling": {"max_prompt_tokens": prompt, "max_tokens": 600, "samples": samples}}])
    estimate = attention_elements(config, text, 16384) / 16384
    measured = []
    for length in (*(2**i for i in range(10)), 600):
        (rows,) = batch_rows([Row(range(prompt), [range(length)] * samples)], 2**20)
        parts = [part for row in rows for part in batch_rows([row], 4096)]
        packings = [collate(part, torch.device("cpu")).packing for part in parts]
        tokens, held = sum(sum(map(sum, packing.rows)) for packing in packings), 0
        for block in (block for packing in packings for block in packing.blocks):
            (count, length), is_masked = block.shape, block.segments is not None
            heads = 4 * HEADS if is_masked else 2 * (HEADS + KEY_VALUE_HEADS)
            held += count * length * (heads * WIDTH + length * is_masked)
        measured.append(held / tokens)
    assert max(measured) <= 1.02 * estimate
    assert max(measured) >= 0.8 * estimate


def test_auto_is_gradient_checkpointing_if_supported(tmp_path, monkeypatch):
    def activations(value: bool | str) -> int:
        settings = ModelConfig(path=str(tmp_path), gradient_checkpointing=value)
        return activation_bytes(build_on_meta_device(settings), TOKENS, settings, 1000, on_gpu=True)

    monkeypatch.setattr("bandpo_cli.models.weights.GradientCheckpointingLayer", ())  # no layer supports it
    assert activations("auto") == activations(False)
    with pytest.raises(UserError, match="do not support it; set it to false"):
        activations(True)
    monkeypatch.undo()
    assert activations("auto") == activations(True) < activations(False)


def test_a_model_whose_memory_does_not_follow_from_shapes_has_no_estimate(tmp_path, monkeypatch):
    settings = ModelConfig(path=str(tmp_path))
    model = build_on_meta_device(settings)

    def look_at_values(*_: object, **__: object) -> None:
        torch.ones(2, device="meta").tolist()

    monkeypatch.setattr(model.base_model, "forward", look_at_values)
    expected = "the memory of qwen2 models cannot be estimated, so that it is not checked$"
    with pytest.raises(NoEstimateError, match=expected):
        activation_bytes(model, TOKENS, settings, 1000, on_gpu=True)


def test_a_folder_with_an_adapter_has_the_memory_of_its_base(tmp_path):
    """`bandpo eval` loads the checkpoints of a run with LoRA, and merges the adapters into the weights."""
    base, adapters = tmp_path / "base", tmp_path / "adapter"
    real = random_model()
    real.save_pretrained(base)
    numel = real.num_parameters()
    add_adapters(real, LoraSettings(rank=4), seed=0, base=str(base))
    adapters.mkdir()
    save_adapter(real, adapters)
    estimate = estimate_memory(resolve([{"model": {"path": str(adapters)}}]), MACHINE, training=False)
    assert estimate.always == {"weights": 4 * numel}


RANKS = 4
MANY_WORDS = 8192
"""Words for which the parameters outside of the layers are most of the model."""


@pytest.fixture
def rank_0_of_4() -> Iterator[Ranks]:
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=fake.FakeStore())
    yield Ranks(0, RANKS, 0)
    dist.destroy_process_group()


def qwen2(words: int, tied: bool, dtype: torch.dtype) -> PreTrainedModel:
    shape = {"hidden_size": 64, "intermediate_size": 255, "num_hidden_layers": 4}
    return random_model(scale=1.0, vocab_size=words, tie_word_embeddings=tied, **shape).to(dtype)


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
    [(64, True, torch.bfloat16), (64, False, torch.float32), (MANY_WORDS, False, torch.float32)],
    ids=["layers", "layers, untied, in float32", "outside of the layers"],
)
def test_the_peak_of_an_update_is_the_estimate(rank_0_of_4, words, tied, dtype):
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
def test_the_peaks_of_gathering_and_of_sending_parameters_are_the_estimates(rank_0_of_4, words):
    model = qwen2(words, False, torch.bfloat16)
    _, _, gathered, sync = fsdp_bytes(model, RANKS)
    shard(model, rank_0_of_4, torch.device("cpu"))

    def gather() -> None:
        with unsharded(model):
            pass

    gather()
    assert peak_bytes(gather) == pytest.approx(gathered["complete parameters"], rel=0.01)
    if words == MANY_WORDS:  # a weight that is much larger than the others
        (sent,) = sync.values()
        assert 0.5 * sent < peak_bytes(lambda: deque(checkpoint_weights(model), maxlen=0)) <= sent


def test_a_model_without_gradients_holds_nothing_complete_after_its_passes(rank_0_of_4):
    """As the reference model, of which an estimate has the share of a rank alone."""
    model = qwen2(64, True, torch.bfloat16).requires_grad_(False)
    shard(model, rank_0_of_4, torch.device("cpu"))
    with torch.no_grad():
        token_logprobs(model, collate([Row([1], [[1]])], torch.device("cpu")))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_the_first_rank_stores_its_share(rank_0_of_4):
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


def test_components_of_the_estimate_of_a_rank_computed_by_hand(tmp_path, numel):
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
