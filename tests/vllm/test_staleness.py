"""A sync that did not do its work ends the run: no learning from an engine that samples from other weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from bandpo_cli.sampling import vllm_worker
from bandpo_cli.sampling.base import SamplingParams, StaleEngineError
from tests.vllm.conftest import Running, perturb

pytestmark = pytest.mark.vllm

RELOAD = "vllm.v1.worker.gpu_model_runner.reload_weights"
Weights = Iterable[tuple[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def healthy_again(qwen2: Running, monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    """Whatever a test broke, an unbroken sync mends: StaleEngineError has no cause that stays."""
    perturb(qwen2.policy.model)
    yield
    monkeypatch.undo()
    qwen2.sync()
    assert qwen2.sampler.probe_gap <= 1e-4


def sabotage(monkeypatch: pytest.MonkeyPatch, change: Callable[[Weights], Weights]) -> None:
    """Let vLLM's loader see other weights than it was given."""
    from vllm.v1.worker import gpu_model_runner

    real = gpu_model_runner.reload_weights

    def reload(config: Any, model: Any, weights_iterator: Weights, **rest: Any) -> None:
        real(config, model, weights_iterator=change(list(weights_iterator)), **rest)

    monkeypatch.setattr(RELOAD, reload)


def test_nothing_loaded(qwen2: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RELOAD, lambda *args, **kwargs: None)
    with pytest.raises(
        StaleEngineError, match=r"in part: lm_head.weight|in part: model.embed_tokens.weight was not read"
    ):
        qwen2.sync()


@pytest.mark.parametrize(
    "missing", ["layers.1.mlp.down_proj", "model.norm.weight", "layers.0.input_layernorm", "embed_tokens"]
)
def test_one_tensor_not_loaded(qwen2: Running, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    sabotage(monkeypatch, lambda weights: [pair for pair in weights if missing not in pair[0]])
    with pytest.raises(StaleEngineError, match=rf"in part: .*{missing}.* was not filled"):
        qwen2.sync()


def test_one_part_of_a_fused_tensor_not_loaded(qwen2: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls qkv_proj loaded when one of the three is: the log-probs of the probe tell."""
    sabotage(
        monkeypatch,
        lambda weights: [pair for pair in weights if "layers.1.self_attn.k_proj.weight" not in pair[0]],
    )
    with pytest.raises(StaleEngineError, match="log-probs of a fixed sequence"):
        qwen2.sync()


@pytest.mark.parametrize(
    ("part", "line"), [("model.norm", "model.norm.weight differs"), ("gate_proj", "log-probs")]
)
def test_other_values_than_were_given(
    qwen2: Running, monkeypatch: pytest.MonkeyPatch, part: str, line: str
) -> None:
    """A norm is compared bit by bit, so a millionth is enough; what is fused and repacked is compared by its effect."""
    amount = 1 + 1e-6 if part == "model.norm" else 1.3
    sabotage(monkeypatch, lambda weights: [(name, w * amount if part in name else w) for name, w in weights])
    with pytest.raises(StaleEngineError, match=line):
        qwen2.sync()


def test_a_tied_output_layer_left_as_it_was(qwen2: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM 0.32 does on a CPU: without the repacking, the probe would stop the run."""
    monkeypatch.setattr(vllm_worker, "_repack_tied", lambda model: None)
    with pytest.raises(StaleEngineError, match="log-probs of a fixed sequence"):
        qwen2.sync()


def test_a_stamp_that_is_another(qwen2: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = type(qwen2.sampler._llm.llm_engine.model_executor.driver_worker.worker)
    state = worker.policy_state
    monkeypatch.setattr(worker, "policy_state", lambda self, shapes: (3, state(self, shapes)[1]))
    qwen2.version = 20
    with pytest.raises(StaleEngineError, match="version 3 of the weights, not 21"):
        qwen2.sync()


def test_vllm_fails_while_loading(qwen2: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no room\nfor the weights")

    monkeypatch.setattr(RELOAD, fail)
    with pytest.raises(
        StaleEngineError, match=r"could not load version \d+ of the weights: RuntimeError: no room$"
    ):
        qwen2.sync()


def test_a_prefix_cache_that_is_not_reset(qwen2: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM says so; and where it only claims to have reset it, the continued probe reads the old keys and values."""
    engine = qwen2.sampler._llm
    monkeypatch.setattr(engine, "reset_prefix_cache", lambda: False)
    with pytest.raises(StaleEngineError, match="did not clear the cached prompts"):
        qwen2.sync()
    monkeypatch.setattr(engine, "reset_prefix_cache", lambda: True)
    with pytest.raises(StaleEngineError, match="log-probs of a fixed sequence"):
        qwen2.sync()


def test_the_prefix_cache_is_in_use(qwen2: Running) -> None:
    """Else the test above would prove nothing: a prompt seen before is not computed again, until a sync."""
    prompt, params = tuple(range(4, 94)), SamplingParams(1, 1.0, 4, (2,))

    def cached() -> int:
        from bandpo_cli.sampling.vllm_sampler import _request

        output = qwen2.sampler._generate([prompt], [_request(params, 1)])[0]
        return int(output.num_cached_tokens)

    assert cached() == 0
    assert cached() == 64
    qwen2.sync()
    assert cached() == 0
