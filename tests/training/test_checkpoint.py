"""A checkpoint holds all that training goes on from, bit for bit, and a crash or a full disk leaves none by half."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bandpo_cli.config.run import ModelConfig, OptimConfig
from bandpo_cli.errors import RunError, UserError
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.storage.checkpoints import Progress
from bandpo_cli.training.components import load_checkpoint, save_checkpoint
from bandpo_cli.training.optimizer import Optimizer
from tests.conftest import random_model

STEP = Progress(step=10, updates=3, skipped_in_a_row=1, position=640, problems="abc")


@pytest.fixture(scope="module")
def embedded() -> Policy:
    return load_policy(ModelConfig())


class Trained(NamedTuple):
    """A policy that has been updated, with its optimizer."""

    policy: Policy
    optimizer: Optimizer


def fresh(embedded: Policy, dtype: torch.dtype, kind: str = "qwen2") -> Trained:
    policy = replace(embedded, model=random_model(kind).to(dtype))
    return Trained(policy, Optimizer(policy.model, OptimConfig(lr=1e-2, warmup_steps=0), 100))


def update(trained: Trained, *seeds: int) -> None:
    """Apply an update for each seed, with gradients that the seed decides."""
    for seed in seeds:
        torch.manual_seed(seed)
        trained.optimizer.zero_grad()
        sum(
            (parameter * torch.randn_like(parameter)).sum() for parameter in trained.policy.model.parameters()
        ).backward()
        trained.optimizer.step()


def tensors(trained: Trained) -> dict[str, torch.Tensor]:
    return {**trained.policy.model.state_dict(), **trained.optimizer.state()}


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_as_if_nothing_had_been(
    embedded: Policy, tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    """Tied and untied, with and without masters: after further updates, not only after loading, all is equal."""
    one, other = fresh(embedded, dtype, kind), fresh(embedded, dtype, kind)
    update(one, 1, 2, 3)
    save_checkpoint(*one, STEP, tmp_path / "step-000010")
    update(other, 7)
    progress = load_checkpoint(*other, tmp_path / "step-000010")
    assert progress == STEP
    assert (other.optimizer.update, other.optimizer.skipped_in_a_row) == (3, 1)
    update(one, 4, 5)
    update(other, 4, 5)
    expected = tensors(one)
    assert expected.keys() == tensors(other).keys()
    for name, tensor in tensors(other).items():
        assert torch.equal(tensor, expected[name]), name
    assert one.optimizer.lr == other.optimizer.lr


def test_the_state_is_what_adamw_holds(embedded: Policy, tmp_path: Path) -> None:
    """Against the definition of the moments: exponential means of one gradient and its square."""
    trained = fresh(embedded, torch.bfloat16)
    parameter = trained.policy.model.get_parameter("model.norm.weight")
    before = parameter.detach().float().clone()
    update(trained, 1)
    save_checkpoint(*trained, STEP, tmp_path / "step-000010")
    state = load_file(tmp_path / "step-000010" / "trainer" / "optimizer.safetensors")
    mean, square = (state[f"model.norm.weight.{name}"] for name in ("exp_avg", "exp_avg_sq"))
    assert state["model.norm.weight.step"] == 1
    gradient = mean / 0.1
    torch.testing.assert_close(square, 0.001 * gradient**2)
    master = state["model.norm.weight.master"]
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, before - 1e-2 * gradient.sign(), atol=1e-5, rtol=0)
    assert torch.equal(parameter, master.bfloat16())
    assert "lm_head.weight.master" not in state  # tied: the embedding's


def test_other_loaders_see_a_model_and_no_more(embedded: Policy, tmp_path: Path) -> None:
    trained = fresh(embedded, torch.float32)
    update(trained, 1)
    folder = tmp_path / "step-000010"
    save_checkpoint(*trained, STEP, folder)
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".safetensors", ".json"}
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in trained.policy.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == embedded.tokenizer.get_vocab()
    listed = json.loads((folder / "trainer" / "state.json").read_text())["files"]
    there = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }
    there.pop("trainer/state.json")
    assert listed == there


def test_every_file_is_on_the_disk_before_the_name(
    embedded: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def check(old: Path, new: Path) -> None:
        files = {path.name for path in Path(old).rglob("*")} | {Path(old).name}
        missing = files - set(synced) - {"state.json"}
        assert not missing
        assert any(name.startswith(".state.json") for name in synced)
        synced.append("the rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", check)
    save_checkpoint(*fresh(embedded, torch.float32), STEP, tmp_path / "checkpoints" / "step-000010")
    assert synced[-2:] == ["the rename", "checkpoints"]


def test_too_little_room_is_told_before_anything_is_written(
    embedded: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = fresh(embedded, torch.float32)
    save_checkpoint(*trained, replace(STEP, step=5), tmp_path / "step-000005")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    with pytest.raises(RunError, match="no room for the checkpoint of step-000010: it takes "):
        save_checkpoint(*trained, STEP, tmp_path / "step-000010")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def test_room_is_asked_for_moments_and_masters_too(
    embedded: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of a bfloat16 model takes 2 bytes a parameter for weights and 12 for the rest."""
    trained = fresh(embedded, torch.bfloat16)
    update(trained, 1)
    usage = shutil.disk_usage(tmp_path)
    for free, fits in ((64 * 2**20 + 13 * trained.policy.parameter_count, False), (80 * 2**20, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        if fits:
            save_checkpoint(*trained, STEP, tmp_path / "step-000010")
        else:
            with pytest.raises(RunError, match="no room"):
                save_checkpoint(*trained, STEP, tmp_path / "step-000010")


def test_a_disk_that_fills_up_meanwhile_leaves_the_older_one_and_nothing_else(
    embedded: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = fresh(embedded, torch.float32)
    save_checkpoint(*trained, replace(STEP, step=5), tmp_path / "step-000005")

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(RunError, match="cannot be written: No space left"):
        save_checkpoint(*trained, STEP, tmp_path / "step-000010")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def test_a_half_one_in_the_way_is_replaced(embedded: Policy, tmp_path: Path) -> None:
    trained = fresh(embedded, torch.float32)
    for name in (".step-000010.writing", "step-000010"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001-of-00002.safetensors").write_bytes(b"half")
    save_checkpoint(*trained, STEP, tmp_path / "step-000010")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]
    assert not (tmp_path / "step-000010" / "model-00001-of-00002.safetensors").exists()
    load_checkpoint(*trained, tmp_path / "step-000010")


def _other_moments(folder: Path) -> None:
    path = folder / "trainer" / "optimizer.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)


def _other_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize("damage", [_other_moments, _other_weights])
def test_damage_that_sizes_do_not_show_is_told_in_a_line(
    embedded: Policy, tmp_path: Path, damage: Any
) -> None:
    trained = fresh(embedded, torch.float32)
    update(trained, 1)
    save_checkpoint(*trained, STEP, tmp_path / "step-000010")
    damage(tmp_path / "step-000010")
    with pytest.raises(UserError, match="to go on from the one before") as error:
        load_checkpoint(*trained, tmp_path / "step-000010")
    assert "\n" not in str(error.value)


def test_the_state_of_another_model_is_refused(embedded: Policy) -> None:
    one, other = fresh(embedded, torch.float32), fresh(embedded, torch.bfloat16)
    update(one, 1)
    update(other, 1)
    for here, there in ((one, other), (other, one)):
        with pytest.raises(ValueError, match="of other parameters or types"):
            here.optimizer.load_state(there.optimizer.state(), 1, 0)
    with pytest.raises(ValueError, match=r"model\.none among them"):
        one.optimizer.load_state({**one.optimizer.state(), "model.none.step": torch.ones(())}, 1, 0)
