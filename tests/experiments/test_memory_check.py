"""The memory of a run is checked before anything is loaded: one line, vLLM's share, a refusal with what helps.

GPUs are replaced by their names and sizes; the models are shapes of Qwen2.5 without weights.
"""

import json
import logging
import os
import re
import sys
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from bandpo_cli.config.batch_and_sampling import use_expandable_segments
from bandpo_cli.config.layers import flatten, read_assignments, read_layer, resolve, with_values
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import UserError
from bandpo_cli.experiments import memory_check, resume, train
from bandpo_cli.experiments.memory_check import check_memory, memory_of_task, memory_report
from bandpo_cli.experiments.resume_and_fork import CHANGEABLE_SETTINGS
from bandpo_cli.experiments.run import load_components
from bandpo_cli.models.memory_estimate import GIB, SLEEPING_ENGINE_BYTES, Device, estimate_memory
from bandpo_cli.processes.ranks import SINGLE, Ranks
from bandpo_cli.tasks.task import build_task
from tests.config.shapes import config_on_disk, use_gpus
from tests.experiments.test_api import SMALL

GSM8K = {"task": {"name": "gsm8k"}}
LARGE_UPDATES = {"model": {"gradient_checkpointing": False}, "optim": {"micro_batch_tokens": 65536}}
SHARE = "sampling.vllm.memory_fraction"
AWAKE = {"sampling": {"vllm": {"sleep": False, "memory_fraction": 0.6}}}
DOCUMENTS = [Path(__file__).parents[2] / "docs" / name for name in ("performance.md", "faq.md")]


def gb(total, free=None):
    """Return the total and the free bytes of a GPU."""
    return int(1e9 * total), int(1e9 * (total if free is None else free))


@pytest.fixture
def gpus(monkeypatch):
    """Return the GPUs of this machine, which a test adds; vLLM is installed."""
    gpus = []
    use_gpus(monkeypatch, gpus)
    monkeypatch.setattr("bandpo_cli.config.batch_and_sampling.is_installed", lambda package: True)
    return gpus


def four_layers(tmp_path: Path, **settings: Any) -> RunConfig:
    """Return `--task gsm8k` with a model of 2.02 billion parameters, whose estimate takes little time."""
    config = config_on_disk(tmp_path, "Qwen/Qwen2.5-7B-Instruct", GSM8K, settings)
    shape = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": 4}))
    return config


def flags_of(message: str) -> list[str]:
    """Return the settings with which the run fits, as the message states them."""
    return re.findall(r"--set (\S+)", message.partition("it fits with ")[2])


def test_the_estimate_is_one_line(gpus, tmp_path, caplog):
    gpus.append(gb(80))
    config = four_layers(tmp_path)
    with caplog.at_level(logging.INFO, "bandpo_cli"):
        share = share_of(config)
    (record,) = caplog.records
    estimate = memory_report(config)
    assert record.levelno == logging.INFO
    assert record.message == (
        f"memory: {estimate.peak / GIB:.1f} GiB at the peak by the estimate, GPU 0 has 74.5 GiB; "
        f"vLLM's share is {share:g} ({estimate.vllm / GIB:.1f} GiB); auto is model.gradient_checkpointing=false, "
        "optim.micro_batch_tokens=16384, sampling.vllm.sleep=true"
    )
    given = {SHARE: 0.3, "model.gradient_checkpointing": True, "sampling.vllm.sleep": True}
    given = with_values(config, given)
    assert share_of(given) == 0.3
    assert memory_report(given).chosen == {"optim.micro_batch_tokens": 16384}
    with caplog.at_level(logging.INFO, "bandpo_cli"):
        check_memory(with_values(given, {"optim.micro_batch_tokens": 16384}), SINGLE)
    assert caplog.messages[-1].endswith(" GiB)"), "nothing is chosen, and a GPU has a line"
    other = four_layers(tmp_path, sampling={"engine": "transformers"})
    assert check_memory(other, SINGLE).sampling.vllm.memory_fraction is None


