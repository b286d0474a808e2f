"""Folders of models from anyone: nothing re-initialised, no pickles, no code unasked, no size that was not there."""

from __future__ import annotations

import io
import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bandpo_cli.config.run import ModelConfig
from bandpo_cli.errors import UserError
from bandpo_cli.models.load import load_policy, save_policy
from bandpo_cli.models.memory import build_on_meta_device
from tests.fuzz.mutate import JSON_TEXTS, KINDS, as_json, changed_values, damaged, every_value, no_file
from tests.fuzz.outcome import taken
from tests.tasks.stored_completions import mutations
from tests.text_model import save_text_model

ODD_SIZES = (None, True, -1, 0, 1.5, 10**9, 10**18, 10**30, "x", "a\nb", [], {}, [1], float("nan"))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, 119 kB, with a tokenizer and a chat template."""
    return save_text_model(
        tmp_path_factory.mktemp("models") / "good",
        ["one and one is two"] * 5,
        vocabulary=270,
        layers=1,
        hidden=64,
    )


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "model")


def load(folder: Path, **settings: Any) -> Any:
    return load_policy(ModelConfig(path=str(folder), device="cpu", **settings))


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(UserError) as error:
        load(folder, **settings)
    line = str(error.value)
    assert str(folder) in line
    assert line.isprintable()
    return line


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def reweigh(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda weights: weights.pop(NORM), f"missing: {NORM}"),
        (
            lambda weights: weights.update({NORM: torch.ones(63)}),
            f"another shape than config.json says: {NORM}",
        ),
        (lambda weights: weights.update({"model.layers.1.x.weight": torch.ones(3)}), "no part of the model"),
        (lambda weights: weights[NORM].fill_(float("nan")), f"NaN or infinity in its weights: {NORM}"),
        (lambda weights: weights["model.norm.weight"][3:4].fill_(float("-inf")), "NaN or infinity"),
        (lambda weights: weights.clear(), "the weights are 0 tensors"),
    ],
    ids=["missing", "mismatched", "unexpected", "nan", "inf", "none"],
)
def test_weights_that_are_not_the_models(folder: Path, change: Any, part: str) -> None:
    load(folder)
    reweigh(folder, change)
    assert part in refusal(folder)


def test_a_head_beside_the_model_is_let_be(folder: Path) -> None:
    reweigh(folder, lambda weights: weights.update({"v_head.weight": torch.ones(1, 64)}))
    load(folder)


@pytest.mark.parametrize(
    ("setting", "size"),
    [
        ("hidden_size", 10**9),
        ("intermediate_size", 10**12),
        ("vocab_size", 10**9),
        ("num_hidden_layers", 10**6),
        ("num_attention_heads", 10**9),
        ("num_hidden_layers", 2),
        ("hidden_size", 128),
    ],
)
def test_sizes_that_the_weights_have_not(folder: Path, setting: str, size: int) -> None:
    """Nothing of such a size is made: the largest would take a petabyte."""
    edit(folder / "config.json", **{setting: size})
    if setting == "num_hidden_layers" and size > 2:
        edit(folder / "config.json", layer_types=None)
    refusal(folder)


def test_an_estimate_of_memory_lays_no_million_layers_out(folder: Path) -> None:
    edit(folder / "config.json", num_hidden_layers=10**6, layer_types=None)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="num_hidden_layers = 1000000: more than 10,000"):
        build_on_meta_device(ModelConfig(path=str(folder)))


class Planted:
    """Unpickling one of these writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_a_pickle_is_never_read(folder: Path, tmp_path: Path, name: str) -> None:
    planted = tmp_path / "planted"
    (folder / "model.safetensors").unlink()
    torch.save(Planted(planted), folder / name)
    line = refusal(folder)
    assert not planted.exists()
    assert name.endswith(".safetensors") or f"{name}, a pickle" in line
    (folder / name).rename(folder / "x.pt")
    torch.load(folder / "x.pt", weights_only=False)
    assert planted.exists(), "or else the test shows nothing"


