"""Checkpoints of several ranks: exact for any number of them, complete or invisible, one error for all ranks."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM
from xxhash import xxh3_64_hexdigest

from bandpo_cli.config.batch_and_sampling import OptimConfig
from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import LoraSettings, ModelConfig
from bandpo_cli.errors import RunError, UserError
from bandpo_cli.metric_names import without_clock
from bandpo_cli.models import weights
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.models.lora import add_adapters
from bandpo_cli.models.weights import checkpoint_weights, full_tensor, local_tensor, shard
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.storage.checkpoints import (
    STATE,
    Progress,
    complete_checkpoints,
    remove_checkpoints_after,
    write_trainer_state,
)
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import build_task
from bandpo_cli.training import checkpoint_writer
from bandpo_cli.training.build import build_components, load_checkpoint
from bandpo_cli.training.checkpoint_writer import CheckpointWriter
from bandpo_cli.training.loop import train
from bandpo_cli.training.optimizer import NonFiniteError, Optimizer
from tests.conftest import SHAPE, random_model
from tests.sampling.stub_engine import forked_engines
from tests.training.recording import SETTINGS
from tests.training.several_ranks import check_lines, run_ranks
from tests.training.trained import STEP, State, Trained, contents, save_checkpoint, update

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = [("narrow", torch.bfloat16), ("adapters", torch.bfloat16), ("mixture", torch.float32)]
"""Models and the dtype of their forward passes. `narrow` has matrices of 2 rows, fewer than 3 ranks have shards for;
transformers stores the weights of `mixture` (of experts) under other names and in other forms."""


@cache
def embedded() -> Policy:
    return load_policy(ModelConfig())


def trained(kind: str, dtype: torch.dtype, ranks: Ranks = SINGLE, seed: int = 0) -> Trained:
    """Return a random policy with its optimizer, sharded if there are several ranks."""
    if kind == "narrow":
        shape = {"hidden_size": 8, "num_key_value_heads": 1, "head_dim": 2, "num_hidden_layers": 1}
        model: Any = random_model("llama", seed, 1.0, **shape)
    elif kind == "mixture":
        torch.manual_seed(seed)
        shape = {**SHAPE, "num_hidden_layers": 1}
        config = MixtralConfig(**shape, num_local_experts=4, num_experts_per_tok=2)
        model = MixtralForCausalLM(config).eval()
    else:
        model = random_model("qwen2" if kind == "adapters" else kind, seed)
    model.to(dtype)
    if kind == "adapters":
        add_adapters(model, LoraSettings(rank=3), seed, base="base")
    if ranks.size > 1:
        shard(model, ranks, torch.device("cpu"))
    policy = replace(embedded(), model=model, ranks=ranks)
    # Without clipping AdamW computes each element by itself, so that shards and complete tensors have the same results.
    return Trained(policy, Optimizer(model, OptimConfig(lr=1e-2, warmup_steps=0, max_grad_norm=None), 100))


def complete_state(one: Trained) -> dict[str, torch.Tensor]:
    """Return weights in the dtype of a checkpoint, moments and masters, complete on every rank."""
    state = {name: full_tensor(value).clone() for name, value in one.optimizer.state().items()}
    for name, parameter in one.policy.model.named_parameters():
        if parameter.requires_grad:
            dtype = torch.bfloat16 if f"{name}.master" in state else torch.float32
            state[name] = full_tensor(parameter).to(dtype)
    return state


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def files_of(folder: Path) -> dict[str, int]:
    return {name: len(data) for name, data in contents(folder).items()}


def continue_on_ranks(ranks: Ranks, root: Path, source: str, result: str) -> None:
    """Resume every case from the checkpoint of `source`, update, save as `result`; runs in each of the ranks."""
    for kind, dtype in CASES:
        name = f"{kind}-{dtype}"
        one = trained(kind, dtype, ranks, seed=5)
        progress = load_checkpoint(*one, root / source / name / "step-000010")
        assert progress == STEP
        assert (one.optimizer.update, one.optimizer.skipped_in_a_row) == (3, 1)
        expected = load_file(root / source / name / "state.safetensors")
        assert not differences(complete_state(one), expected), name
        update(one, ranks.size)
        save_checkpoint(*one, replace(STEP, updates=3), root / result / name / "step-000010")
        state = complete_state(one)
        if ranks.is_main:
            save_file(state, root / result / name / "state.safetensors")


@pytest.mark.slow
def test_a_checkpoint_resumes_on_any_number_of_ranks(tmp_path):
    """1 → 2 → 3 → 1, bit for bit; the last state is that of one process that did all updates."""
    for kind, dtype in CASES:
        folder = tmp_path / "1" / f"{kind}-{dtype}"
        one = trained(kind, dtype)
        update(one, 1)
        save_checkpoint(*one, STEP, folder / "step-000010")
        save_file(complete_state(one), folder / "state.safetensors")
    for before, size in ((1, 2), (2, 3)):
        run_ranks(size, tmp_path / f"results-{size}", continue_on_ranks, tmp_path, str(before), str(size))
    for kind, dtype in CASES:
        uninterrupted = trained(kind, dtype)
        update(uninterrupted, 1, 2, 3)
        folder = tmp_path / "3" / f"{kind}-{dtype}"
        one = trained(kind, dtype, seed=7)
        load_checkpoint(*one, folder / "step-000010")
        assert not differences(complete_state(one), load_file(folder / "state.safetensors"))
        if kind != "adapters":
            check_files(folder / "step-000010", dtype)
        torch.testing.assert_close(complete_state(one), complete_state(uninterrupted), rtol=1e-6, atol=1e-7)
        stored = (
            load_file(folder / "step-000010" / "model.safetensors").keys() if kind == "mixture" else set()
        )
        assert bool(stored - dict(one.policy.model.named_parameters()).keys()) == (kind == "mixture")


def check_files(folder: Path, dtype: torch.dtype) -> None:
    """Check that there is no pickle, that state.json lists every file, and that transformers finds the dtype."""
    files = files_of(folder)
    assert {Path(name).suffix for name in files} == {".safetensors", ".json"}
    files.pop("trainer/state.json")
    state = json.loads((folder / "trainer" / "state.json").read_text())
    assert state["files"] == files
    assert state["xxh3"] == {name: xxh3_64_hexdigest((folder / name).read_bytes()) for name in files}
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert not config["architectures"][0].startswith("FSDP")
    assert {item.dtype for item in load_file(folder / "model.safetensors").values()} == {dtype}


class Scenario:
    """What each of two ranks does with a run that has the checkpoint of step 5."""

    def __init__(self, ranks: Ranks, root: Path) -> None:
        self.ranks, self.root = ranks, root
        self.run = RunFolder(root / "run")
        self.one = trained("qwen2", torch.float32, ranks)
        self.outcomes: dict[str, list[str]] = {}
        update(self.one, 1)
        save_checkpoint(*self.one, replace(STEP, step=5), self.run.checkpoint_dir(5))

    def fails(
        self, name: str, patch: Callable[[pytest.MonkeyPatch], None], folder: Path | None = None
    ) -> None:
        """Save step 10 with the patch and note the error of each rank and the folders that are left."""
        error = "none"
        with pytest.MonkeyPatch.context() as context:
            patch(context)
            try:
                save_checkpoint(*self.one, STEP, folder or self.run.checkpoint_dir(10))
            except (RunError, NonFiniteError) as raised:
                error = f"{type(raised).__name__}: {raised}"
        left = ", ".join(sorted(path.name for path in self.run.checkpoint_dir(5).parent.iterdir()))
        self.outcomes[name] = [*self.ranks.gather(error), left]

    def only_on(self, rank: int, owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
        def patch(context: pytest.MonkeyPatch) -> None:
            if self.ranks.rank == rank:
                context.setattr(owner, name, value)

        return patch


def no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_on_ranks(ranks: Ranks, root: Path) -> None:
    """Save checkpoints that fail in several ways; at last both ranks are killed while they write."""
    scenario = Scenario(ranks, root)
    one = scenario.one
    scenario.fails("shards", scenario.only_on(1, os, "fsync", no_space))
    scenario.fails("model", scenario.only_on(0, checkpoint_writer, "save_policy", no_space))
    usage = shutil.disk_usage(root)._replace(free=10_000)
    scenario.fails("full", scenario.only_on(0, shutil, "disk_usage", lambda _: usage))
    other = root / "other" / "step-000010" if ranks.rank == 1 else None
    scenario.fails("not shared", lambda _: None, other)
    parameter = one.policy.model.get_parameter("model.norm.weight")
    values = local_tensor(parameter).clone()
    if ranks.rank == 1:
        local_tensor(parameter)[-1] = torch.nan
    scenario.fails("not finite", lambda _: None)
    local_tensor(parameter).copy_(values)
    threads_fail(scenario)
    if ranks.is_main:
        (root / "outcomes.json").write_text(json.dumps(scenario.outcomes))
    ranks.wait()
    scenario.fails("killed", lambda context: context.setattr(os, "fsync", die))


def threads_fail(scenario: Scenario) -> None:
    """Save step 10 by threads, of which that of rank 1 finds a full disk; note the errors at the next step."""
    run, error = scenario.run, "none"
    config = resolve([{"steps": 100, "checkpoint": {"keep_last": 1, "keep_best": 0}}])
    with CheckpointWriter(config, State(*scenario.one), run) as writer:
        writer.prepare(10)
        with pytest.MonkeyPatch.context() as context:
            scenario.only_on(1, os, "fsync", no_space)(context)
            writer.commit()
            writer._call.join()
        try:
            writer.check()
        except RunError as raised:
            error = str(raised)
    scenario.outcomes["threads"] = scenario.ranks.gather(error)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """Return the folder and the outcomes of `fail_on_ranks` with two ranks."""
    root = tmp_path_factory.mktemp("failed")
    RunFolder.create(root, "run")
    with pytest.raises(FileNotFoundError, match="result-0"):  # the ranks were killed
        run_ranks(2, root / "results", fail_on_ranks, root)
    return root, json.loads((root / "outcomes.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "failing", "error"),
    [
        ("shards", None, "RunError: * the checkpoint cannot be written: No space left on device (rank 1)"),
        ("model", 0, "RunError: * the checkpoint cannot be written: No space left on device"),
        ("full", 0, "RunError: not enough disk space for the checkpoint step-000010: it takes *"),
        ("not shared", None, "RunError: * the run folder must be on a file system that all machines share"),
        ("not finite", 1, "NonFiniteError: the weights *model.norm.weight); no checkpoint was written"),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_all_and_keeps_the_older_checkpoint(failed, case, failing, error):
    """The other rank names the one that failed, unless both failed."""
    *errors, left = failed[1][case]
    own = errors.pop(failing or 0)
    start, _, end = error.partition("*")
    assert own.startswith(start.strip())
    assert own.endswith(end)
    if failing is not None:
        assert errors == [own.replace(": ", f": rank {failing}: ", 1)]
    elif case != "not shared":  # there the paths differ
        assert errors == [own]
    assert left == "step-000005"


@pytest.mark.slow
def test_an_error_of_a_thread_is_raised_on_all_ranks_at_the_next_step(failed):
    first, second = failed[1]["threads"]
    assert first == second
    assert first.endswith("step-000010: the checkpoint cannot be written: No space left on device (rank 1)")


@pytest.mark.slow
def test_ranks_that_are_killed_while_they_write_leave_the_older_checkpoint(failed):
    """The next start removes the hidden folder, and one process resumes from the checkpoint of two ranks."""
    run = RunFolder(failed[0] / "run")
    assert (run.path / "checkpoints" / ".step-000010.writing").is_dir()
    assert list(complete_checkpoints(run).complete) == [5]
    remove_checkpoints_after(run, 5)
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-000005"]
    load_checkpoint(*trained("qwen2", torch.float32), run.checkpoint_dir(5))


def test_a_rank_writes_its_shards_in_files_of_bounded_size(monkeypatch):
    """Two ranks have half of each tensor: 40, 40, 40, 200 and 4 bytes; a tensor is not split."""
    monkeypatch.setattr(weights, "FILE_BYTES", 100)
    tensors = {name: torch.zeros(size) for name, size in zip("abcde", (20, 20, 20, 100, 2), strict=True)}
    numbers = weights._file_numbers(tensors, Ranks(1, 2))
    assert numbers == {"a": 1, "b": 1, "c": 2, "d": 3, "e": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("shard", lambda content: content),  # the file is missing
        (None, lambda content: b"\xff" * len(content)),
        (None, lambda content: content.replace(b"saved_offsets", b"saved_offsetz")),
    ],
)
def test_damaged_shards_are_one_error_line(failed, tmp_path, name, damage):
    folder = shutil.copytree(RunFolder(failed[0] / "run").checkpoint_dir(5), tmp_path / "step-000005")
    _, path = sorted((folder / "trainer" / "optimizer").iterdir())
    content = path.read_bytes()
    path.unlink()
    path.with_name(name or path.name).write_bytes(damage(content))
    state = json.loads((folder / STATE).read_text())
    (folder / STATE).unlink()
    # For the files that the folder has now.
    write_trainer_state(folder, Progress(*(state[field.name] for field in fields(Progress))))
    with pytest.raises(UserError, match="to resume from the previous one") as error:
        load_checkpoint(*trained("qwen2", torch.float32), folder)
    assert "\n" not in str(error.value)


LAYER: dict[str, Any] = {
    "steps": 2,
    "sampling": {"max_lag": 1},
    "optim": {"lr": 5e-5, "warmup_steps": 0},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 1, "background": True},
}

Result = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def part(ranks: Ranks, folder: Path, model: Path, first: int, stop_after: int) -> Result:
    """Train from step `first` up to a stop after a step; return the lines, and the weights and optimizer state."""
    config = resolve([SETTINGS, LAYER, {"model": {"path": str(model)}}])
    run = RunFolder(folder)
    lines: list[dict[str, float]] = []

    def stop() -> bool:
        return ranks.is_main and len(lines) > 0 and lines[-1]["step"] == stop_after

    with forked_engines(), closing(build_components(config, build_task(config.task), ranks)) as components:
        if first:
            components.resume_from(run.checkpoint_dir(first - 1))
        for report in train(config, components, run, first=first, stop=stop):
            lines.append(without_clock(report.record))
        weights = checkpoint_weights(components.policy.model)
        state = {f"weight {key}": weight.clone() for key, weight in weights}
        state |= {key: full_tensor(value).clone() for key, value in components.optimizer.state().items()}
    return lines, state


@pytest.mark.slow
def test_a_run_of_two_ranks_stopped_after_a_step_resumes_with_one(tmp_path, small_model):
    """It is nearly the uninterrupted run of one process, which adds in another order."""
    stopped = RunFolder(tmp_path / "stopped")
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    expected, state = part(SINGLE, tmp_path / "whole", small_model, 0, 2)
    run_ranks(2, tmp_path / "ranks", part, stopped.path, small_model, 0, 1)
    assert list(complete_checkpoints(stopped).complete) == [1]
    (line,), resumed = part(SINGLE, stopped.path, small_model, 2, 2)
    assert (line["step"], line["sampler/lag"]) == (2, 2)
    check_lines([line], expected[-1:])
    assert resumed.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(resumed[name], tensor, atol=1e-5, rtol=0)
