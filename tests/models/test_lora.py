"""LoRA: adapters compute, train, merge and load as their definition and peft say."""

from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from bandpo_cli.config.run import LoraSettings, ModelConfig
from bandpo_cli.errors import UserError
from bandpo_cli.models import lora
from bandpo_cli.models.load import load_policy, load_reference
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.lora import adapter_parameters, add_adapters, lora_layers
from bandpo_cli.models.packing import Row, collate
from bandpo_cli.models.weights import (
    adapter_weights,
    checkpoint_weights,
    load_adapter,
    load_weights,
    save_adapter,
    weights_to_save,
)
from bandpo_cli.processes.ranks import SINGLE
from tests.conftest import random_model

BATCH = collate([Row([2, 3, 4], [[5, 6], [7]]), Row([8], [[9, 10]])], torch.device("cpu"))
SETTINGS = LoraSettings(rank=3, alpha=12)
PREFIX = "base_model.model."


def adapted(kind: str = "qwen2", dtype: Any = torch.float32, settings: Any = SETTINGS) -> PreTrainedModel:
    """Return a random model whose adapters are not at their start, where they change nothing."""
    model = random_model(kind).to(dtype)
    add_adapters(model, settings, seed=5, base="base")
    torch.manual_seed(1)
    with torch.no_grad():
        for _, parameter in adapter_parameters(model):
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    return model


def logprobs_of(model: Any) -> torch.Tensor:
    return token_logprobs(model, BATCH).logprobs


def test_the_gradient_is_that_of_plain_weights():
    """The model without adapters, with weights W + s·B·A that plain autograd differentiates."""
    model, plain = adapted("llama"), random_model("llama")
    found = logprobs_of(model)
    found.square().sum().backward()

    adapters = dict(adapter_parameters(model))
    leaves = {name: value.detach().clone().requires_grad_() for name, value in adapters.items()}
    layers = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in leaves}
    assert len(layers) == 14, "q, k, v, o, gate, up, down of two decoder layers"
    for name in layers:
        module = plain.get_submodule(name)
        weight = module.weight.detach()
        del module.weight  # a parameter, in whose place a tensor with a history would be refused
        b, a = (leaves[f"{PREFIX}{name}.lora_{part}.weight"] for part in "BA")
        module.weight = weight + 12 / 3 * b @ a
    expected = logprobs_of(plain)
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for name, leaf in leaves.items():
        assert leaf.grad.any()
        # Both are float32; seen up to 2.5e-5, depending on the processor.
        scale = leaf.grad.abs().max().item()
        torch.testing.assert_close(adapters[name].grad, leaf.grad, atol=1e-4 * scale, rtol=0)
    with_gradient = {name for name, value in model.named_parameters() if value.grad is not None}
    assert with_gradient == {name for name, value in model.named_parameters() if value.requires_grad}
    assert len(with_gradient) == len(leaves)


@pytest.mark.slow
def test_the_start_is_the_model_itself_and_depends_on_the_seed_of_the_run():
    model = random_model()
    expected = logprobs_of(model)
    add_adapters(model, SETTINGS, seed=5, base="base")
    assert torch.equal(logprobs_of(model), expected)
    before = torch.random.get_rng_state()
    settings = ModelConfig(device="cpu", lora=SETTINGS)
    first, again, other = (
        dict(adapter_weights(load_policy(settings, seed=seed).model)) for seed in (7, 7, 8)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert not tensor.any() if ".lora_B." in name else not torch.equal(tensor, other[name])


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 7), (torch.float16, 10)])
def test_merged_weights_are_neighbours_of_the_exact_sum_and_right_on_average(dtype, bits):
    """The exact sum in float64 of what the passes compute with; float16 has no more than 2⁻²⁴ between two numbers."""
    model = adapted(dtype=dtype)
    weights, parameters = dict(checkpoint_weights(model)), dict(model.named_parameters())
    layers = lora_layers(model)
    assert len(layers) == 14
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    errors = []
    for name, layer in layers.items():
        a, b = (item["default"].weight.double() for item in (layer.lora_A, layer.lora_B))
        exact = (parameters[f"{name}.base_layer.weight"].double() + 4 * b @ a).detach()
        unit = torch.exp2(exact.abs().log2().floor().clamp(min=-14) - bits)
        errors.append(((weights[f"{name}.weight"].double() - exact) / unit).flatten())
    error = torch.cat(errors)
    assert error.abs().max() < 1 + 1e-3
    # The largest standard deviation of stochastic rounding is half a unit.
    assert error.mean().abs() < 4 * 0.5 / len(error) ** 0.5
    assert error.std() > 0.3


