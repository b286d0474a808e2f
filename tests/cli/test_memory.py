"""Out of memory: the error message and the estimate name settings that need less memory, with values."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from bandpo_cli.cli.statement import print_memory
from bandpo_cli.config.layers import read_assignments, resolve
from bandpo_cli.errors import RunError, UserError
from bandpo_cli.experiments.memory import GIB, memory_report, memory_report_on, out_of_memory_errors

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
