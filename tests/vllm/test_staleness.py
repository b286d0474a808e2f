"""A sync after which the engine does not run the new weights raises StaleEngineError."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from bandpo_cli.sampling import sync_check, vllm_worker
from bandpo_cli.sampling.sampler import SamplingParams, StaleEngineError
from tests.vllm.conftest import Running, perturb

pytestmark = pytest.mark.vllm

RELOAD = "vllm.v1.worker.gpu_model_runner.reload_weights"
Weights = Iterable[tuple[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def engine_recovers(qwen2: Running, monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    """Check that the engine recovers by a regular sync from whatever a test broke."""
    perturb(qwen2.policy.model)
    yield
    monkeypatch.undo()
    qwen2.sync()
    assert qwen2.sampler.probe_gap <= 1e-4


def change_loaded_weights(monkeypatch: pytest.MonkeyPatch, change: Callable[[Weights], Weights]) -> None:
    """Make vLLM's loader load other weights than those of the sync."""
    from vllm.v1.worker import gpu_model_runner

    real = gpu_model_runner.reload_weights

    def reload(config: Any, model: Any, weights_iterator: Weights, **rest: Any) -> None:
        real(config, model, weights_iterator=change(list(weights_iterator)), **rest)

    monkeypatch.setattr(RELOAD, reload)


def test_no_weights_loaded(qwen2: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RELOAD, lambda *args, **kwargs: None)
    with pytest.raises(
        StaleEngineError, match=r"in part: lm_head.weight|in part: model.embed_tokens.weight was not read"
    ):
        qwen2.sync()


@pytest.mark.parametrize(
    "missing", ["layers.1.mlp.down_proj", "model.norm.weight", "layers.0.input_layernorm", "embed_tokens"]
)
def test_one_tensor_not_loaded(qwen2: Running, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    change_loaded_weights(monkeypatch, lambda weights: [pair for pair in weights if missing not in pair[0]])
    with pytest.raises(StaleEngineError, match=rf"in part: .*{missing}.* was not filled"):
        qwen2.sync()


def test_one_part_of_a_fused_tensor_not_loaded(qwen2: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reports qkv_proj as loaded if one of its three tensors is; the log-probs of the probe detect it."""
    change_loaded_weights(
        monkeypatch,
        lambda weights: [pair for pair in weights if "layers.1.self_attn.k_proj.weight" not in pair[0]],
    )
    with pytest.raises(StaleEngineError, match="log-probs of sampled tokens"):
        qwen2.sync()


@pytest.mark.parametrize(
    ("part", "line"), [("model.norm", "model.norm.weight differs"), ("gate_proj", "log-probs")]
)
def test_changed_values_are_detected(
    qwen2: Running, monkeypatch: pytest.MonkeyPatch, part: str, line: str
) -> None:
    """Norms are compared bit by bit, so a millionth is enough; fused and repacked weights are compared by log-probs."""
    amount = 1 + 1e-6 if part == "model.norm" else 1.3
    change_loaded_weights(
        monkeypatch, lambda weights: [(name, w * amount if part in name else w) for name, w in weights]
    )
    with pytest.raises(StaleEngineError, match=line):
        qwen2.sync()


def test_a_stale_engine_is_noticed_at_the_next_complete_check(
    qwen2: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two syncs of three compare the version alone."""
    monkeypatch.setattr(sync_check, "CHECK_EVERY", 3)
    qwen2.sync()
    perturb(qwen2.policy.model)
    change_loaded_weights(
        monkeypatch, lambda weights: [(name, w * 1.3 if "gate_proj" in name else w) for name, w in weights]
    )
    qwen2.sync()
    qwen2.sync()
    with pytest.raises(StaleEngineError, match="log-probs of sampled tokens"):
        qwen2.sync()


def test_tied_output_layer_that_is_not_updated(qwen2: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.32 does not update it on a CPU: without the repacking, the probe fails."""
    monkeypatch.setattr(vllm_worker, "_repack_tied", lambda model: None)
    with pytest.raises(StaleEngineError, match="log-probs of sampled tokens"):
        qwen2.sync()


def test_wrong_version_in_a_worker(qwen2: Running, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_prefix_cache_that_is_not_cleared(qwen2: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reports it; if vLLM wrongly reports success, the continued probe reads the old keys and values."""
    engine = qwen2.sampler._llm
    monkeypatch.setattr(engine, "reset_prefix_cache", lambda: False)
    with pytest.raises(StaleEngineError, match="did not clear the cached prompts"):
        qwen2.sync()
    monkeypatch.setattr(engine, "reset_prefix_cache", lambda: True)
    with pytest.raises(StaleEngineError, match="log-probs of sampled tokens"):
        qwen2.sync()


def test_the_prefix_cache_is_in_use(qwen2: Running) -> None:
    """A repeated prompt is not computed again until a sync; otherwise the test above would prove nothing."""
    prompt, params = tuple(range(4, 94)), SamplingParams(1, 1.0, 4, (2,))

    def cached() -> int:
        from bandpo_cli.sampling.vllm_sampler import _request

        output = qwen2.sampler._generate([prompt], [_request(params, 1)])[0]
        return int(output.num_cached_tokens)

    assert cached() == 0
    assert cached() == 64
    qwen2.sync()
    assert cached() == 0
