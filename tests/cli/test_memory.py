"""Out of memory: the error message and the estimate name settings that need less memory, with values."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from bandpo_cli.cli.statement import print_memory
from bandpo_cli.config.layers import read_assignments, resolve
from bandpo_cli.config.run import LoraSettings, RunConfig
from bandpo_cli.errors import RunError, UserError
from bandpo_cli.experiments.memory import (
    GIB,
    EngineGpu,
    memory_report,
    memory_report_on,
    memory_saving_settings,
    out_of_memory_errors,
)
from bandpo_cli.sampling.engine_channel import portable_error

GSM8K = {"task": {"name": "gsm8k"}, "model": {"path": "org/none"}}


def allocate_too_much() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def raise_memory_error() -> None:
    raise MemoryError


def raise_cuda_error() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
    )


@pytest.mark.parametrize("fail", [allocate_too_much, raise_memory_error, raise_cuda_error])
def test_out_of_memory_is_one_line_with_valid_settings(fail: object) -> None:
    config = resolve([GSM8K])
    with pytest.raises(RunError) as raised, out_of_memory_errors(config):
        fail()  # type: ignore[operator]
    line = str(raised.value)
    assert line.startswith("out of memory (")
    assert "\n" not in line
    settings = re.findall(r"--set (\S+?)(?:,|$)", line)
    less = resolve([GSM8K, read_assignments(settings)])
    assert less.optim.micro_batch_tokens < config.optim.micro_batch_tokens
    assert less.model.gradient_checkpointing
    assert less.model.dtype == "bfloat16"


def test_other_errors_are_unchanged() -> None:
    with pytest.raises(RuntimeError, match="something else"), out_of_memory_errors(resolve([])):
        raise RuntimeError("something else")


def test_the_estimate_is_printed_by_part_with_the_available_memory() -> None:
    out = io.StringIO()
    print_memory(Console(file=out, width=120), resolve([]))
    text = out.getvalue()
    for part in ("1.1M parameters", "weights", "gradients", "AdamW", "activations of 16,384 tokens", "fits"):
        assert part in text


def test_the_estimate_of_several_ranks_is_that_of_each() -> None:
    out = io.StringIO()
    print_memory(Console(file=out, width=120), resolve([]), ranks=2)
    text = out.getvalue()
    for part in ("1.1M parameters, a rank of 2", "weights (float32)", "complete parameters", "gradients"):
        assert part in text
    assert "at the peak of each rank, this machine / 2 ranks (no GPU) has" in text
    one, two = memory_report(resolve([])), memory_report(resolve([]), ranks=2)
    assert two.available == one.available // 2
    assert two.estimate.always["AdamW"] == pytest.approx(one.estimate.always["AdamW"] / 2, rel=0.001)


def test_an_engine_that_sleeps_shares_memory_with_the_update() -> None:
    """The engine is awake while a complete weight is sent to it, and not during an update."""
    config = resolve([{"sampling": {"engine": "vllm", "vllm": {"sleep": True}}}])
    report = memory_report_on(config, "a GPU", 2**40, on_gpu=True, ranks=2)
    estimate = report.estimate
    sent = estimate.sampling["a complete weight, to send it to the engine"]
    assert report.peak == sum(estimate.always.values()) + report.engine + sent
    awake = config.model_copy(update={"sampling": config.sampling.model_copy(
        update={"vllm": config.sampling.vllm.model_copy(update={"sleep": False})})})  # fmt: skip
    report = memory_report_on(awake, "a GPU", 2**40, on_gpu=True, ranks=2)
    assert report.peak == sum(estimate.always.values()) + report.engine + estimate.updating


def test_too_large_an_estimate_names_settings_to_change() -> None:
    out = io.StringIO()
    enormous = resolve([{"optim": {"micro_batch_tokens": 500_000_000}}])
    print_memory(Console(file=out, width=300), enormous)
    assert "too much" in out.getvalue()
    assert "--set optim.micro_batch_tokens=250000000" in out.getvalue()


@pytest.mark.parametrize(
    ("name", "gib"), [("auto", 80), ("cuda", 80), ("cuda:0", 80), ("cuda:1", 40), ("cpu", None)]
)
def test_the_estimate_is_compared_with_the_gpu_that_the_run_uses(
    monkeypatch: pytest.MonkeyPatch, name: str, gib: int | None
) -> None:
    def properties(device: str) -> SimpleNamespace:
        index = torch.device(device).index or 0
        return SimpleNamespace(name=f"GPU {index}", total_memory=(80, 40)[index] * GIB)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    report = memory_report(resolve([{"model": {"device": name}, "sampling": {"engine": "transformers"}}]))
    assert report.device.startswith("GPU") == (gib is not None)
    assert gib is None or report.available == gib * GIB


def test_a_gpu_that_does_not_exist_has_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(device: str) -> None:
        raise AssertionError("Invalid device id")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    with pytest.raises(UserError, match="'cuda:7': not usable on this machine: Invalid device id"):
        memory_report(resolve([{"model": {"device": "cuda:7"}}]))


def test_a_model_without_a_readable_config_has_no_estimate(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    out = io.StringIO()
    print_memory(Console(file=out, width=300), resolve([{"model": {"path": str(tmp_path)}}]))
    assert "no estimate of memory" in out.getvalue()


def test_the_copy_for_a_checkpoint_counts_where_it_fits() -> None:
    """Without memory for it a run takes no copy, so that the estimate has none."""
    ample = memory_report_on(resolve([]), "this machine", 2**40, on_gpu=False)
    scarce = memory_report_on(resolve([]), "this machine", ample.peak, on_gpu=False)
    copied = ample.estimate.always["copy for a checkpoint"]
    assert "copy for a checkpoint" not in scarce.estimate.always
    assert scarce.peak == ample.peak - copied
    assert copied == 12 * ample.estimate.parameters


def lag_of_1(**sampling: Any) -> RunConfig:
    """Return settings of rollouts one step ahead, with 8 prompts × 4 completions of 30 + 20 tokens per step."""
    sizes = {"prompts": 8, "samples": 4, "max_prompt_tokens": 30, "max_tokens": 20}
    return resolve([{"sampling": {**sizes, "max_lag": 1, **sampling}}])


def without_lag(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"sampling": config.sampling.model_copy(update={"max_lag": 0})})


VOCABULARY = 20
PARAMETERS = 5 * (4 * 128**2 + 3 * 128 + 3 * 128 * 384 + 2 * 128) + VOCABULARY * 128 + 128
"""Of the embedded model: 5 layers, the embedding, which is also the output layer, and the last norm."""
CACHE = 32 * 50 * 2 * 5 * 4 * 32
"""Elements of keys and values: sequences × tokens × 2 × layers × key-value heads × head size."""


def test_an_engine_process_on_a_cpu_has_a_copy_of_the_weights_and_samples_during_the_update() -> None:
    config = lag_of_1()
    report = memory_report_on(config, "this machine", 2**40, on_gpu=False)
    estimate = report.estimate
    assert report.engine_peak == 4 * PARAMETERS + 4 * CACHE + 32 * 24 * VOCABULARY
    assert report.engine_gpu is None
    assert estimate.sampling == {}
    assert report.peak == sum(estimate.always.values()) + sum(estimate.update.values()) + report.engine_peak
    before = memory_report_on(without_lag(config), "this machine", 2**40, on_gpu=False)
    assert before.process == {}
    assert before.estimate.always == estimate.always
    assert before.estimate.update == estimate.update
    assert report.peak - before.peak == report.engine_peak, "the update is the larger phase"


def test_adapters_are_merged_in_the_weights_of_the_engine_process() -> None:
    config = lag_of_1()
    lora = config.model_copy(update={"model": config.model.model_copy(update={"lora": LoraSettings(rank=8)})})
    process = memory_report_on(lora, "this machine", 2**40, on_gpu=False).process
    assert process["weights of the engine process"] == 4 * PARAMETERS


def test_an_engine_process_on_the_trainers_gpu_does_not_sleep() -> None:
    config = lag_of_1(engine="vllm", vllm={"sleep": True, "memory_fraction": 0.25})
    report = memory_report_on(config, "a GPU", 80 * GIB, on_gpu=True)
    assert report.engine == 20 * GIB
    assert report.process == {"weights of the engine process": 2 * PARAMETERS}
    held = sum(report.estimate.always.values()) + 20 * GIB + 2 * PARAMETERS
    assert report.peak == held + sum(report.estimate.update.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_process_with_a_gpu_of_its_own_leaves_that_of_the_trainer_alone(ranks: int) -> None:
    config = lag_of_1(engine="vllm", vllm={"memory_fraction": 0.5})
    other = EngineGpu("cuda:1", "a small GPU", 24 * GIB)
    report = memory_report_on(config, "a GPU", 80 * GIB, True, ranks, other)
    assert report.engine == 12 * GIB
    assert report.engine_peak == 12 * GIB + 2 * PARAMETERS
    assert report.peak == report.estimate.peak
    shared = memory_report_on(config, "a GPU", 80 * GIB, True, ranks)
    assert shared.engine == 40 * GIB
    assert shared.peak == report.peak + 40 * GIB + 2 * PARAMETERS


def test_each_gpu_must_have_enough_memory() -> None:
    """vLLM takes 90% of the engine's GPU, so that 2 bytes per parameter must be less than 5% of it."""
    config = lag_of_1(engine="vllm", vllm={"memory_fraction": 0.9})
    enough, scarce = (
        memory_report_on(config, "a GPU", 80 * GIB, True, 1, EngineGpu("cuda:1", "a GPU", available))
        for available in (41 * PARAMETERS, 39 * PARAMETERS)
    )
    assert (enough.trainer_fits, enough.engine_fits, enough.fits) == (True, True, True)
    assert (scarce.trainer_fits, scarce.engine_fits, scarce.fits) == (True, False, False)
    small = memory_report_on(config, "a GPU", GIB // 2, True, 1, EngineGpu("cuda:1", "a GPU", 80 * GIB))
    assert (small.trainer_fits, small.engine_fits, small.fits) == (False, True, False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the GiB of each GPU of this machine, which a test fills."""
    sizes: list[int] = []

    def properties(device: str | int) -> SimpleNamespace:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        return SimpleNamespace(name=f"GPU {index}", total_memory=sizes[index] * GIB)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr("bandpo_cli.config.sampling.is_installed", lambda package: True)
    return sizes


@pytest.mark.parametrize(
    ("sizes", "device", "ranks", "found"),
    [
        ([80], "auto", 1, None),
        ([80, 40], "auto", 1, ("cuda:1", "GPU 1", 40)),
        ([80, 40], "cuda:1", 1, ("cuda:0", "GPU 0", 80)),
        ([80, 80, 80], "auto", 2, None),
        ([80, 80, 24, 24], "auto", 2, ("cuda:2, cuda:3", "GPU 2", 24)),
    ],
)
def test_the_engine_is_estimated_on_the_gpu_that_it_will_have(
    gpus: list[int], sizes: list[int], device: str, ranks: int, found: tuple[str, str, int] | None
) -> None:
    gpus += sizes
    config = lag_of_1()
    config = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
    report = memory_report(config, ranks)
    expected = None if found is None else EngineGpu(found[0], found[1], found[2] * GIB)
    assert report.engine_gpu == expected
    assert memory_report(without_lag(config), ranks).engine_gpu is None


def printed(config: RunConfig, ranks: int = 1) -> str:
    out = io.StringIO()
    print_memory(Console(file=out, width=300), config, ranks)
    return out.getvalue()


def test_both_gpus_are_printed(gpus: list[int]) -> None:
    gpus += [80, 40]
    text = printed(lag_of_1())
    assert "at the peak, GPU 0 has 80.0 GiB: fits" in text
    assert "engine  20.0 GiB on a GPU of its own (cuda:1), GPU 1 has 40.0 GiB: fits" in text
    rows = {line.split("  ")[0]: line.split()[-1] for line in text.splitlines()}
    assert rows["weights of the engine process"] == rows["vLLM: weights and cache"] == "GPU"
    assert rows["weights"] == "always"
    assert "GPU of its own" not in printed(without_lag(lag_of_1()))
    gpus += [40, 40]
    two = printed(lag_of_1(), ranks=2)
    assert "engine  20.0 GiB each, on GPUs of their own (cuda:2, cuda:3), GPU 2 has 40.0 GiB: fits" in two


def test_an_engine_that_samples_during_the_update_is_printed_as_held_always(gpus: list[int]) -> None:
    gpus += [80]
    for lag, phase in ((1, "always"), (0, "sampling")):
        text = printed(lag_of_1(max_lag=lag))
        assert ("weights of the engine process" in text) == (lag == 1)
        (row,) = (line for line in text.splitlines() if line.startswith("vLLM: weights and cache"))
        assert row.split() == ["vLLM:", "weights", "and", "cache", "40.00", phase]


def test_the_advice_is_for_the_gpu_with_too_little_memory(gpus: list[int]) -> None:
    gpus += [80, 1]
    config = lag_of_1(vllm={"memory_fraction": 0.999})
    text = printed(config)
    assert "GPU 0 has 80.0 GiB: fits" in text
    assert "GPU 1 has 1.0 GiB: too much" in text
    assert "--set sampling.vllm.memory_fraction=0.4995" in text
    assert "optim.micro_batch_tokens" not in text


def settings_of(advice: str) -> list[str]:
    return re.findall(r"--set (\S+?)(?:,|$)", advice)


@pytest.mark.parametrize(
    ("engine", "on_gpu", "of_the_engine"),
    [
        ("transformers", False, ["sampling.max_lag=0", "sampling.max_sequences=512"]),
        ("vllm", False, ["sampling.max_lag=0", "sampling.vllm.kv_cache_gb=1"]),
        (
            "vllm",
            True,
            ["sampling.max_lag=0", "sampling.vllm.sleep=true", "sampling.vllm.memory_fraction=0.25"],
        ),
    ],
)
def test_less_memory_without_a_lag(engine: str, on_gpu: bool, of_the_engine: list[str]) -> None:
    """Not where the engine has a GPU to itself: without a lag it would be on that of the trainer."""
    config = lag_of_1(engine=engine, vllm={"sleep": False})
    found = settings_of(memory_saving_settings(config, on_gpu))
    assert [
        each for each in found if each.startswith(("sampling.max_lag", "sampling.vllm", "sampling.max_seq"))
    ] == (of_the_engine)
    resolve([config.model_dump(mode="json"), read_assignments(found)])
    apart = settings_of(memory_saving_settings(config, on_gpu, engine_has_gpu=True))
    assert apart == [each for each in found if each not in ("sampling.max_lag=0", "sampling.vllm.sleep=true")]
    assert "sampling.max_lag=0" not in memory_saving_settings(config, on_gpu, training=False)
    assert "sampling.max_lag=0" not in memory_saving_settings(without_lag(config), on_gpu)


@pytest.mark.parametrize(("cards", "advised"), [(1, True), (2, False)])
def test_out_of_memory_with_a_lag(gpus: list[int], cards: int, advised: bool) -> None:
    gpus += [80] * cards
    with pytest.raises(RunError) as raised, out_of_memory_errors(lag_of_1()):
        raise_cuda_error()
    assert ("--set sampling.max_lag=0" in str(raised.value)) == advised


@pytest.mark.parametrize(("cards", "helps"), [(1, True), (2, False)])
def test_out_of_memory_of_an_engine_process_with_a_gpu_to_itself(
    gpus: list[int], cards: int, helps: bool
) -> None:
    """Settings of the updates are advised where the trainer shares its GPU, and only there."""
    gpus += [80] * cards
    with pytest.raises(RunError) as raised, out_of_memory_errors(lag_of_1()):
        raise portable_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB."))
    assert "out of memory (engine process: " in str(raised.value)
    settings = settings_of(str(raised.value))
    assert ("optim.micro_batch_tokens" in settings[0]) == helps
    assert any(each.startswith("sampling.") for each in settings)
    assert any(each.startswith("model.lora") for each in settings) == helps