@pytest.mark.parametrize("shard", ["a.bin", "../a.safetensors", "/etc/a.safetensors", 5, None])
def test_an_index_names_safetensors_beside_it_alone(folder: Path, shard: Any) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    names = load_file(folder / "a.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "a.safetensors")}))
    load(folder)
    index.write_text(
        json.dumps({"metadata": {}, "weight_map": {**dict.fromkeys(names, "a.safetensors"), NORM: shard}})
    )
    assert "for its weights" in refusal(folder)
    index.unlink()
    edit(folder / "config.json", transformers_weights="adapter_model.bin")
    assert "for its weights" in refusal(folder)


CODE = """
from pathlib import Path
from transformers import Qwen2Config, Qwen2ForCausalLM

Path({mark!r}).touch()


class OwnConfig(Qwen2Config):
    model_type = "own-kind"


class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose architecture is a Python file of its own, which leaves a mark when it is run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "own.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    edit(
        folder / "config.json",
        model_type="own-kind",
        architectures=["OwnModel"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    )
    return folder


def test_code_that_a_folder_brings_is_not_run_unasked(
    own_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 10))  # the loader would ask, and take a yes
    assert "--set model.trust_remote_code=true" in refusal(own_code)
    with pytest.raises(UserError, match=r"model\.trust_remote_code=true"):
        build_on_meta_device(ModelConfig(path=str(own_code)))
    edit(own_code / "config.json", model_type="qwen2")  # transformers has one of its own
    load(own_code)
    assert not (tmp_path / "mark").exists()
    assert sys.stdin.read(), "nobody asked"


def test_code_that_a_folder_brings_runs_when_trusted(own_code: Path, tmp_path: Path) -> None:
    policy = load(own_code, trust_remote_code=True)
    assert (tmp_path / "mark").exists()
    assert type(policy.model).__name__ == "OwnModel"
    save_policy(policy, tmp_path / "again")
    assert type(load(tmp_path / "again", trust_remote_code=True).model).__name__ == "OwnModel"


@pytest.mark.parametrize("eos", [10**6, -1, "x", [[1]], True, 1.5])
def test_an_end_that_is_no_token(folder: Path, eos: Any) -> None:
    edit(folder / "generation_config.json", eos_token_id=eos)
    refusal(folder)


def test_a_tokenizer_of_a_larger_model(folder: Path, tmp_path: Path) -> None:
    larger = save_text_model(
        tmp_path / "larger", ["a text of many other words " * 9], vocabulary=290, layers=1, hidden=64
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(larger / name, folder / name)
    assert "tokenizer has" in refusal(folder)


def test_nothing_but_the_error_is_said(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reweigh(folder, lambda weights: weights.pop(NORM))
    refusal(folder)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("count", [6, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_damaged_descriptions(folder: Path, name: str, count: int) -> None:
    content = (folder / name).read_bytes()
    value = json.loads(content)
    inputs = [*damaged(content, JSON_TEXTS[:: 1 if count > 50 else 6], 1, count)]
    inputs += map(as_json, changed_values(value, 2, count))
    if count > 50 and name != "tokenizer.json":
        inputs += map(as_json, every_value(value, ODD_SIZES))
    found = []
    for each in inputs:
        (folder / name).write_bytes(each)
        found.append(taken(lambda: load(folder), each[:2000]))
    assert 0 < sum(found) < len(found)


@pytest.mark.parametrize("count", [40, pytest.param(1500, marks=pytest.mark.slow)])
def test_damaged_weights(folder: Path, count: int) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, body = content[8 : 8 + length], content[8 + length :]
    inputs = [head + body for head in mutations(content[: 8 + length], 3, count)]
    inputs += [
        struct.pack("<Q", len(head)) + head + body
        for head in map(as_json, changed_values(json.loads(header), 4, count))
    ]
    inputs += [
        b"",
        bytes(100),
        struct.pack("<Q", 2**63),
        struct.pack("<Q", 2) + b"{}",
        content[:-1],
        content + b"x",
    ]
    found = []
    for each in inputs:
        path.write_bytes(each)
        found.append(taken(lambda: load(folder), each[:500]))
    assert sum(found) < len(found)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "memory"])
def test_what_is_no_file(folder: Path, name: str, kind: str) -> None:
    with no_file(folder / name, kind):
        assert not taken(lambda: load(folder), (name, kind))