@pytest.mark.slow
def test_the_share_of_vllm_follows_from_the_estimate(gpus, tmp_path):
    """It is what a full batch needs, computed by hand, and at most what the trainer and other processes leave."""
    gpus.append(gb(80))
    config = config_on_disk(tmp_path, "Qwen/Qwen2.5-1.5B-Instruct", GSM8K)
    # 2 bytes per weight; 512 sequences of 2,048 tokens, keys and values of 2 heads of 128 in 28 layers
    needed = 2 * 1.5437e9 + 512 * 2048 * 2 * 28 * 2 * 128 * 2 + 512 * 151936 * 20 + SLEEPING_ENGINE_BYTES
    assert share_of(config) == pytest.approx(needed / 80e9, abs=0.01)
    held = 14 * 1.5437  # GB of weights, masters and two moments
    gpus[0] = gb(80, 50)
    assert 0.93 * 50 < 80 * share_of(config) + held < 0.95 * 50
    gpus[0] = gb(24)
    evaluated = check_memory(config, SINGLE, training=False).sampling.vllm.memory_fraction
    assert 0.93 < evaluated + 2 * 1.5437 / 24 < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("gigabytes", [16, 32, 48, 56, 64, 72, 80, 141])
def test_auto_is_the_fastest_choice_that_leaves_a_margin(gpus, tmp_path, gigabytes):
    """Its update takes at most 95% of the 95% of the card that a run may take; an engine awake has all it can use."""
    gpus.append(gb(gigabytes))
    config = four_layers(tmp_path, sampling={"max_sequences": 64})
    keys = ("model.gradient_checkpointing", "optim.micro_batch_tokens", "sampling.vllm.sleep")
    choices = [*product((False, True), (16384, 8192), (False, True)), (True, 4096, True), (True, 2048, True)]

    def leaves_a_margin(values: tuple[Any, ...]) -> bool:
        estimate = memory_report(with_values(config, dict(zip(keys, values, strict=True))))
        # weights; keys and values of 2,048 tokens in 4 layers with 4 heads of 128; logits; a share is a percentage
        needed = 2 * estimate.parameters + 64 * 2048 * 2 * 4 * 4 * 128 * 2 + 64 * 152_064 * 20 + 3 * GIB
        updating = sum(estimate.always.values()) + sum(estimate.update.values())
        has_room = values[2] or estimate.vllm > needed - 0.01 * gigabytes * 1e9
        return updating <= 0.95 * 0.95 * gigabytes * 1e9 and has_room

    expected = next((values for values in choices if leaves_a_margin(values)), choices[-1])
    assert tuple(memory_report(config).chosen.values()) == expected


@pytest.mark.slow
def test_the_rank_with_the_least_memory_chooses_for_all(gpus, tmp_path):
    config, estimates = four_layers(tmp_path), []
    for free in (80, 48):
        gpus[:] = [gb(80, free)]
        estimates.append(memory_of_task(config, None, 2))
    much, little = (estimate for _, estimate in estimates)
    assert much.chosen != little.chosen

    class Two(Ranks):
        def agree(self, function: object) -> Any:
            return estimates

    for rank in range(2):
        settings = flatten(check_memory(config, Two(rank, 2, rank)).model_dump())
        assert {key: settings[key] for key in little.chosen} == little.chosen
        assert settings[SHARE] == min(much.memory_fraction, little.memory_fraction)


def share_of(config: RunConfig) -> float | None:
    return check_memory(config, SINGLE).sampling.vllm.memory_fraction


@pytest.mark.parametrize("sampling", [{"vllm": {"sleep": False}}, {"max_lag": 1}])
def test_an_engine_beside_the_update(gpus, tmp_path, sampling):
    gpus.append(gb(80))
    config = four_layers(tmp_path, sampling={**sampling, "max_sequences": 1024, "max_tokens": 4096})
    share, estimate = share_of(config), memory_report(config)
    beside = 14 * estimate.parameters + sum(estimate.update.values())
    assert 0.94 < (share * 80e9 + beside) / 80e9 <= 0.95
    assert estimate.peak == pytest.approx(share * 80e9 + beside)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("total", "settings", "keys"),
    [
        (80, {"sampling": {"vllm": {"memory_fraction": 0.01}}}, {"sampling.vllm.memory_fraction"}),
        (48, AWAKE, {"sampling.vllm.sleep", "sampling.vllm.memory_fraction"}),
        (24, {}, {"model.lora.rank"}),
    ],
)
def test_a_run_that_cannot_fit_is_refused_with_settings_that_help(gpus, tmp_path, total, settings, keys):
    gpus.append(gb(total))
    config = four_layers(tmp_path, **settings)
    with pytest.raises(UserError, match="at the peak by the estimate, GPU 0 has ") as raised:
        check_memory(config, SINGLE)
    assert "\n" not in str(raised.value)
    flags = flags_of(str(raised.value))
    assert {flag.partition("=")[0] for flag in flags} == keys
    for left_out in (None, *flags):
        kept = [flag for flag in flags if flag != left_out]
        changed = resolve([config.model_dump(mode="json"), read_assignments(kept)])
        assert memory_report(changed).fits == (left_out is None), f"{left_out} is not needed"