def test_merged_weights_depend_on_name_and_sum_alone():
    weight, a, b = (torch.randn(shape).bfloat16() for shape in ((40, 30), (2, 30), (40, 2)))
    before = torch.random.get_rng_state()
    first = lora.merged_weight("layer.weight", weight, a, 1e-3 * b, 1.0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, lora.merged_weight("layer.weight", weight, a, 1e-3 * b, 1.0))
    assert not torch.equal(first, lora.merged_weight("other.weight", weight, a, 1e-3 * b, 1.0))
    assert torch.equal(lora.merged_weight("layer.weight", weight, a, 0 * b, 1.0), weight)
    raised = (first.float().abs() > weight.float().abs()) & (first != weight)
    more = lora.merged_weight("layer.weight", weight, a, 2e-3 * b, 1.0)
    assert raised.any()
    assert (more.float().abs() >= first.float().abs())[raised].all(), "an element falls while its sum grows"


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.up_proj"], ids=["bias", "no bias"])
def test_a_layer_in_bfloat16_rounds_the_sum_of_both_terms_once(name):
    """peft rounds W·x first, which drops a term of less than half a unit in the last place."""
    torch.manual_seed(0)
    model = random_model("qwen2").bfloat16()  # its q, k and v projections have a bias
    plain = model.get_submodule(f"model.layers.0.{name}")
    assert (plain.bias is not None) == (name == "self_attn.q_proj")
    add_adapters(model, SETTINGS, seed=5, base="base")
    layer: Any = model.get_submodule(f"model.layers.0.{name}")
    x = torch.randn(4, 500, 32).bfloat16()
    assert torch.equal(layer(x), plain(x)), "the start is the model itself; its bias is 0"
    with torch.no_grad():
        layer.lora_B["default"].weight.copy_(1e-4 * torch.randn(layer.out_features, 3))
        a, b = (item["default"].weight.double() for item in (layer.lora_A, layer.lora_B))
        exact = 4 * x.double() @ a.T @ b.T
        found = [layer(x), peft.tuners.lora.Linear.forward(layer, x)]
        changes = [item.double() - plain(x).double() for item in found]
        shares = [((change * exact).sum() / exact.square().sum()).item() for change in changes]
    assert shares[0] == pytest.approx(1.0, abs=0.05)
    assert shares[1] < 0.5


def test_peft_loads_and_merges_saved_adapters(tmp_path):
    model = adapted()
    save_adapter(model, tmp_path)
    loaded = peft.PeftModel.from_pretrained(random_model(), tmp_path)
    config = loaded.peft_config["default"]
    assert (config.r, config.lora_alpha, config.base_model_name_or_path) == (3, 12, "base")
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        found, expected = model(input_ids=ids).logits, loaded(input_ids=ids).logits
    assert torch.equal(found, expected)
    merged, weights = loaded.merge_and_unload(), dict(checkpoint_weights(model))
    parameters = dict(merged.named_parameters())
    assert weights.keys() == parameters.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, parameters[name].detach(), atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(logprobs_of(merged), logprobs_of(model), atol=2e-5, rtol=0)


def test_adapters_load_into_the_same_tensors_of_the_same_layers_and_rank(tmp_path):
    model, other = adapted(), random_model()
    add_adapters(other, SETTINGS, seed=9, base="base")
    weights = {name: value.clone() for name, value in weights_to_save(model, SINGLE).items()}
    save_adapter(model, tmp_path, weights)
    before = [parameter for _, parameter in adapter_parameters(other)]
    load_weights(other, tmp_path, SINGLE)
    assert all(one is two for one, (_, two) in zip(before, adapter_parameters(other), strict=True))
    with torch.no_grad():
        assert torch.equal(logprobs_of(other), logprobs_of(model))
    for settings, message in (
        (LoraSettings(rank=3, target_modules=("q_proj",)), "other layers"),
        (LoraSettings(rank=2), "another rank"),
    ):
        with pytest.raises(ValueError, match=message):
            load_adapter(model, dict(adapter_weights(adapted(settings=settings))))


