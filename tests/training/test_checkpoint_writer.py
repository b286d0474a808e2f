"""Checkpoints: exact, never incomplete on disk, one line for each defect, and the same if a thread writes them."""

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
import xxhash
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import RunError, SignalExit, UserError
from bandpo_cli.models.load import Policy
from bandpo_cli.storage.checkpoints import complete_checkpoints, model_checkpoints, remove_checkpoints_after
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.training import checkpoint_writer
from bandpo_cli.training.build import load_checkpoint
from bandpo_cli.training.checkpoint_writer import (
    RESERVED_BYTES,
    CheckpointWriter,
    StateCopy,
    TrainedState,
    check_savable,
    write_tensors,
)
from bandpo_cli.training.optimizer import NonFiniteError
from bandpo_cli.training.rollout_batches import SampledGroups
from tests.training.trained import (
    STEP,
    State,
    Trained,
    contents,
    fresh,
    save_checkpoint,
    state_of,
    tensors,
    update,
)


@dataclass(frozen=True)
class Setting:
    """A run folder with a small policy."""

    trained: Trained
    run: RunFolder

    def writer(self, **checkpoint: Any) -> CheckpointWriter:
        return CheckpointWriter(settings(**checkpoint), State(*self.trained), self.run)

    def save(self, writer: CheckpointWriter, step: int) -> None:
        """Save a step in the order of the loop."""
        writer.prepare(step)
        self.run.append_metrics({"step": step})
        writer.commit()

    def names(self) -> list[str]:
        return sorted(path.name for path in (self.run.path / "checkpoints").glob("*"))


def settings(**checkpoint: Any) -> RunConfig:
    return resolve([{"steps": 100, "checkpoint": {"every": 1, "keep_last": None, **checkpoint}}])


@pytest.fixture
def setting(embedded: Policy, tmp_path: Path) -> Setting:
    trained = fresh(embedded, torch.float32)
    update(trained, 1)
    return Setting(trained, RunFolder.create(tmp_path, "a"))