def test_a_resume_is_advised_to_change_what_may_change(gpus, tmp_path):
    gpus.append(gb(80))
    with pytest.raises(UserError) as raised:
        check_memory(four_layers(tmp_path, **LARGE_UPDATES), SINGLE, changeable=CHANGEABLE_SETTINGS)
    assert flags_of(str(raised.value)) == ["model.gradient_checkpointing=true"]


@pytest.mark.slow
def test_more_gpus_of_the_machine_come_before_other_weights(gpus, tmp_path):
    gpus += [gb(24)] * 8
    config = four_layers(tmp_path)
    with pytest.raises(UserError, match=r"it fits with --nproc 4$"):
        check_memory(config, SINGLE)
    gpus[:] = [gb(6)]
    with pytest.raises(UserError, match="no setting tried makes it fit; use a smaller model or more GPUs"):
        check_memory(config, SINGLE)


@pytest.mark.slow
def test_a_full_gpu_is_named(gpus, tmp_path, monkeypatch):
    gpus.append(gb(80, free=10))
    config = four_layers(tmp_path)
    free = r"GPU 0 has 74\.5 GiB, of which other processes leave 9\.3 GiB"
    with pytest.raises(UserError, match=free) as raised:
        check_memory(config, SINGLE)
    assert "choose another GPU with CUDA_VISIBLE_DEVICES" in str(raised.value)

    def full(card: int) -> None:
        raise torch.OutOfMemoryError("CUDA error: out of memory\nCUDA kernel errors might be asynchronous")

    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    with pytest.raises(UserError, match=r"^model.device = 'auto': the GPU has no memory left; ") as raised:
        check_memory(config, SINGLE)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_large_cache_is_a_warning(gpus, tmp_path, caplog):
    """The transformers engine allocates its cache as completions grow."""
    gpus.append(gb(80))
    sampling = {"engine": "transformers", "max_sequences": 8192, "samples": 256}
    check_memory(four_layers(tmp_path, sampling=sampling), SINGLE)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert flags_of(record.message) == ["sampling.max_sequences=2048"]


@pytest.mark.slow
def test_without_a_gpu(monkeypatch, caplog):
    for gib, levels in ((4, []), (0.3, [logging.WARNING])):
        sizes = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": int(gib * GIB)}
        monkeypatch.setattr(memory_check, "os", SimpleNamespace(sysconf=sizes.__getitem__))
        with caplog.at_level(logging.INFO, "bandpo_cli"):
            check_memory(resolve([]), SINGLE)
        assert [record.levelno for record in caplog.records] == levels
    assert "it fits with --set " in caplog.text


def test_a_run_that_does_not_fit_is_estimated_with_the_longest_prompt_of_its_task(monkeypatch):
    """A prompt such as `2 2 4 5=42:` has 4 digits, 3 spaces, `=`, at most 2 digits, and `:`, each a token."""
    config = resolve([SMALL, {"sampling": {"max_prompt_tokens": 4096, "samples": 16}}])
    task = build_task(config.task)
    for gib, limit in ((4, 4096), (0.25, 4 + 3 + 1 + 2 + 1)):
        sizes = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": int(gib * GIB)}
        monkeypatch.setattr(memory_check, "os", SimpleNamespace(sysconf=sizes.__getitem__))
        estimated, estimate = memory_of_task(config, task)
        assert (estimated.sampling.max_prompt_tokens, estimate.fits) == (limit, True)
        assert memory_report(config).fits == (limit == 4096)


@pytest.mark.parametrize(("problems", "sequences"), [(2, 8), (3, 12), (None, 64)])
def test_an_evaluation_is_estimated_by_its_completions(problems, sequences):
    """The transformers engine samples one batch at a time, of 66 completions here, 4 per problem."""
    evaluation = {"problems": problems, "samples": 4, "k": [1], "batch": 66}
    config = resolve([SMALL, {"task": {"max_number": 9}, "evaluation": evaluation}])
    task = build_task(config.task)
    assert len(task.heldout_sets()["countdown"]) > 16
    estimate = memory_of_task(config, task, training=False)[1]
    assert f"at most: next-token distributions of {sequences} sequences" in estimate.sampling
    assert estimate.sampling["at most: copied weights"] == 0, "its layers are small"