def test_the_reference_is_the_model_without_adapters():
    """It has no copy of the model, and training continues after its passes."""
    settings = ModelConfig.model_validate({"device": "cpu", "dtype": "bfloat16", "lora": {"rank": 4}})
    policy = load_policy(settings)
    reference = load_reference(policy, settings)
    assert reference.model is policy.model
    with torch.no_grad(), reference.passes() as model:
        at_start = logprobs_of(model)
    with torch.no_grad():
        assert torch.equal(logprobs_of(policy.model), at_start)
        for _, parameter in adapter_parameters(policy.model):
            parameter.fill_(0.02)
    with torch.no_grad(), reference.passes() as model:
        assert torch.equal(logprobs_of(model), at_start)
        # A sharded model notes at its first pass, which may be one of the reference, which parameters are trained.
        assert all(parameter.requires_grad for _, parameter in adapter_parameters(model))
    with policy.passes() as model:
        found = logprobs_of(model)
        assert not torch.equal(found, at_start)
        found.sum().backward()
    assert all(parameter.grad is not None for _, parameter in adapter_parameters(policy.model))
    with pytest.raises(RuntimeError, match="stop"), reference.passes():
        raise RuntimeError("stop")
    assert not any(layer.disable_adapters for layer in lora_layers(policy.model).values())


def test_targets_are_names_as_peft_matches_them():
    """An output layer of the same name as a layer inside gets no adapter: the layer is given by its complete name."""
    model: Any = random_model("llama")
    every = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert lora.target_names(model, LoraSettings(rank=2)) == every
    model.model.layers[0].mlp.lm_head = nn.Linear(4, 4)
    names = lora.target_names(model, LoraSettings(rank=2))
    assert sorted(names) == sorted([*every, "model.layers.0.mlp.lm_head"])
    one = LoraSettings(rank=2, target_modules=("mlp.up_proj", "layers.1.self_attn.q_proj"))
    layers = lora_layers(adapted(settings=one))
    assert set(layers) == {
        f"model.layers.{name}" for name in ("0.mlp.up_proj", "1.mlp.up_proj", "1.self_attn.q_proj")
    }


@pytest.mark.parametrize(
    "targets",
    [["lm_head"], ["q_proj", "embed_tokens"], ["input_layernorm"], ["self_attn"], ["q_prj"], ["proj"]],
)
def test_targets_that_get_no_adapter_are_refused(targets):
    with pytest.raises(UserError) as error:
        lora.target_names(random_model("llama"), LoraSettings(rank=2, target_modules=tuple(targets)))
    line = str(error.value)
    assert line.startswith(f"model.lora.target_modules: {targets[-1]!r} names no linear layers")
    assert line.endswith("up_proj, v_proj, or leave it out for all of them")
    assert ("did you mean 'q_proj'" in line) == (targets == ["q_prj"])


def test_a_rank_above_that_of_all_layers_and_a_model_without_linear_layers_are_refused():
    model = random_model()  # 32 wide
    for rank, names, message in (
        (33, None, r"model.lora.rank = 33: .* has rank 32"),
        (17, ("k_proj",), r"model.lora.rank = 17: .* has rank 16"),
    ):
        with pytest.raises(UserError, match=message):
            lora.target_names(model, LoraSettings(rank=rank, target_modules=names))
    lora.target_names(model, LoraSettings(rank=32))
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            model.set_submodule(name, nn.Identity())
    with pytest.raises(UserError, match="qwen2 models have no linear layers"):
        lora.target_names(model, LoraSettings(rank=2))


def test_alpha_is_twice_the_rank_unless_it_is_given():
    assert LoraSettings(rank=16).scaling == 2.0
    assert LoraSettings(rank=16, alpha=8).scaling == 0.5
    (layer, *_) = lora_layers(adapted(settings=LoraSettings(rank=3, alpha=1.5))).values()
    assert layer.scaling["default"] == 0.5
