"""An engine does not change the trainer's process, shuts down when it is closed, and can be started again."""

import os
import signal

import pytest
import torch

pytest.importorskip("vllm")

from bandpo_cli.errors import UserError
from bandpo_cli.models.weights import checkpoint_weights
from bandpo_cli.sampling.sampler import SamplingParams
from bandpo_cli.sampling.sync_check import HALF_PRECISION_LIMIT
from bandpo_cli.sampling.vllm_worker import ComparedWeights
from tests.vllm.conftest import perturb, random_policy, start

pytestmark = pytest.mark.vllm

PARAMS = SamplingParams(samples=4, temperature=1.0, max_tokens=12, stop_ids=(2, 3))


def test_engine_starts_twice_and_restores_the_process_state(capfd: pytest.CaptureFixture[str]) -> None:
    """Threads, cores, signals, torch's random state and the environment are unchanged; nothing is printed.

    The first engine samples more sequences than its limit. The log-probs of bfloat16 weights differ by rounding in the
    kernels; their version, norms and embedding are identical.
    """
    policy = random_policy("qwen2")

    def state() -> tuple[object, ...]:
        return (
            torch.get_num_threads(), torch.set_num_threads, os.sched_getaffinity(0), os.environ.get("LD_PRELOAD"),
            signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), torch.get_rng_state().tolist(),
        )  # fmt: skip

    before = state()
    sampler = start(policy, max_sequences=3)
    assert state() == before
    assert capfd.readouterr() == ("", "")
    groups = sampler.sample([(5, 6), (7, 8, 9)], PARAMS, 1)
    assert [len(group) for group in groups] == [4, 4]
    assert torch.get_num_threads() == before[0]
    sampler.close()
    sampler.close()

    policy.model.to(torch.bfloat16)
    again = start(policy)
    perturb(policy.model)
    again.sync(policy.model, 1)
    assert 1e-4 < again.probe_gap < HALF_PRECISION_LIMIT / 2
    again.close()


def test_model_that_vllm_cannot_run_raises_a_one_line_error() -> None:
    """No attention kernel supports a head dimension of 6."""
    policy = random_policy("llama")
    policy.model.config.head_dim = 6
    with pytest.raises(
        UserError, match=r"sampling.engine = 'vllm': vLLM cannot run this model.+head_dim=6"
    ) as caught:
        start(policy)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two cores")
def test_engine_with_two_worker_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with two GPUs: weights reach both workers, each reports its version, and the log-probs are correct."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    # By default vLLM runs one CPU worker per NUMA node.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    policy = random_policy("qwen2")
    sampler = start(policy, vllm={"kv_cache_gb": 0.5, "eager": True, "tensor_parallel": 2})
    perturb(policy.model)
    sampler.sync(policy.model, 1)
    assert sampler.probe_gap <= 1e-4
    compared = ComparedWeights(checkpoint_weights(policy.model), 2)
    list(compared)
    answers = sampler._llm.collective_rpc("policy_state", args=(compared.shapes,))
    assert [version for version, _ in answers] == [1, 1]
    assert answers[0][1] == answers[1][1]
    assert answers[0][1].items() <= compared.fingerprints.items()  # vLLM fuses the biases of the projections
    assert len(answers[0][1]) == 5  # two norms per layer and the final norm
    assert sampler.sample([(5, 6, 7)], PARAMS, 1)[0][0].policy_version == 1
    sampler.close()
