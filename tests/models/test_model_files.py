"""Untrusted model folders: no random weights, no pickles, no custom code by default, no huge declared sizes."""

import io
import json
import math
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bandpo_cli.config.run import ModelConfig
from bandpo_cli.errors import ConfigError, UserError
from bandpo_cli.models.load import load_policy, save_policy
from bandpo_cli.models.memory_estimate import build_on_meta_device
from bandpo_cli.paths import check_regular_file
from tests.fuzz import mutate
from tests.fuzz.mutate import JSON_TEXTS, KINDS, as_json, changed_values, not_a_file
from tests.fuzz.outcome import accepts, check_both_outcomes
from tests.tasks.stored_completions import mutations
from tests.text_model import save_text_model

NORM, WEIGHTS = "model.layers.0.input_layernorm.weight", "model.safetensors"
ODD_SIZES = (None, True, -1, 0, 1.5, 10**9, 10**18, 10**30, "x", "a\nb", [], {}, [1], float("nan"))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with one layer, 119 kB, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "good"
    return save_text_model(folder, ["one and one is two"] * 5, vocabulary=270, layers=1, hidden=64)


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "model")


def load(folder: Path, **settings: Any) -> Any:
    return load_policy(ModelConfig(path=str(folder), device="cpu", **settings))


def load_error(folder: Path, **settings: Any) -> str:
    """Return the error message of loading the folder, which must be one line that names the folder."""
    with pytest.raises(UserError) as error:
        load(folder, **settings)
    line = str(error.value)
    assert str(folder) in line
    assert line.isprintable()
    return line


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder: Path, change: Callable[[Any], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def lfs_pointer(path: Path) -> None:
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 123456\n")


def test_a_pointer_of_git_lfs_has_fewer_than_1024_bytes(tmp_path):
    lfs_pointer(file := tmp_path / "file")
    pointer = file.read_bytes()
    file.write_bytes(pointer.ljust(1023))
    with pytest.raises(
        ConfigError, match=r"^the data: is a git-lfs pointer without the content of the file; run"
    ):
        check_regular_file(file, "the data")
    file.write_bytes(pointer.ljust(1024))
    assert check_regular_file(file, "the data") == 1024
    with pytest.raises(ConfigError, match=r"^the data: No such file or directory$"):
        check_regular_file(tmp_path / "missing", "the data")


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def without_end(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, eos_token_id=None)


def with_larger_tokenizer(folder: Path) -> None:
    text = ["a text of many other words " * 9]
    larger = save_text_model(folder.parent / "larger", text, vocabulary=290, layers=1, hidden=64)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(larger / name, folder / name)


END = "tokenizer_config.json (eos_token), or by id in its generation_config.json (eos_token_id)"
WEIGHT_DEFECTS: list[tuple[Callable[[Any], object], str]] = [
    (lambda w: w.pop(NORM), f"missing: {NORM}"),
    (lambda w: w.update({NORM: torch.ones(63)}), f"another shape than in config.json: {NORM}"),
    (lambda w: w["model.norm.weight"][3:4].fill_(-math.inf), "NaN or infinity in its weights: model.norm"),
    (lambda w: w.update({"model.layers.1.x.weight": torch.ones(3)}), "not in the model of config.json"),
    (lambda w: w.clear(), "the weights hold 0"),
]
DEFECTS: list[tuple[Callable[[Path], Any], str]] = [
    *((lambda folder, w=change: change_weights(folder, w), words) for change, words in WEIGHT_DEFECTS),
    (lambda folder: (folder / WEIGHTS).unlink(), "it has no weights; copy model.safetensors"),
    (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "copy tokenizer.json and tokenizer_config"),
    (lambda folder: (folder / WEIGHTS).rename(folder / "model-q4.gguf"), "model-q4.gguf; GGUF holds quantized weights"),
    (lambda folder: lfs_pointer(folder / WEIGHTS), f"{WEIGHTS}: is a git-lfs pointer without the content"),
    (lambda folder: lfs_pointer(folder / "tokenizer.json"), "tokenizer.json: is a git-lfs pointer"),
    (lambda folder: cut(folder / WEIGHTS, 0.6), f"{WEIGHTS} is cut or damaged ("),
    (lambda folder: cut(folder / WEIGHTS, 0), f"{WEIGHTS} is cut or damaged"),
    (
        lambda folder: edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        "its weights are quantized ('gptq'), which cannot be trained; name the model with weights of 16 or 32 bits",
    ),
    (without_end, END),
    (with_larger_tokenizer, "tokenizer has"),
    *(
        (lambda folder, eos=eos: edit_json(folder / "generation_config.json", eos_token_id=eos), "of its 270 tokens")
        for eos in (10**6, "x", True)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), DEFECTS)
def test_a_folder_that_is_not_a_complete_model_is_refused(folder, capfd, damage, words):
    damage(folder)
    assert words in load_error(folder)
    assert capfd.readouterr() == ("", ""), "the loader prints nothing besides the error"


@pytest.mark.parametrize("share", [0, 0.001, 0.6])
def test_the_estimate_of_memory_names_damaged_weights(folder, share):
    """A dry run reads the sizes of the weights, and nothing else of them."""
    cut(folder / WEIGHTS, share)
    with pytest.raises(UserError, match=f"{WEIGHTS} is cut or damaged"):
        build_on_meta_device(ModelConfig(path=str(folder)))


def test_weights_of_another_head_are_ignored(folder):
    before = load(folder).model.state_dict()
    change_weights(folder, lambda weights: weights.update({"v_head.weight": torch.ones(1, 64)}))
    after = load(folder).model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_declared_sizes_that_the_weights_do_not_have_are_refused(folder):
    """Nothing of such a size is allocated: the largest would take a petabyte. A million layers are not built."""
    content = (folder / "config.json").read_text()
    for change in (
        {"hidden_size": 10**9}, {"intermediate_size": 10**12}, {"num_attention_heads": 10**9},
        {"num_hidden_layers": 2}, {"hidden_size": 128}, {"num_hidden_layers": 10**6, "layer_types": None},
    ):  # fmt: skip
        (folder / "config.json").write_text(content)
        edit_json(folder / "config.json", **change)
        load_error(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match="num_hidden_layers = 1000000: more than 10,000"):
        build_on_meta_device(ModelConfig(path=str(folder)))


@dataclass
class WritesFileWhenUnpickled:
    path: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", WEIGHTS])
def test_a_pickle_is_never_read(folder, tmp_path, name):
    written = tmp_path / "written"
    (folder / WEIGHTS).unlink()
    torch.save(WritesFileWhenUnpickled(written), folder / name)
    line = load_error(folder)
    assert not written.exists()
    assert name.endswith(".safetensors") or f"{name}, a pickle" in line
    (folder / name).rename(folder / "x.pt")
    torch.load(folder / "x.pt", weights_only=False)
    assert written.exists(), "unpickling must write the file, or the test proves nothing"


@pytest.mark.parametrize("shard", ["a.bin", "../a.safetensors", None])
def test_index_may_only_name_safetensors_in_its_folder(folder, shard):
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    index = folder / "model.safetensors.index.json"
    names = load_file(folder / "a.safetensors")
    content = {"metadata": {}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    index.write_text(json.dumps(content))
    load(folder)
    content["weight_map"][NORM] = shard
    index.write_text(json.dumps(content))
    assert "for its weights" in load_error(folder)
    index.unlink()
    edit_json(folder / "config.json", transformers_weights="adapter_model.bin")
    assert "for its weights" in load_error(folder)


CODE = """
from pathlib import Path
from transformers import Qwen2Config, Qwen2ForCausalLM

Path({mark!r}).touch()


class CustomConfig(Qwen2Config):
    model_type = "custom-type"


class CustomModel(Qwen2ForCausalLM):
    config_class = CustomConfig
"""


@pytest.fixture
def custom_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose architecture is a Python file in it, which writes a marker file when it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (folder / "custom.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    edit_json(
        folder / "config.json",
        model_type="custom-type",
        architectures=["CustomModel"],
        auto_map={"AutoConfig": "custom.CustomConfig", "AutoModelForCausalLM": "custom.CustomModel"},
    )
    return folder


def test_custom_code_never_runs_unasked(custom_code, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 10))  # the loader would prompt, and accept a yes
    assert "--set model.trust_remote_code=true" in load_error(custom_code)
    with pytest.raises(UserError, match=r"model\.trust_remote_code=true"):
        build_on_meta_device(ModelConfig(path=str(custom_code)))
    edit_json(custom_code / "config.json", model_type="qwen2")  # transformers has this architecture itself
    load(custom_code)
    assert not (tmp_path / "mark").exists()
    assert sys.stdin.read(), "the loader must not prompt"


def test_custom_code_runs_when_trusted(custom_code, tmp_path):
    policy = load(custom_code, trust_remote_code=True)
    assert (tmp_path / "mark").exists()
    assert type(policy.model).__name__ == "CustomModel"
    save_policy(policy, tmp_path / "again")
    assert type(load(tmp_path / "again", trust_remote_code=True).model).__name__ == "CustomModel"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_damaged_json_files_raise_user_errors(folder, name):
    """Bytes changed, entries changed at random, and entries of unusual values; some texts for two of the parsers."""
    content = (folder / name).read_bytes()
    value = json.loads(content)
    inputs = [*mutations(content, 1, 3), *map(as_json, changed_values(value, 2, 6))]
    if name in ("config.json", "tokenizer.json"):
        inputs += [*mutate.file_variants(content, JSON_TEXTS[::12])][::2]
    else:
        odd = [{**value, key: size} for size in ODD_SIZES for key in value]
        inputs += map(as_json, odd[:: len(odd) // 6])
    check_both_outcomes(lambda: load(folder), folder / name, inputs)


def test_damaged_weights_raise_user_errors(folder):
    path = folder / WEIGHTS
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header, body = content[8 : 8 + length], content[8 + length :]
    heads = map(as_json, changed_values(json.loads(header), 4, 10))
    inputs = [head + body for head in mutations(content[: 8 + length], 3, 10)]
    inputs += [struct.pack("<Q", len(head)) + head + body for head in heads]
    inputs += [b"", bytes(100), struct.pack("<Q", 2**63), content[:-1], content + b"x"]
    inputs += [struct.pack("<Q", 2) + b"{}"]
    check_both_outcomes(lambda: load(folder), path, [*inputs, content])


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS])
def test_names_that_are_not_regular_files_raise_user_errors(folder, name):
    for kind in KINDS:
        if kind != "memory":
            with not_a_file(folder / name, kind):
                assert not accepts(lambda: load(folder), (name, kind))
