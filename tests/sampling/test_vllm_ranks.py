"""The weight sync with several ranks, without vLLM: what an engine receives from a sharded policy, and one decision.

tests/vllm/test_ranks.py has the same with vLLM.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel

from bandpo_cli.config.run import RunConfig
from bandpo_cli.models.load import Policy
from bandpo_cli.models.sharding import is_sharded, shard
from bandpo_cli.ranks import Ranks
from bandpo_cli.sampling import vllm_sampler
from bandpo_cli.sampling.sampler import SamplingParams, StaleEngineError, TokenIds, engine_model, is_exact
from bandpo_cli.sampling.sync_check import HALF_PRECISION_LIMIT, LIMITS, SyncCheck, probe_limit
from bandpo_cli.sampling.transformers_sampler import TransformersSampler
from bandpo_cli.sampling.vllm_sampler import VllmSampler
from bandpo_cli.sampling.vllm_worker import fingerprint
from bandpo_cli.types import Completion
from tests.conftest import random_model
from tests.training.several_ranks import run_ranks


def policy_of(model: PreTrainedModel, ranks: Ranks) -> Policy:
    no_tokenizer: Any = None
    return Policy(model, no_tokenizer, (2,), 0, ranks=ranks)


def sharded_model(ranks: Ranks, dtype: torch.dtype) -> PreTrainedModel:
    model = random_model().to(dtype)
    shard(model, ranks, torch.device("cpu"))
    return model


class Engine:
    """Takes the weights one by one, as vLLM's loader does, and reports their fingerprints; it may leave some unread."""

    def __init__(self, reads: int = 99) -> None:
        self.model_config = SimpleNamespace(max_model_len=72)
        self.reads = reads
        self.received: dict[str, torch.Tensor] = {}
        self.version = -1

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "policy_load":
            weights, self.version = args
            taken = (
                (name, tensor.clone()) for _, (name, tensor) in zip(range(self.reads), weights, strict=False)
            )
            self.received = dict(taken)
            return [[f"{name} was not read" for name, _ in weights]]
        return [
            (self.version, {name: fingerprint(self.received[name], shape) for name, shape in args[0].items()})
        ]

    def reset_prefix_cache(self) -> bool:
        return True


def synced(ranks: Ranks, dtype: torch.dtype) -> tuple[str | None, dict[str, Any]]:
    """Return the error of a sync of which rank 0 reads three tensors, and what the engine's settings depend on."""
    model, plain = sharded_model(ranks, dtype), random_model().to(dtype)
    assert is_sharded(model)
    policy = policy_of(model, ranks)
    stale = None
    with (
        mock.patch.object(vllm_sampler, "_start", return_value=(Engine(), 1)),
        mock.patch.object(SyncCheck, "check"),
    ):
        sampler = VllmSampler(RunConfig().sampling, policy)
        engine: Any = sampler._llm
        received, expected = engine.received, dict(plain.named_parameters())
        assert received.keys() == expected.keys()
        for name, tensor in received.items():
            assert type(tensor) is torch.Tensor
            assert tensor.dtype == dtype
            assert torch.equal(tensor, expected[name])
        engine.reads = 3 if ranks.rank == 0 else 99
        # Rank 1 gets all tensors: rank 0 takes part in gathering those that its engine does not read.
        try:
            sampler.sync(model, 1)
        except StaleEngineError as error:
            stale = str(error)
    settings, plain_settings = (
        vllm_sampler._engine_settings(RunConfig().sampling, engine_model(kind), False)
        for kind in (model, plain)
    )
    assert settings == plain_settings
    exact = is_exact(TransformersSampler(model, 0), policy)
    return stale, {"dtype": settings["dtype"], "limit": probe_limit(model), "exact": exact}


Check = tuple[int, float, str | None]


def checked(ranks: Ranks) -> list[Check]:
    """Run checks in which the first probes of rank 1 are off; return probes, gap and error of this rank."""
    model, engine = sharded_model(ranks, torch.float32), TransformersSampler(random_model(), 0)
    check = SyncCheck(policy_of(model, ranks), 100)
    results = []
    for failing in (0, 1, 2):
        probes = 0

        def sample(
            prompt: TokenIds, params: SamplingParams, seed: int, failing: int = failing
        ) -> Sequence[Completion]:
            nonlocal probes
            probes += 1
            completions = engine.sample([prompt], params, seed)[0]
            shift = 3.0 if ranks.rank == 1 and probes <= failing else 0.0
            return [
                replace(item, logprobs=tuple(value + shift for value in item.logprobs))
                for item in completions
            ]

        error = None
        try:
            check.check(model, 5, sample)
        except StaleEngineError as raised:
            error = str(raised)
        results.append((probes, check.gap, error))
    return results


def synced_and_checked(ranks: Ranks) -> tuple[list[tuple[str | None, dict[str, Any]]], list[Check]]:
    return [synced(ranks, dtype) for dtype in (torch.float32, torch.bfloat16)], checked(ranks)


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return what `synced_and_checked` returns on two ranks."""
    return run_ranks(2, tmp_path_factory.mktemp("ranks"), synced_and_checked)


@pytest.mark.slow
def test_engines_receive_the_complete_tensors_of_a_sharded_policy(of_ranks: list[Any]) -> None:
    """In the dtype of its passes: the engine's settings are those for a policy that is not sharded."""
    (first, _), (second, _) = of_ranks
    expected = [
        {"dtype": "float32", "limit": LIMITS["cpu", torch.float32], "exact": True},
        {"dtype": "bfloat16", "limit": HALF_PRECISION_LIMIT, "exact": False},
    ]
    assert [described for _, described in first] == [described for _, described in second] == expected
    assert all("in part" in stale for stale, _ in first)
    assert [stale for stale, _ in second] == [None, None]


@pytest.mark.slow
def test_all_ranks_repeat_the_probe_that_failed_on_one_and_stop_together(of_ranks: list[Any]) -> None:
    """Without a failure one probe is enough; two failures on one rank are an error on all."""
    for _, (agreed, repeated, stale) in of_ranks:
        assert (agreed[0], agreed[2]) == (1, None)
        assert (repeated[0], repeated[2]) == (2, None)
        assert repeated[1] < 1e-5
        assert stale[0] == 2
        assert stale[1] == pytest.approx(3.0, abs=1e-4)
        assert "version 5 of the weights" in str(stale[2])
