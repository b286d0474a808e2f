"""Model settings take effect, and models for which `token_logprobs` would be wrong are refused with one line."""

import warnings
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, MambaConfig, MambaForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from bandpo_cli.config.run import ModelConfig
from bandpo_cli.errors import UserError
from bandpo_cli.models import logprobs
from bandpo_cli.models.load import check_packed_forward, embedded_model_path, load_policy, load_reference
from bandpo_cli.models.logprobs import token_logprobs
from bandpo_cli.models.packing import Row, collate
from bandpo_cli.models.weights import checkpointed_layers
from tests.conftest import SHAPE, random_model

ROWS = [Row([2, 3, 4], [[5, 6], [7]]), Row([8], [[9, 10]])]


def test_settings_take_effect_and_log_probs_agree():
    settings = [{}, {"attention": "sdpa"}, {"attention": "eager"}, {"dtype": "bfloat16"}]
    torch.backends.cuda.enable_cudnn_sdp(True)
    models = [load_policy(ModelConfig.model_validate({**item, "device": "cpu"})).model for item in settings]
    assert [model.config._attn_implementation for model in models] == ["sdpa", "sdpa", "eager", "sdpa"]
    assert [model.dtype for model in models] == [torch.float32] * 3 + [torch.bfloat16]
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "in the recomputation of a backward pass too"
    batch = collate(ROWS, torch.device("cpu"))
    plain, sdpa, eager, low = (token_logprobs(model, batch).logprobs.detach() for model in models)
    assert torch.equal(sdpa, plain)
    torch.testing.assert_close(eager, plain, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(low, plain, atol=0.3, rtol=0.05)


@pytest.mark.parametrize(("setting", "enabled"), [("auto", False), (True, True)])
def test_gradient_checkpointing_is_off_without_a_gpu_and_enabled_silently(setting, enabled):
    """transformers 5.23 has another name for it than 5.22, and prints a warning for the old name."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = load_policy(ModelConfig(device="cpu", gradient_checkpointing=setting))
    assert {layer.gradient_checkpointing for layer in checkpointed_layers(policy.model)} == {enabled}


@pytest.mark.slow
def test_compiled_layers_have_the_log_probs_gradients_and_names_of_plain_ones():
    batch = collate(ROWS, torch.device("cpu"))
    results = []
    for compiled in (False, True):
        model = load_policy(ModelConfig(device="cpu", compile=compiled, gradient_checkpointing=True)).model
        layer = checkpointed_layers(model)[0]
        is_compiled = {name: child._compiled_call_impl is not None for name, child in layer.named_children()}
        assert is_compiled == {name: compiled and name != "self_attn" for name in is_compiled}
        logprobs = token_logprobs(model, batch).logprobs
        logprobs.sum().backward()
        results.append(
            {"": logprobs.detach(), **{name: item.grad for name, item in model.named_parameters()}}
        )
    plain, fused = results
    torch.testing.assert_close(fused, plain, atol=1e-4, rtol=1e-4)


def test_a_machine_that_cannot_compile_is_one_line(monkeypatch):
    def fail(_: Any) -> None:
        raise RuntimeError("no compiler\ntrace")

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(UserError, match=r"^model.compile: .* needs a C\+\+ compiler, fails: no compiler$"):
        load_policy(ModelConfig(device="cpu", compile=True))


def test_the_tiles_of_the_output_layer_have_the_size_of_the_setting(monkeypatch):
    sizes: list[int | None] = []

    class Recorder(logprobs._Tiles):
        def __init__(self, *arguments: Any) -> None:
            sizes.append(arguments[-1])
            super().__init__(*arguments)

    monkeypatch.setattr(logprobs, "_Tiles", Recorder)
    batch = collate(ROWS, torch.device("cpu"))
    for setting, size in (("auto", None), (3, 3 * 2**20)):
        config = ModelConfig.model_validate({"head": setting, "device": "cpu"})
        policy = load_policy(config)
        for model in (policy.model, load_reference(policy, config).model):
            values = token_logprobs(model, batch).logprobs
        token_logprobs(policy.model, batch).logprobs.sum().backward()
        assert {*sizes} == {size}
        sizes.clear()
    assert values.isfinite().all()


def test_the_reference_does_not_change_with_the_policy():
    policy = load_policy(ModelConfig(device="cpu"))
    copy = load_reference(policy, ModelConfig(device="cpu")).model
    batch = collate(ROWS, policy.device)
    before = token_logprobs(copy, batch).logprobs
    assert not before.requires_grad
    with torch.no_grad():
        next(policy.model.parameters()).add_(1.0)
    assert torch.equal(token_logprobs(copy, batch).logprobs, before)
    assert not torch.equal(token_logprobs(policy.model, batch).logprobs, before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="flash-attn may be installed")
@pytest.mark.parametrize(
    ("attention", "needed"),
    [("flash_attention_2", "the package flash-attn "), ("flash_attention_3", "the package flash-attn-3 "),
     ("varlen", "a GPU, which this machine lacks")],
)  # fmt: skip
def test_kernels_that_are_not_at_hand_are_refused(attention, needed):
    config = ModelConfig.model_validate({"attention": attention, "dtype": "bfloat16"})
    with pytest.raises(UserError, match=rf"'{attention}' needs {needed}.*model.attention=sdpa") as error:
        load_policy(config)
    assert "\n" not in str(error.value)


def test_flash_attention_with_float32_is_refused(monkeypatch):
    monkeypatch.setattr("bandpo_cli.models.load.is_flash_attn_2_available", lambda: True)
    with pytest.raises(UserError, match=r"model.dtype=bfloat16"):
        load_policy(ModelConfig(attention="flash_attention_2"))


def test_changed_logits_are_detected(monkeypatch):
    """By the name of the config's setting, and without such a name, since the check compares log-probs."""
    model = random_model("llama")
    forward = model.forward

    def scaled(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.1
        return output

    monkeypatch.setattr(model, "forward", scaled)
    with pytest.raises(UserError, match="llama models are not supported"):
        check_packed_forward(model)
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(UserError, match="final_logit_softcapping"):
        check_packed_forward(model)


def test_layers_that_carry_a_state_are_refused():
    """Their state would continue from one packed row into the next."""
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "layer_types": ["linear_attention"] * 2}
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**SHAPE, head_dim=8, **experts)).eval()
    with pytest.raises(UserError, match="linear_attention layers"):
        check_packed_forward(model)
    model.config.layer_types = None  # an architecture without this entry in its config
    with pytest.raises(UserError, match=r"packed rows|without padding"):
        check_packed_forward(model)


def test_architecture_that_cannot_be_trained_loads_for_evaluation(tmp_path):
    """Mamba's layers carry a state from row to row; sampling and evaluation run each sequence separately."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    shape = MambaConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=1, pad_token_id=0, bos_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    MambaForCausalLM(shape).save_pretrained(tmp_path)
    settings = ModelConfig(path=str(tmp_path), device="cpu")
    with pytest.raises(UserError, match="linear_attention layers"):
        load_policy(settings)
    assert load_policy(settings, for_training=False).model.config.model_type == "mamba"
