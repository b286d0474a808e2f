"""vLLM in an engine process: the weights of the last sync, with its checks, and the same completions as in a stream."""

import pytest

from bandpo_cli.config.run import RunConfig
from bandpo_cli.models.load import load_policy
from bandpo_cli.sampling.sampler import SampleRequest, SamplingParams

pytest.importorskip("vllm")

from bandpo_cli.sampling.engine_process import EngineProcess
from tests.sampling.stub_engine import forked_engines
from tests.vllm.conftest import SAMPLING, Running, perturb
from tests.vllm.test_sampling import PARAMS, PROMPTS, gap

pytestmark = pytest.mark.vllm


def test_an_engine_process_runs_the_weights_of_the_last_sync() -> None:
    settings = {"model": {"device": "cpu"}, "sampling": SAMPLING | {"engine": "vllm", "max_lag": 1}}
    config = RunConfig.model_validate(settings)
    policy = load_policy(config.model)
    with forked_engines():
        engine = EngineProcess(config, policy)
    running = Running(policy, engine)  # type: ignore[arg-type]
    try:
        assert engine.describe()["engine"] == "vllm"
        before = engine.sample(PROMPTS, PARAMS, seed=1)
        assert gap(running, before, 1.0) <= 1e-4
        perturb(policy.model)
        assert gap(running, before, 1.0) > 0.05
        running.sync()
        after = engine.sample(PROMPTS, PARAMS, seed=1)
        assert gap(running, after, 1.0) <= 1e-4
        assert {item.policy_version for group in after for item in group} == {1}
        requests = [SampleRequest(PROMPTS[:2], 1), SampleRequest(PROMPTS[2:], 3)]
        streamed = [group for groups in engine.sample_stream(requests, PARAMS) for group in groups]
        assert [[item.token_ids for item in group] for group in streamed] == [
            [item.token_ids for item in group] for group in after
        ]
        stream = engine.sample_stream(requests * 3, SamplingParams(4, 1.0, 20, ()))
        next(stream)
        stream.close()
        assert gap(running, engine.sample(PROMPTS, PARAMS, seed=2), 1.0) <= 1e-4
    finally:
        engine.close()
