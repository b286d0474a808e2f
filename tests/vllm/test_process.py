"""An engine leaves the trainer's process as it found it, ends when it is closed, and can be started again."""

from __future__ import annotations

import os
import signal

import pytest
import torch

pytest.importorskip("vllm")

from bandpo_cli.errors import UserError
from bandpo_cli.sampling.base import SamplingParams
from tests.vllm.conftest import random_policy, start

pytestmark = pytest.mark.vllm

PARAMS = SamplingParams(samples=4, temperature=1.0, max_tokens=12, stop_ids=(2, 3))


def test_an_engine_comes_and_goes(capfd: pytest.CaptureFixture[str]) -> None:
    """Threads, cores, signals, torch's dice and the children's environment are as before; nothing is printed."""
    policy = random_policy("qwen2")

    def state() -> tuple[object, ...]:
        return (
            torch.get_num_threads(), torch.set_num_threads, os.sched_getaffinity(0), os.environ.get("LD_PRELOAD"),
            signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), torch.get_rng_state().tolist(),
        )  # fmt: skip

    before = state()
    sampler = start(policy)
    assert state() == before
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err == ""
    first = sampler.sample([(5, 6, 7)], PARAMS, 1)
    assert torch.get_num_threads() == before[0]
    sampler.close()
    sampler.close()

    again = start(policy)
    assert again.sample([(5, 6, 7)], PARAMS, 1) == first
    again.close()


def test_more_sequences_than_fit_are_drawn_in_turn() -> None:
    sampler = start(random_policy("llama"), max_sequences=3)
    groups = sampler.sample([(5, 6), (7, 8, 9)], PARAMS, 1)
    assert [len(group) for group in groups] == [4, 4]
    sampler.close()


def test_a_model_that_vllm_cannot_run_is_a_line() -> None:
    """A head of 6: no attention kernel has that size."""
    policy = random_policy("llama")
    policy.model.config.head_dim = 6
    with pytest.raises(
        UserError, match=r"sampling.engine = 'vllm': it cannot run this model.+head_dim=6"
    ) as caught:
        start(policy)
    assert "\n" not in str(caught.value)
