"""Adapter folders: what peft writes is merged as peft merges it, and anything else is refused in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from bandpo_cli.config.run import ModelConfig
from bandpo_cli.errors import UserError
from bandpo_cli.models.load import embedded_model_path, load_policy
from bandpo_cli.models.lora import adapter_parameters
from bandpo_cli.models.model_files import base_config, merge_adapter
from bandpo_cli.models.weights import checkpoint_weights, save_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def load(path: Path, **settings: Any) -> Any:
    return load_policy(ModelConfig(path=str(path), device="cpu", **settings), for_training=False)


def setting(**settings: Any) -> Callable[[Path], Any]:
    """Return a function that changes settings in the config of a folder."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(content | settings))

    return edit


def write(folder: Path, **settings: Any) -> Path:
    """Save an adapter of the bundled model with peft, whose weights change the model, and return its folder."""
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], **settings)
    model = peft.get_peft_model(load(embedded_model_path()).model, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def written_by_peft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("peft") / "adapter")


@pytest.fixture
def adapter(written_by_peft: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written_by_peft, tmp_path / "adapter")


@pytest.fixture(scope="module")
def base() -> Any:
    """The bundled model, which tests change only by the first layers of an adapter that is refused."""
    return load(embedded_model_path()).model


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "rank_pattern": {"down_proj": 2}}], ids=str)
def test_an_adapter_of_peft_is_merged_as_by_peft(tmp_path, settings):
    folder, base = write(tmp_path, **settings), load(embedded_model_path()).model
    unmerged = {name: value.clone() for name, value in base.named_parameters()}
    merged = peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
    found = dict(load(folder).model.named_parameters())
    changed = 0
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(found[name].detach(), parameter.detach(), atol=1e-6, rtol=1e-6)
        changed += not torch.equal(parameter, unmerged[name])
    assert changed == 2 * len(base.model.layers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_saved_policy_loads_with_the_weights_that_the_sampler_gets(tmp_path, dtype):
    settings = ModelConfig.model_validate({"device": "cpu", "dtype": dtype, "lora": {"rank": 4}})
    policy = load_policy(settings)
    with torch.no_grad():
        for _, parameter in adapter_parameters(policy.model):
            parameter.copy_(0.1 * torch.randn(parameter.shape))
    save_adapter(policy.model, tmp_path)
    stated = json.loads((tmp_path / CONFIG).read_text())
    assert stated["base_model_name_or_path"] == str(embedded_model_path().absolute())
    assert stated["target_modules"] == sorted(stated["target_modules"])
    assert stated["inference_mode"] is True
    policy.tokenizer.add_special_tokens({"additional_special_tokens": ["7"]})
    policy.tokenizer.save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype=dtype)
    expected = dict(checkpoint_weights(policy.model))
    assert loaded.model.dtype == getattr(torch, dtype)
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert "7" in loaded.tokenizer.all_special_tokens  # the tokenizer of the folder, not of the base


def test_the_base_is_the_bundled_model_of_any_installation_or_a_revision_on_the_hub(adapter):
    setting(base_model_name_or_path="/elsewhere/bandpo_cli/models/embedded")(adapter)
    assert base_config(ModelConfig(path=str(adapter)))[0].path == "embedded"
    setting(base_model_name_or_path="owner/model", revision="abc")(adapter)
    config, _ = base_config(ModelConfig(path=str(adapter), dtype="bfloat16"))
    assert (config.path, config.revision, config.dtype) == ("owner/model", "abc", "bfloat16")


def change_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return apply


A, B = f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight"
DEFECTS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no base": (setting(base_model_name_or_path="/nowhere"), ["/nowhere does not exist", "base_model_name_or_path"]),
    "base is null": (setting(base_model_name_or_path=None), ["names no model"]),
    "alpha": (setting(lora_alpha="many"), ["lora_alpha = 'many'"]),
    "alpha is not finite": (setting(lora_alpha=float("inf")), ["lora_alpha = inf"]),
    "not LoRA": (setting(peft_type="IA3"), ["peft_type = IA3", "merge_and_unload"]),
    "dora": (setting(use_dora=True), ["use_dora = True", "merge_and_unload"]),
    "bias": (setting(bias="all"), ["bias = all"]),
    "pissa": (setting(init_lora_weights="pissa"), ["init_lora_weights = pissa"]),
    "alpha pattern": (setting(alpha_pattern={"q_proj": 3}), ["alpha_pattern"]),
    "a later variant": (setting(use_something_new={"k": 1}), ["use_something_new"]),
    "not JSON": (lambda folder: (folder / CONFIG).write_text("{"), ["not readable as JSON"]),
    "a list": (lambda folder: (folder / CONFIG).write_text("[]"), ["expected a JSON object"]),
    "a pickle": (lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"), ["it has no adapter_model.s"]),
    "damaged": (lambda folder: (folder / WEIGHTS).write_bytes(b"half"), ["cannot be read"]),
    "no pair": (change_tensors(lambda t: t.pop(B)), ["lora_B of [0] do not match"]),
    "rank": (change_tensors(lambda t: t.update({B: torch.zeros(128, 3)})), ["lora_B of [128, 3]"]),
    "shape": (change_tensors(lambda t: t.update({B: torch.zeros(7, 4)})), ["of the base model, [128, 128]"]),
    "other layer": (
        change_tensors(lambda t: t.update({key.replace("s.0.", "s.9."): t.pop(key) for key in (A, B)})),
        ["layers.9.self_attn.q_proj", "the weights of the base model, [0]"],
    ),
    "embedding": (
        change_tensors(lambda t: t.update({"base_model.model.model.embed_tokens.weight": torch.zeros(2)})),
        ["embed_tokens"],
    ),
    "no tensors": (change_tensors(lambda t: t.clear()), ["no tensor"]),
    "NaN": (change_tensors(lambda tensors: tensors[A].fill_(float("nan"))), ["NaN or infinity", "lora_A"]),
    "integers": (change_tensors(lambda t: t.update({A: t[A].int()})), ["no floating-point numbers"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_what_cannot_be_merged_is_refused_in_one_line(adapter, base, name):
    damage, parts = DEFECTS[name]
    damage(adapter)
    with pytest.raises(UserError) as error:
        [base_config(ModelConfig(path=str(adapter))), merge_adapter(base, adapter)]
    assert "\n" not in str(error.value)
    assert [part for part in (str(adapter), *parts) if part not in str(error.value)] == []
