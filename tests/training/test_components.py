"""Components: data and context checks when they are built; checkpoints are exact and never incomplete on disk."""

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

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import ModelConfig, OptimConfig
from bandpo_cli.errors import ConfigError, RunError, UserError
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.storage.checkpoints import Progress
from bandpo_cli.tasks.base import build_task
from bandpo_cli.training.checkpoint_files import load_checkpoint, save_checkpoint
from bandpo_cli.training.components import build_components
from bandpo_cli.training.optimizer import Optimizer
from tests.conftest import random_model

STEP = Progress(step=10, updates=3, skipped_in_a_row=1, position=640, problems="abc")


@pytest.fixture(scope="module")
def embedded() -> Policy:
    return load_policy(ModelConfig())


class Trained(NamedTuple):
    """A policy with its optimizer."""

    policy: Policy
    optimizer: Optimizer


def fresh(embedded: Policy, dtype: torch.dtype, kind: str = "qwen2") -> Trained:
    policy = replace(embedded, model=random_model(kind).to(dtype))
    return Trained(policy, Optimizer(policy.model, OptimConfig(lr=1e-2, warmup_steps=0), 100))


def update(trained: Trained, *seeds: int) -> None:
    """Apply one update per seed, with gradients generated from the seed."""
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


def test_the_saved_state_is_that_of_adamw(embedded: Policy, tmp_path: Path) -> None:
    """Compared with the definition of the moments: exponential means of one gradient and its square."""
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
    assert "lm_head.weight.master" not in state  # tied to the embedding


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
    there = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }
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
    trained = fresh(embedded, torch.float32)
    save_checkpoint(*trained, replace(STEP, step=5), tmp_path / "step-000005")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    with pytest.raises(RunError, match="not enough disk space for the checkpoint step-000010: it takes "):
        save_checkpoint(*trained, STEP, tmp_path / "step-000010")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def test_the_needed_disk_space_includes_moments_and_masters(
    embedded: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of a bfloat16 model takes 2 bytes per parameter for weights and 12 for moments and masters."""
    trained = fresh(embedded, torch.bfloat16)
    update(trained, 1)
    usage = shutil.disk_usage(tmp_path)
    for free, fits in ((64 * 2**20 + 13 * trained.policy.parameter_count, False), (80 * 2**20, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        if fits:
            save_checkpoint(*trained, STEP, tmp_path / "step-000010")
        else:
            with pytest.raises(RunError, match="not enough disk space"):
                save_checkpoint(*trained, STEP, tmp_path / "step-000010")


def test_a_disk_that_fills_up_while_writing_keeps_the_older_checkpoint(
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


def test_an_incomplete_checkpoint_is_replaced(embedded: Policy, tmp_path: Path) -> None:
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
def test_damage_that_keeps_file_sizes_is_one_error_line(
    embedded: Policy, tmp_path: Path, damage: Any
) -> None:
    trained = fresh(embedded, torch.float32)
    update(trained, 1)
    save_checkpoint(*trained, STEP, tmp_path / "step-000010")
    damage(tmp_path / "step-000010")
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


def test_completions_longer_than_the_context_are_refused() -> None:
    config = resolve([{"sampling": {"max_tokens": 500}}])  # the context length of the embedded model is 512
    with pytest.raises(ConfigError, match="come to 564 tokens; the model reads at most 512"):
        build_components(config, build_task(config.task))


def test_problems_with_long_prompts_are_dropped_and_counted() -> None:
    config = resolve([{"sampling": {"max_prompt_tokens": 10}}])
    task = build_task(config.task)
    components = build_components(config, task)
    try:
        kept = [problem for problem in task.train_problems() if len(str(problem.prompt)) <= 10]
        seen = {problem.id for problem in components.stream.next(len(kept))}
    finally:
        components.close()
    dropped = len(task.train_problems()) - len(kept)
    assert seen == {problem.id for problem in kept}
    assert dropped > 0
    assert any(f"training: {dropped:,} of" in note for note in components.notes)


def test_a_prompt_limit_that_drops_every_problem_is_refused() -> None:
    config = resolve([{"sampling": {"max_prompt_tokens": 3}}])
    with pytest.raises(ConfigError, match="max_prompt_tokens = 3: all "):
        build_components(config, build_task(config.task))
