"""Engines beside the usual one: a model that vLLM refuses, several workers, and an engine in a process of its own."""

import multiprocessing
import os

import pytest

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import UserError
from bandpo_cli.models.load import load_policy
from bandpo_cli.models.weights import checkpoint_weights
from bandpo_cli.sampling.engine_process import EngineProcess
from bandpo_cli.sampling.sampler import SampleRequest, SamplingParams
from bandpo_cli.sampling.vllm_worker import ComparedWeights, as_numbers
from tests.sampling.stub_engine import forked_engines

pytest.importorskip("vllm")

from tests.vllm.engines import SAMPLING, Running, perturb, random_policy, start
from tests.vllm.test_sampling import PARAMS, PROMPTS, gap

pytestmark = pytest.mark.vllm


def test_model_that_vllm_cannot_run_raises_a_one_line_error():
    """No attention kernel supports a head dimension of 6."""
    policy = random_policy("llama")
    policy.model.config.head_dim = 6
    with pytest.raises(
        UserError, match=r"sampling.engine = 'vllm': vLLM cannot run this model.+head_dim=6"
    ) as caught:
        start(policy)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two cores")
def test_engine_with_two_worker_processes(monkeypatch):
    """As with two GPUs: weights reach both workers, each reports its version, and the log-probs are correct."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    # By default vLLM runs one CPU worker per NUMA node.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    # vLLM spawns CPU workers, each of which imports vLLM; forks have it.
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr("vllm.v1.executor.multiproc_executor.get_mp_context", lambda: fork)
    policy = random_policy("qwen2")
    sampler = start(policy, vllm=SAMPLING["vllm"] | {"tensor_parallel": 2})
    perturb(policy.model)
    sampler.sync(policy.model, 1)
    assert sampler.check.gap <= 1e-4
    compared = ComparedWeights(checkpoint_weights(policy.model), 2)
    list(compared)
    answers = sampler._llm.collective_rpc("policy_state", args=(compared.shapes,))
    assert [version for version, _ in answers] == [1, 1]
    assert answers[0][1] == answers[1][1]
    assert (
        answers[0][1].items() <= as_numbers(compared.fingerprints).items()
    )  # vLLM fuses the biases of the projections
    assert len(answers[0][1]) == 5  # two norms per layer and the final norm
    assert sampler.sample([(5, 6, 7)], PARAMS, 1)[0][0].policy_version == 1
    sampler.close()


def test_an_engine_process_runs_the_weights_of_the_last_sync():
    """With its checks, and the same completions in a stream."""
    sampling = SAMPLING | {"engine": "vllm", "max_lag": 1, "stop": "9"}
    settings = {"model": {"device": "cpu"}, "sampling": sampling}
    config = RunConfig.model_validate(settings)
    policy = load_policy(config.model)
    with forked_engines():
        engine = EngineProcess(config, policy)
    running = Running(policy, engine)
    try:
        assert engine.describe()["engine"] == "vllm"
        before = engine.sample(PROMPTS, PARAMS, seed=1)
        assert gap(running, before, 1.0) <= 1e-4
        texts = [policy.tokenizer.decode([*item.token_ids]) for group in before for item in group]
        assert {text.find("9") - len(text) for text in texts if "9" in text} == {-1}
        perturb(policy.model)
        assert gap(running, before, 1.0) > 0.05
        running.sync()
        after = engine.sample(PROMPTS, PARAMS, seed=1)
        assert gap(running, after, 1.0) <= 1e-4
        assert {item.policy_version for group in after for item in group} == {1}
        requests = [SampleRequest(PROMPTS[:2], 1), SampleRequest(PROMPTS[2:], 3)]
        streamed = [group for _, groups in engine.sample_stream(requests, PARAMS) for group in groups]
        assert [[item.token_ids for item in group] for group in streamed] == [
            [item.token_ids for item in group] for group in after
        ]
        stream = engine.sample_stream(requests * 3, SamplingParams(4, 1.0, 20, ()))
        next(stream)
        stream.close()
        assert gap(running, engine.sample(PROMPTS, PARAMS, seed=2), 1.0) <= 1e-4
    finally:
        engine.close()