class Gate:
    """Holds a checkpoint that a thread writes: its weights are in the hidden folder, the optimizer state is not.

    Attributes:
        reached: set when a write is held.
        open: set it to let this write and all others pass.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._write = checkpoint_writer.write_tensors
        monkeypatch.setattr(checkpoint_writer, "write_tensors", self._held)

    def _held(self, path: Path, tensors: Mapping[str, torch.Tensor], check: Callable[[], None]) -> str:
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            while not self.open.wait(0.002):
                check()
        return self._write(path, tensors, check)

    def wait_until_reached(self) -> None:
        """Return when a write is held."""
        assert self.reached.wait(60)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()
    assert [item.name for item in threading.enumerate() if item.name == "checkpoint"] == []


@pytest.mark.parametrize(("kind", "dtype"), [("qwen2", torch.bfloat16), ("llama", torch.float32)])
def test_a_thread_writes_the_state_of_its_step_whatever_changes_meanwhile(
    embedded, tmp_path, monkeypatch, dtype, kind
):
    """All bytes are those that a write without a thread gives before the changes. Tied and untied, with masters."""
    changed, save_policy = threading.Event(), checkpoint_writer.save_policy

    def save_later(*arguments: Any) -> None:
        assert changed.wait(60)
        save_policy(*arguments)

    trained = fresh(embedded, dtype, kind)
    run = RunFolder.create(tmp_path, "a")
    update(trained, 1, 2)
    save_checkpoint(*trained, State(*trained).progress(7), tmp_path / "direct" / "step-000007")
    monkeypatch.setattr(checkpoint_writer, "save_policy", save_later)
    with CheckpointWriter(settings(), State(*trained), run) as writer:
        writer.prepare(7)
        writer.commit()
        update(trained, 3, 4)
        with torch.no_grad():
            for parameter in trained.policy.model.parameters():
                parameter.zero_()
        changed.set()
    direct = contents(tmp_path / "direct" / "step-000007")
    assert len(direct["trainer/optimizer.safetensors"]) > 1000
    assert contents(run.checkpoint_dir(7)) == direct


def test_a_second_copy_takes_the_new_state_and_no_further_memory(embedded):
    trained = fresh(embedded, torch.bfloat16)
    update(trained, 1)
    copy, state = StateCopy(), state_of(*trained)
    assert copy.missing_bytes(state) == state.nbytes
    first = copy.take(state)
    places = {name: value.data_ptr() for name, value in {**first.weights, **first.optimizer}.items()}
    update(trained, 2)
    later = state_of(*trained)
    assert copy.missing_bytes(later) == 0
    second = copy.take(later)
    now = {**second.weights, **second.optimizer}
    assert {name: value.data_ptr() for name, value in now.items()} == places
    assert not [name for name, tensor in tensors(trained).items() if not torch.equal(now[name], tensor)]
    in_use = {tensor.data_ptr() for tensor in tensors(trained).values()}
    assert in_use.isdisjoint(places.values())
    assert second.nbytes == later.nbytes, "tied weights are copied once"


def test_the_copy_of_a_gpu_is_pinned_and_complete_when_it_is_returned(monkeypatch):
    """Stand-ins record the calls: there is no GPU here. torch rounds pinned memory up to a power of two."""
    place = {"shape": torch.Size([3]), "dtype": torch.float32, "device": torch.device("cuda:1"), "nbytes": 12}
    source, target, calls = Mock(**place), Mock(), Mock()
    calls.allocate.return_value = target
    calls.attach_mock(target.copy_, "copy")
    monkeypatch.setattr(torch, "empty_like", calls.allocate)
    monkeypatch.setattr(torch.cuda, "synchronize", calls.wait)
    state = TrainedState({"weight": source}, {}, STEP)
    assert StateCopy().missing_bytes(state) == 16
    StateCopy().take(state)
    assert calls.mock_calls == [
        call.allocate(source, device="cpu", pin_memory=True),
        call.copy(source.detach(), non_blocking=True),
        call.wait(torch.device("cuda:1")),
    ]


def test_a_checkpoint_becomes_visible_after_its_line_is_on_the_disk(setting, monkeypatch):
    """Every rename and every flush of metrics.jsonl is noted with the steps in the file at that time."""
    events: list[tuple[str, list[int]]] = []
    rename, flush = os.rename, RunFolder.sync_metrics

    def steps() -> list[int]:
        return [record["step"] for record in setting.run.read_metrics()]

    def note_rename(old: Path, new: Path) -> None:
        rename(old, new)
        events.append((Path(new).name, steps()))

    def note_flush(run: RunFolder) -> None:
        flush(run)
        events.append(("flush", steps()))

    monkeypatch.setattr(os, "rename", note_rename)
    monkeypatch.setattr(RunFolder, "sync_metrics", note_flush)
    with setting.writer(keep_last=1, keep_best=0) as writer:
        setting.save(writer, 1)
        writer.wait()
        setting.save(writer, 2)
    assert events == [
        ("flush", [1]), ("step-000001", [1]), ("flush", [1]),
        ("flush", [1, 2]), ("step-000002", [1, 2]), ("flush", [1, 2]), (".step-000001.removing", [1, 2]),
    ]  # fmt: skip
    assert setting.names() == ["step-000002"]


def test_the_next_checkpoint_waits_for_the_one_in_progress(setting, gate):
    """The first is complete, with its own state, before the second copy is taken."""
    with setting.writer() as writer:
        setting.save(writer, 1)
        gate.wait_until_reached()
        assert setting.names() == [".step-000001.writing"]
        update(setting.trained, 5)
        timer = threading.Timer(0.1, gate.open.set)
        timer.start()
        writer.prepare(2)
        timer.join()
        assert setting.names() == ["step-000001"]
        writer.commit()
    first, second = (fresh(setting.trained.policy, torch.float32) for _ in range(2))
    load_checkpoint(*first, setting.run.checkpoint_dir(1))
    load_checkpoint(*second, setting.run.checkpoint_dir(2))
    assert first.optimizer.state()["model.norm.weight.step"] == 1
    assert second.optimizer.state()["model.norm.weight.step"] == 2


@pytest.mark.parametrize("case", ["last step", "no background", "no further thread"])
def test_without_a_thread_the_checkpoint_is_complete_before_the_line_of_its_step(setting, monkeypatch, case):
    """So are those without memory for a copy. Where a thread cannot be started, it is complete after the line."""
    if case == "no further thread":
        cannot_start = RuntimeError("can't start new thread")
        monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=cannot_start))
    step = 100 if case == "last step" else 3
    with setting.writer(background=case != "no background") as writer:
        writer.prepare(step)
        assert (step in complete_checkpoints(setting.run).complete) == (case != "no further thread")
        setting.run.append_metrics({"step": step})
        writer.commit()
        assert step in complete_checkpoints(setting.run).complete


@pytest.mark.parametrize("available", ["little", "unknown"])
def test_without_memory_for_a_copy_training_waits(setting, monkeypatch, caplog, available):
    """The system reports how little is available, or the allocation fails."""
    state = state_of(*setting.trained)
    found = 2 * state.nbytes - 1 if available == "little" else None
    monkeypatch.setattr(checkpoint_writer, "available_memory", lambda: found)
    if available == "unknown":
        no_memory = RuntimeError("DefaultCPUAllocator: can't allocate memory")

        def fail(*_: Any, **__: Any) -> None:
            raise no_memory

        monkeypatch.setattr(torch, "empty_like", fail)
    with caplog.at_level(logging.WARNING, "bandpo_cli"), setting.writer() as writer:
        for step in (1, 2):
            writer.prepare(step)
            assert step in complete_checkpoints(setting.run).complete
            writer.commit()
    (message,) = caplog.messages
    assert message.startswith("training waits for its checkpoints")
    assert ("are available" in message) == (found is not None)


def test_weights_that_are_not_finite_are_refused_before_anything_is_written(setting):
    with torch.no_grad():
        setting.trained.policy.model.get_parameter("model.norm.weight")[0] = torch.nan
    with setting.writer() as writer, pytest.raises(NonFiniteError, match="no checkpoint was written"):
        writer.prepare(1)
    assert setting.names() == []


def full_disk(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_that_fills_up_is_reported_at_the_next_step(setting, monkeypatch):
    """The older checkpoint stays, and the error is raised once."""
    with setting.writer() as writer:
        setting.save(writer, 1)
        writer.wait()
        with monkeypatch.context() as patch:
            setting.run.append_metrics({"step": 2})
            writer.prepare(2)
            patch.setattr(os, "fsync", full_disk)
            patch.setattr(RunFolder, "sync_metrics", lambda _: None)
            writer.commit()
            writer._call.join()
        with pytest.raises(RunError, match="step-000002: the checkpoint cannot be written: No space left"):
            writer.check()
        writer.check()
    assert setting.names() == ["step-000001"]


@pytest.mark.parametrize("call", ["prepare", "save_on_stop", "end"])
def test_no_error_of_the_thread_is_lost(setting, monkeypatch, gate, call):
    """The write fails after the step was done, while the run waits for it."""
    monkeypatch.setattr(checkpoint_writer.checkpoints, "prune_checkpoints", lambda *_: full_disk(0))
    with pytest.raises(OSError, match="No space left"), setting.writer() as writer:  # noqa: PT012
        setting.save(writer, 1)
        gate.wait_until_reached()
        writer.check()  # does not wait
        gate.open.set()
        if call != "end":
            getattr(writer, call)(2)
            pytest.fail("the error is raised before")


class CallerError(Exception):
    """An error of the code that trains."""


@pytest.mark.parametrize("error", [CallerError, GeneratorExit, KeyboardInterrupt])
def test_a_pending_checkpoint_is_finished_after_an_error(setting, gate, error, monkeypatch, caplog):
    """An error of the thread does not hide the one that ended the run."""
    monkeypatch.setattr(checkpoint_writer.checkpoints, "prune_checkpoints", lambda *_: full_disk(0))
    with pytest.raises(error), setting.writer() as writer:  # noqa: PT012
        setting.save(writer, 1)
        gate.wait_until_reached()
        threading.Timer(0.05, gate.open.set).start()
        raise error
    assert list(complete_checkpoints(setting.run).complete) == [1]
    assert caplog.messages == ["[Errno 28] No space left on device"]


def test_a_second_signal_gives_the_checkpoint_up(setting, gate):
    """Its files are removed, the one before stays; the gate is never opened."""
    with setting.writer(background=False) as writer:
        setting.save(writer, 1)
    with pytest.raises(SignalExit), setting.writer() as writer:  # noqa: PT012
        setting.save(writer, 2)
        gate.wait_until_reached()
        assert setting.names() == [".step-000002.writing", "step-000001"]
        raise SignalExit(2)
    assert setting.names() == ["step-000001"]


def test_a_signal_while_the_end_waits_gives_the_checkpoint_up(setting, gate, monkeypatch):
    def interrupted(_: CheckpointWriter) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), setting.writer() as writer:  # noqa: PT012
        setting.save(writer, 1)
        gate.wait_until_reached()
        monkeypatch.setattr(CheckpointWriter, "wait", interrupted)
    assert setting.names() == []


def test_a_write_in_the_main_thread_that_a_signal_interrupts_leaves_nothing(setting, monkeypatch):
    def interrupted(_: int) -> None:
        raise SignalExit(2)

    with pytest.raises(SignalExit), setting.writer(background=False) as writer:  # noqa: PT012
        monkeypatch.setattr(os, "fsync", interrupted)
        writer.prepare(1)
    assert setting.names() == []


def test_the_thread_of_a_gpu_uses_no_other_gpu(setting, monkeypatch):
    """Stand-ins record the call: there is no GPU here. A new thread has GPU 0, where DCP would make a context."""
    chosen: list[tuple[str, str]] = []
    monkeypatch.setattr(Policy, "device", property(lambda _: torch.device("cuda:3")))
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((threading.current_thread().name, str(device)))
    )
    with setting.writer() as writer:
        setting.save(writer, 1)
    assert chosen == [("checkpoint", "cuda:3")]


def test_readers_see_no_checkpoint_before_it_is_complete(setting, gate):
    """`eval` and `show` list what has a model, `resume` what is complete; a resume removes what SIGKILL would leave."""
    with setting.writer() as writer:
        setting.save(writer, 1)
        gate.wait_until_reached()
        assert (setting.run.path / "checkpoints" / ".step-000001.writing" / "model.safetensors").exists()
        assert not model_checkpoints(setting.run)
        assert complete_checkpoints(setting.run) == ({}, {})
        killed = RunFolder(Path(shutil.copytree(setting.run.path, setting.run.path.parent / "b")))
        gate.open.set()
    remove_checkpoints_after(killed, 0)
    assert list((killed.path / "checkpoints").iterdir()) == []
    assert list(model_checkpoints(setting.run)) == [1]


@pytest.mark.parametrize(("kind", "dtype"), [("qwen2", torch.bfloat16), ("llama", torch.float32)])
def test_updates_after_loading_equal_uninterrupted_ones(embedded, tmp_path, dtype, kind):
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


def test_other_loaders_find_only_the_model_in_a_checkpoint(embedded, tmp_path):
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


def test_every_file_is_flushed_before_the_rename(embedded, tmp_path, monkeypatch):
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


def test_a_full_disk_is_reported_before_anything_is_written(embedded, tmp_path, monkeypatch):
    """Tied weights count once; moments, masters and the batches that were sampled ahead count too."""
    trained = fresh(embedded, torch.bfloat16)
    update(trained, 1)
    state, folder = state_of(*trained), tmp_path / "step-000010"
    scalars = 4 * len([*trained.policy.model.parameters()])
    assert state.nbytes == 14 * trained.policy.model.num_parameters() + scalars
    ahead = SampledGroups(5, 0, 1, 0, 0.0, [], [])
    monkeypatch.setattr(SampledGroups, "tokens", 1000)
    usage = shutil.disk_usage(tmp_path)
    for batches, size in (((), 0), ((ahead, ahead), 2 * 12 * 1000)):
        needed = state.nbytes + size + RESERVED_BYTES
        monkeypatch.setattr(shutil, "disk_usage", Mock(return_value=usage._replace(free=needed)))
        check_savable(trained.policy, replace(state, ahead=batches), folder)
        monkeypatch.setattr(shutil, "disk_usage", Mock(return_value=usage._replace(free=needed - 1)))
        with pytest.raises(RunError, match=f"step-000010: it takes {needed / 2**20:,.0f} MiB and"):
            check_savable(trained.policy, replace(state, ahead=batches), folder)
    assert not list(tmp_path.iterdir())


def test_an_incomplete_checkpoint_is_replaced(embedded, tmp_path):
    trained = fresh(embedded, torch.float32)
    for name in (".step-000010.writing", "step-000010"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001-of-00002.safetensors").write_bytes(b"half")
    save_checkpoint(*trained, STEP, tmp_path / "step-000010")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]
    assert not (tmp_path / "step-000010" / "model-00001-of-00002.safetensors").exists()
    load_checkpoint(*trained, tmp_path / "step-000010")


@pytest.mark.parametrize("name", ["trainer/optimizer.safetensors", "model.safetensors"])
def test_damage_that_keeps_file_sizes_is_one_error_line(embedded, tmp_path, name):
    trained = fresh(embedded, torch.float32)
    update(trained, 1)
    save_checkpoint(*trained, STEP, tmp_path / "step-000010")
    path = tmp_path / "step-000010" / name
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(UserError, match="to resume from the previous one") as error:
        load_checkpoint(*trained, tmp_path / "step-000010")
    assert "\n" not in str(error.value)


def test_the_state_of_another_model_is_refused(embedded):
    one, other = fresh(embedded, torch.float32), fresh(embedded, torch.bfloat16)
    update(one, 1)
    update(other, 1)
    for here, there in ((one, other), (other, one)):
        with pytest.raises(ValueError, match="to other parameters or types"):
            here.optimizer.load_state(there.optimizer.state(), 1, 0)
    with pytest.raises(ValueError, match=r"model\.none among them"):
        one.optimizer.load_state({**one.optimizer.state(), "model.none.step": torch.ones(())}, 1, 0)


def test_the_tensor_file_has_the_bytes_that_safetensors_writes(tmp_path, monkeypatch):
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


def test_a_chunk_is_on_the_disk_before_the_next_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "CHUNK_BYTES", 4096)
    path, synced, fsync = tmp_path / "tensors", [], os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(path.stat().st_size)

    monkeypatch.setattr(os, "fsync", note)
    write_tensors(path, {"a": torch.zeros(4096)})
    header = path.stat().st_size - 4 * 4096
    assert synced == [header + 4096 * (chunk + 1) for chunk in range(4)]
