"""Files of a checkpoint: exact, never incomplete on disk, and with one line for each defect."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import xxhash
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bandpo_cli.config.run import ModelConfig
from bandpo_cli.errors import RunError, UserError
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.training import checkpoint_writer
from bandpo_cli.training.build import load_checkpoint
from bandpo_cli.training.checkpoint_writer import RESERVED_BYTES, check_savable, write_tensors
from bandpo_cli.training.rollout_batches import SampledGroups
from tests.training.trained import STEP, contents, fresh, save_checkpoint, state_of, tensors, update


@pytest.fixture(scope="module")
def embedded() -> Policy:
    return load_policy(ModelConfig())


@pytest.mark.parametrize(("kind", "dtype"), [("qwen2", torch.bfloat16), ("llama", torch.float32)])
def test_updates_after_loading_equal_uninterrupted_ones(
    embedded: Policy, tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    """Tied and untied, with and without masters: all is equal after further updates, not only after loading."""
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


def test_other_loaders_find_only_the_model_in_a_checkpoint(embedded: Policy, tmp_path: Path) -> None:
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
    there = {name: len(data) for name, data in contents(folder).items()}
    there.pop("trainer/state.json")
    assert listed == there


def test_every_file_is_flushed_before_the_rename(
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


def test_a_full_disk_is_reported_before_anything_is_written(
    embedded: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied weights count once; moments, masters and the batch that was sampled ahead count too."""
    trained = fresh(embedded, torch.bfloat16)
    update(trained, 1)
    state, folder = state_of(*trained), tmp_path / "step-000010"
    scalars = 4 * len([*trained.policy.model.parameters()])
    assert state.nbytes == 14 * trained.policy.model.num_parameters() + scalars
    ahead = SampledGroups(5, 0, 0, 0.0, [], [])
    monkeypatch.setattr(SampledGroups, "tokens", 1000)
    usage = shutil.disk_usage(tmp_path)
    for batch, size in ((None, 0), (ahead, 12 * 1000)):
        needed = state.nbytes + size + RESERVED_BYTES
        monkeypatch.setattr(shutil, "disk_usage", Mock(return_value=usage._replace(free=needed)))
        check_savable(trained.policy, replace(state, ahead=batch), folder)
        monkeypatch.setattr(shutil, "disk_usage", Mock(return_value=usage._replace(free=needed - 1)))
        with pytest.raises(RunError, match=f"step-000010: it takes {needed / 2**20:,.0f} MiB and"):
            check_savable(trained.policy, replace(state, ahead=batch), folder)
    assert not list(tmp_path.iterdir())


def test_an_incomplete_checkpoint_is_replaced(embedded: Policy, tmp_path: Path) -> None:
    trained = fresh(embedded, torch.float32)
    for name in (".step-000010.writing", "step-000010"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001-of-00002.safetensors").write_bytes(b"half")
    save_checkpoint(*trained, STEP, tmp_path / "step-000010")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]
    assert not (tmp_path / "step-000010" / "model-00001-of-00002.safetensors").exists()
    load_checkpoint(*trained, tmp_path / "step-000010")


@pytest.mark.parametrize("name", ["trainer/optimizer.safetensors", "model.safetensors"])
def test_damage_that_keeps_file_sizes_is_one_error_line(embedded: Policy, tmp_path: Path, name: str) -> None:
    trained = fresh(embedded, torch.float32)
    update(trained, 1)
    save_checkpoint(*trained, STEP, tmp_path / "step-000010")
    path = tmp_path / "step-000010" / name
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(UserError, match="to resume from the previous one") as error:
        load_checkpoint(*trained, tmp_path / "step-000010")
    assert "\n" not in str(error.value)


def test_the_state_of_another_model_is_refused(embedded: Policy) -> None:
    one, other = fresh(embedded, torch.float32), fresh(embedded, torch.bfloat16)
    update(one, 1)
    update(other, 1)
    for here, there in ((one, other), (other, one)):
        with pytest.raises(ValueError, match="to other parameters or types"):
            here.optimizer.load_state(there.optimizer.state(), 1, 0)
    with pytest.raises(ValueError, match=r"model\.none among them"):
        one.optimizer.load_state({**one.optimizer.state(), "model.none.step": torch.ones(())}, 1, 0)


def test_the_tensor_file_has_the_bytes_that_safetensors_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scalars, an empty tensor, two types and a transposed matrix, in chunks that end within a tensor."""
    monkeypatch.setattr(checkpoint_writer, "CHUNK_BYTES", 40)
    values = {
        "b.step": torch.tensor(3.0),
        "a.exp_avg": torch.randn(7, 5),
        "a.master": torch.randn(4, 3).bfloat16(),
        "c.empty": torch.empty(0, 3),
        "d.π": torch.randn(3, 2, dtype=torch.float64).T,
    }
    checksum = write_tensors(tmp_path / "ours", values)
    assert checksum == xxhash.xxh3_64_hexdigest((tmp_path / "ours").read_bytes())
    save_file({name: value.contiguous() for name, value in values.items()}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_chunk_is_on_the_disk_before_the_next_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "CHUNK_BYTES", 4096)
    path, synced, fsync = tmp_path / "tensors", [], os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(path.stat().st_size)

    monkeypatch.setattr(os, "fsync", note)
    write_tensors(path, {"a": torch.zeros(4096)})
    header = path.stat().st_size - 4 * 4096
    assert synced == [header + 4096 * (chunk + 1) for chunk in range(4)]
