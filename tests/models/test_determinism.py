"""`deterministic: true`: no number changes on a CPU, the environment of a GPU, and what is refused."""

import os
import sys
from typing import Any

import pytest
import torch

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import UserError
from bandpo_cli.experiments import train
from bandpo_cli.metric_names import without_clock
from bandpo_cli.models import load
from bandpo_cli.models.load import VARIABLES, deterministic_kernels
from bandpo_cli.sampling.vllm_worker import engine_threads
from tests.experiments.test_api import SMALL

SWITCH: dict[str, Any] = {"deterministic": True}
VLLM: dict[str, Any] = SWITCH | {"sampling": {"engine": "vllm"}}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a copy of the environment without the variables."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in VARIABLES})


def variables_of(config: RunConfig, training: bool = True) -> dict[str, str]:
    """Return the environment within the block of a run."""
    with deterministic_kernels(config, training):
        return dict(os.environ)


def use_gpu(monkeypatch: pytest.MonkeyPatch, capability: int, started: bool = False) -> None:
    monkeypatch.setattr(load, "is_gpu", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)


@pytest.mark.slow
def test_it_changes_no_number_on_a_cpu(tmp_path):
    results = [
        train(resolve([SMALL, {"deterministic": value}]), runs_dir=tmp_path, name=str(value))
        for value in (False, True)
    ]
    records = [[without_clock(record) for record in result.records] for result in results]
    assert records[0] == records[1]
    files = [
        next(iter(sorted(result.folder.glob("checkpoints/*/model.safetensors"), reverse=True))).read_bytes()
        for result in results
    ]
    assert files[0] == files[1]
    assert "deterministic: true" in (results[1].folder / "config.yaml").read_text()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_mode_of_torch_is_on_in_the_block_but_not_in_calls_of_vllm():
    with deterministic_kernels(RunConfig(deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        with engine_threads(1):
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_a_deterministic_kernel_is_one_line():
    values, index = torch.zeros(3), torch.tensor([1])
    with (
        pytest.raises(UserError, match=r"^deterministic = true: put_ .*; set deterministic=false$"),
        deterministic_kernels(RunConfig(deterministic=True)),
    ):
        values.put_(index, torch.ones(1))
    with pytest.raises(RuntimeError, match="other"), deterministic_kernels(RunConfig(deterministic=True)):
        raise RuntimeError("other")


def test_the_environment_of_a_gpu(monkeypatch):
    use_gpu(monkeypatch, capability=8)
    assert VARIABLES.items() <= variables_of(RunConfig(deterministic=True)).items()
    use_gpu(monkeypatch, capability=8, started=True)
    variables_of(RunConfig(deterministic=True))  # a second run in the same process
    del os.environ["CUBLAS_WORKSPACE_CONFIG"]
    with pytest.raises(UserError, match="without CUBLAS_WORKSPACE_CONFIG=:4096:8; start a new one"):
        variables_of(RunConfig(deterministic=True))


@pytest.mark.parametrize(
    ("capability", "lag", "training", "refused"),
    [(9, 0, True, None), (8, 0, True, "9.0"), (8, 1, True, None), (8, 0, False, None), (7, 1, True, "8.0")],
)
def test_vllm_needs_a_gpu_with_batch_invariant_kernels(capability, lag, training, refused, monkeypatch):
    use_gpu(monkeypatch, capability)
    config = resolve([VLLM, {"sampling": {"max_lag": lag}}])
    if refused is None:
        size = variables_of(config, training)["CUBLAS_WORKSPACE_CONFIG"]
        assert size == (":4096:8" if lag else ":16:8")
        return
    with pytest.raises(UserError, match=f"capability {refused} or more"):
        variables_of(config, training)


def test_vllm_on_a_cpu_is_refused_where_the_time_of_graders_decides_its_batches():
    variables_of(resolve([VLLM]))
    with pytest.raises(UserError, match="depend on its batches"):
        variables_of(resolve([VLLM, {"grading": {"while_sampling": True}}]))