@pytest.mark.slow
def test_the_model_is_not_loaded(gpus, tmp_path, monkeypatch):
    gpus.append(gb(0.5))
    monkeypatch.setattr("bandpo_cli.sampling.rollouts.load_policy", None)
    monkeypatch.setattr(memory_check, "saving_advice", lambda *_: "")  # it tries seventy settings
    with pytest.raises(UserError, match=r"GPU 0 has 0\.5 GiB"):
        train(resolve([SMALL, {"optim": {"micro_batch_tokens": 2**20}}]), runs_dir=tmp_path, name="a")
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_a_resume_keeps_what_the_first_start_has_chosen(tmp_path, monkeypatch):
    keys = ("model.gradient_checkpointing", "optim.micro_batch_tokens", "sampling.vllm.sleep", SHARE)
    open_values, chosen = ["auto", "auto", "auto", None], [True, 40, False, 0.31]
    seen: list[list[Any]] = []

    def checked(config: RunConfig, *_: object, **__: object) -> RunConfig:
        values = flatten(config.model_dump(mode="json"))
        seen.append([values[key] for key in keys])
        return with_values(config, dict(zip(keys, chosen, strict=True))) if len(seen) == 1 else config

    monkeypatch.setattr("bandpo_cli.experiments.run.check_memory", checked)
    config = with_values(resolve([SMALL, {"steps": 1}]), dict(zip(keys, open_values, strict=True)))
    train(config, runs_dir=tmp_path, name="a")
    resume("a", runs_dir=tmp_path, settings=[{"steps": 2}])
    assert seen == [open_values, chosen]
    stored = flatten(read_layer(tmp_path / "a" / "config.yaml"))
    assert [stored[key] for key in keys] == chosen


NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
ROW = re.compile(
    r"\| (\S+)(, LoRA of rank 16)? \| (\d) × (\d+) GB \| (\S+) GiB \| (\S+) \| (\w+) \| (\S+) \| (\w+) \|"
)


@pytest.mark.slow
def test_the_tables_of_the_docs_are_the_estimate(tmp_path, monkeypatch):
    """`--task gsm8k` with vLLM and no other setting, on GPUs of so many 10⁹ bytes."""
    monkeypatch.setattr("bandpo_cli.config.batch_and_sampling.is_installed", lambda package: True)
    rows = [row for page in DOCUMENTS for row in ROW.findall(page.read_text("utf-8"))]
    sizes = {"0.5B": 0.494e9, "1.5B": 1.544e9, "3B": 3.086e9, "7B": 7.616e9}
    parameters = {f"Qwen2.5-{name}": number for name, number in sizes.items()}
    assert {name for name, *_ in rows} == {*parameters}
    for name, lora, count, size, peak, share, *choices in rows:
        adapters = {"model": {"lora": {"rank": 16} if lora else None}}
        config = config_on_disk(tmp_path, f"Qwen/{name}-Instruct", GSM8K, adapters)
        gpu = Device("a GPU", int(size) * 10**9, int(size) * 10**9)
        estimate = estimate_memory(config, gpu, int(count))
        assert estimate.fits, name
        base = estimate.parameters - estimate.trained * bool(lora)
        assert base == pytest.approx(parameters[name], rel=0.001)
        assert (f"{estimate.peak / GIB:.1f}", f"{estimate.memory_fraction:g}") == (peak, share), name
        checkpointing, size, sleep = estimate.chosen.values()
        assert [checkpointing, f"{size:,}", sleep] == [choices[0] == "yes", choices[1], choices[2] == "yes"]


@pytest.mark.parametrize(
    ("given", "lag", "expected"),
    [(None, 0, "expandable_segments:True"), (None, 1, None), (NAMES[0], 0, None), (NAMES[1], 0, "mine")],
)
def test_segments_are_expandable_unless_the_user_has_settings(monkeypatch, given, lag, expected):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(given, "mine")
    use_expandable_segments(lag)
    assert os.environ.pop(NAMES[1], None) == expected


def test_allocator_settings_are_set_before_torch_is_imported(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setitem(sys.modules, "bandpo_cli.models.load", None)  # an import of it raises ImportError
    with pytest.raises(ImportError), ExitStack() as stack:
        load_components(RunConfig(), mock.Mock(), mock.Mock(), stack)
    assert os.environ.pop("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True"
