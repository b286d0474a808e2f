"""An engine in its own process samples what it samples in the trainer's process, with the weights of the last sync.

test_engine_end.py has the tests of how processes start and end. The processes here are forks of the test's process,
except in the first test.
"""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError, RunError, UserError, find_out_of_memory
from bandpo_cli.experiments.memory_check import out_of_memory_errors
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.models.weights import checkpoint_weights
from bandpo_cli.processes.ranks import Ranks
from bandpo_cli.sampling import engine_process, sync_check
from bandpo_cli.sampling.engine_process import EngineProcess
from bandpo_cli.sampling.engine_server import receive_slots, receive_weights, send_slots, send_weights
from bandpo_cli.sampling.sampler import (
    Sampler,
    SampleRequest,
    SamplingParams,
    StaleEngineError,
    TransformersSampler,
    Turn,
    is_exact,
)
from bandpo_cli.sampling.sync_check import SyncCheck
from bandpo_cli.types import Completion
from tests.sampling import stub_engine
from tests.sampling.stub_engine import forked_engines
from tests.training.several_ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8)]
PARAMS = SamplingParams(samples=5, temperature=0.8, max_tokens=12, stop_ids=(2, 3), entropy=True)
REQUESTS = [SampleRequest(PROMPTS, 1), SampleRequest(PROMPTS[:1], 90), SampleRequest(PROMPTS[1:], 5)]
WAIT_S = 30


def settings(engine: str = "transformers", **model: Any) -> RunConfig:
    sections = {"model": {"device": "cpu", **model}, "sampling": {"engine": engine, "max_lag": 1}}
    return RunConfig.model_validate(sections)


def perturb(model: PreTrainedModel, seed: int) -> None:
    """Change every weight; tied ones stay tied."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.05)


def in_this_process(
    policy: Policy, version: int, seed: int = 7, prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[list[Completion]]:
    sampler = TransformersSampler(policy.model, policy.pad_id)
    sampler.sync(policy.model, version)
    return sampler.sample(prompts, PARAMS, seed)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(settings().model)


@pytest.fixture(scope="module")
def engine(one_thread: None, policy: Policy) -> Iterator[EngineProcess]:
    with forked_engines():
        started = EngineProcess(settings(), policy)
    yield started
    started.close()


@pytest.mark.slow
def test_completions_are_those_of_the_engine_in_this_process(policy):
    """Bit by bit, with entropies: with the initial weights, and after a sync of others with them, not before it."""
    initial = in_this_process(policy, 0)
    with closing(EngineProcess(settings(), policy)) as engine:
        assert engine.sample(PROMPTS, PARAMS, 7) == initial
        assert engine.sample(PROMPTS, PARAMS, 8) != initial
        assert all(len(item.entropies) == len(item.token_ids) for group in initial for item in group)
        perturb(policy.model, seed=1)
        assert engine.sample(PROMPTS, PARAMS, 7) == initial
        engine.sync(policy.model, 4)
        changed = in_this_process(policy, 4)
        assert engine.sample(PROMPTS, PARAMS, 7) == changed
    assert [item.token_ids for item in initial[0]] != [item.token_ids for item in changed[0]]


def test_a_stream_gives_the_completions_of_each_request_in_order(engine, policy):
    engine.sync(policy.model, 1)
    groups = [completions_PG for _, completions_PG in engine.sample_stream(iter(REQUESTS), PARAMS)]
    assert groups == [in_this_process(policy, 1, request.seed, request.prompts_P) for request in REQUESTS]
    assert [*engine.sample_stream([], PARAMS)] == []


def test_turns_in_the_process_are_those_of_the_engine(engine, policy):
    """The second request is made of the first completion, and is not there when the engine first asks for it."""
    engine.sync(policy.model, 1)
    own = TransformersSampler(policy.model, policy.pad_id)
    own.sync(policy.model, 1)
    for sampler in (engine, own):
        found: list[Any] = []

        def requests(found: list[Any] = found) -> Iterator[SampleRequest | None]:
            yield SampleRequest(PROMPTS, 1)
            yield None
            (_, ((first, *_), *_)) = found[0]
            yield SampleRequest([(*PROMPTS[0], *first.token_ids)], 0, [Turn(17, 3)])

        for item in sampler.sample_stream(requests(), PARAMS, in_order=False):
            found.append(item)
        if sampler is engine:
            of_process = found
    assert [number for number, _ in found] == [0, 1]
    assert of_process == found


def test_a_stream_that_ends_early_leaves_the_engine_usable(engine, policy):
    def requests() -> Iterator[SampleRequest]:
        yield REQUESTS[0]
        raise ValueError("the data set ended")

    expected = engine.sample(PROMPTS, PARAMS, 7)
    stream = engine.sample_stream(REQUESTS, PARAMS)
    next(stream)
    stream.close()
    assert engine.sample(PROMPTS, PARAMS, 7) == expected
    with pytest.raises(ValueError, match="the data set ended"):
        list(engine.sample_stream(requests(), PARAMS))
    assert engine.sample(PROMPTS, PARAMS, 7) == expected
    assert not is_exact(engine, policy), "its weights are older ones, so the importance correction is on"
    assert engine.describe() == {"engine": "transformers"}


Weights = list[tuple[str, torch.Tensor]]
CHANGES: list[tuple[str, Callable[[Weights], Weights]]] = [
    ("only in part: model.layers.0.self_attn.k_proj.weight is missing", lambda weights: weights[:3] + weights[4:]),
    (r"version 9 of the weights: .* no parameter model.extra of shape \[3, 2\]",
     lambda weights: [("model.extra", torch.zeros(3, 2)), *weights]),
    (r"no parameter model.embed_tokens.weight of shape \[128, 20\]",
     lambda weights: [(name, tensor.T if "embed" in name else tensor) for name, tensor in weights]),
    ("and dtype torch.float64",
     lambda weights: [(name, tensor.double() if "norm" in name else tensor) for name, tensor in weights]),
]  # fmt: skip


@pytest.mark.parametrize(("message", "change"), CHANGES)
def test_weights_that_are_not_exactly_those_of_the_model_are_refused(
    engine, policy, monkeypatch, message, change
):
    """The engine then has no weights to sample with until the next sync."""
    monkeypatch.setattr(
        engine_process, "checkpoint_weights", lambda model: iter(change([*checkpoint_weights(model)]))
    )
    with pytest.raises(StaleEngineError, match=message):
        engine.sync(policy.model, 9)
    with pytest.raises(StaleEngineError, match="no complete weights"):
        engine.sample(PROMPTS, PARAMS, 7)
    monkeypatch.undo()
    engine.sync(policy.model, 10)
    assert engine.sample(PROMPTS, PARAMS, 7) == in_this_process(policy, 10)


@pytest.mark.slow
def test_adapters_are_merged_into_the_bfloat16_weights_of_the_process():
    config = settings(lora={"rank": 4}, dtype="bfloat16")
    adapted, merged = load_policy(config.model), load_policy(settings(dtype="bfloat16").model)
    base = in_this_process(merged, 0)
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    merged.model.load_state_dict(dict(checkpoint_weights(adapted.model)), strict=False)
    with forked_engines(), closing(EngineProcess(config, adapted)) as engine:
        assert engine.sample(PROMPTS, PARAMS, 7) == in_this_process(merged, 0) != base


def test_weights_arrive_with_every_bit():
    """Whatever their shapes, strides and dtypes, and more of them than slots; the receiver copies none."""
    weights = {
        "matrix": torch.randn(7, 9).T,
        "half": torch.randn(33).bfloat16(),
        "number": torch.tensor(float("nan")),
        "none": torch.zeros(0, 4),
        "largest": torch.randn(8, 8).double(),
        "last": torch.arange(5),
    }
    ours, theirs = multiprocessing.Pipe()
    slots = send_slots(ours, weights["largest"].nbytes)
    received = receive_slots(theirs)
    sender = threading.Thread(target=send_weights, args=(ours, slots, weights.items()), daemon=True)
    sender.start()
    for (name, tensor), expected in zip(receive_weights(theirs, received), weights, strict=True):
        assert name == expected
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0, equal_nan=True)
        start = received.data_ptr()
        assert not tensor.numel() or start <= tensor.data_ptr() < start + received.numel()
    sender.join(WAIT_S)
    assert not sender.is_alive()
    assert not ours.poll()


def sampled_by_two(ranks: Ranks) -> tuple[list[list[Completion]], str]:
    """Return the completions of one rank, and the error of a sync after the process of rank 1 has been killed."""
    sharded = load_policy(settings().model, ranks=ranks)
    with forked_engines(), closing(EngineProcess(settings(), sharded)) as engine:
        enlarge(sharded.model)
        engine.sync(sharded.model, 1)
        groups = engine.sample(PROMPTS, PARAMS, 7)
        if ranks.rank == 1:
            child: Any = engine._child
            os.kill(child.pid, signal.SIGKILL)
            child.wait(WAIT_S)
        try:
            engine.sync(sharded.model, 2)
        except RunError as error:
            return groups, str(error)
        return groups, "no error"


@torch.no_grad()
def enlarge(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.1)


@pytest.mark.slow
def test_two_ranks_have_an_engine_each_with_all_weights(tmp_path):
    """A failure of one is raised on both, and neither waits for the other."""
    single = load_policy(settings().model)
    enlarge(single.model)
    expected = in_this_process(single, 1)
    (first, first_error), (second, second_error) = run_ranks(2, tmp_path / "ranks", sampled_by_two)
    assert first == second == expected
    assert "was killed by SIGKILL" in second_error
    assert first_error == f"rank 1: {second_error}"


class SampleOnce(SyncCheck):
    """Takes the place of the check after a sync: the stub's log-probs are none of a model."""

    seed = 0

    def check(self, model: PreTrainedModel, version: int, sampler: Sampler) -> None:
        sampler.sample(PROMPTS[:1], PARAMS, self.seed)


@pytest.fixture(scope="module")
def stub(one_thread: None, policy: Policy) -> Iterator[EngineProcess]:
    """An engine of the kind `StubSampler`, started with the variables of a rank of torchrun."""
    with forked_engines() as patch:
        patch.setattr(engine_process, "SyncCheck", SampleOnce)
        patch.setenv("RANK", "3")
        started = EngineProcess(settings("stub"), policy)
    yield started
    started.close()


@pytest.mark.slow
def test_an_engine_with_weights_of_its_own_loads_what_it_receives():
    """The process has no policy; the trainer compares its own log-probs with those of the engine."""
    policy = load_policy(settings().model)
    with forked_engines() as patch:
        patch.setattr(sync_check, "CHECK_EVERY", 1)
        engine = EngineProcess(settings("copy"), policy)
    with closing(engine):
        assert engine.sample(PROMPTS, PARAMS, 7) == in_this_process(policy, 0)
        perturb(policy.model, seed=1)
        with pytest.raises(StaleEngineError, match=f"version {stub_engine.WRONG_VERSION} of the weights"):
            engine.sync(policy.model, stub_engine.WRONG_VERSION)
        engine.sync(policy.model, 4)
        assert engine.sample(PROMPTS, PARAMS, 7) == in_this_process(policy, 4)


def test_an_engine_that_fails_at_its_first_completions_cannot_run_the_model(monkeypatch, policy):
    monkeypatch.setattr(SampleOnce, "seed", 3)
    with forked_engines() as patch:
        patch.setattr(engine_process, "SyncCheck", SampleOnce)
        with pytest.raises(UserError, match=r"^the engine process cannot run this model here: vLLM failed$"):
            EngineProcess(settings("stub"), policy)


@pytest.mark.parametrize(
    ("seed", "kind", "text"),
    [
        (1, UserError, "a prompt is too long"),
        (2, ConfigError, "not installed"),
        (3, RunError, "vLLM failed"),
        (4, StaleEngineError, "old weights"),
        (7, RunError, "the engine process failed: ValueError: no such token"),
    ],
)
def test_errors_are_raised_with_their_type_and_text(stub, seed, kind, text):
    with pytest.raises(kind) as caught:
        stub.sample(PROMPTS, PARAMS, seed)
    assert (type(caught.value), str(caught.value)) == (kind, text)
    assert not find_out_of_memory(caught.value)
    with pytest.raises(kind):
        list(stub.sample_stream([SampleRequest(PROMPTS, 0), SampleRequest(PROMPTS, seed)], PARAMS))
    assert stub.sample(PROMPTS, PARAMS, 0)


@pytest.mark.parametrize("seed", [5, 6, 8])
def test_out_of_memory_in_the_process_is_out_of_memory_in_the_trainer(stub, seed):
    size = "MemoryError" if seed == 8 else "CUDA out of memory. Tried to allocate 2.00 GiB"
    with (
        pytest.raises(RunError, match=rf"^out of memory \(engine process: {size}\); for less memory"),
        out_of_memory_errors(RunConfig()),
    ):
        stub.sample(PROMPTS, PARAMS, seed)


def test_completions_keep_every_bit_and_may_have_no_entropies(stub, policy):
    stub.sync(policy.model, 5)
    groups = stub.sample([(3, 4), ()], SamplingParams(2, 1.0, 8, ()), seed=0)
    floats = stub_engine.FLOATS
    assert groups == [
        [Completion((4, 3, 0), floats, "length", 5), Completion((4, 3, 1), floats, "stop", 5)],
        [Completion((0,), floats, "length", 5), Completion((1,), floats, "stop", 5)],
    ]
    assert stub.sample([], PARAMS, 0) == []


def test_a_failed_check_of_the_engine_is_raised_by_the_sync(stub, policy):
    with pytest.raises(StaleEngineError, match="the engine's check failed"):
        stub.sync(policy.model, 666)
    with pytest.raises(StaleEngineError):
        stub.sample(PROMPTS, PARAMS, 0)
    stub.sync(policy.model, 6)
    assert stub.sample(PROMPTS, PARAMS, 0)[0][0].policy_version == 6


def test_warnings_are_logged_once_by_the_trainer(stub, caplog):
    with caplog.at_level(logging.DEBUG, "bandpo_cli"):
        stub.sample(PROMPTS, PARAMS, stub_engine.WARNING_SEED)
        stub.sample(PROMPTS, PARAMS, 0)
    assert caplog.record_tuples == [("bandpo_cli", logging.WARNING, "a warning of the engine")]


def test_the_process_is_a_single_one_whose_engine_never_sleeps(stub):
    assert RunConfig().sampling.vllm.sleep
    expected = {"engine": "stub", "max_lag": "0", "sleep": "False", "rank": "none", "threads": "1"}
    assert stub.describe() == expected


def test_the_process_loads_the_model_that_the_trainer_has_loaded(policy, tmp_path):
    """On the hub another commit may have become the latest one; a folder with an adapter names the commit itself."""
    model = settings(path="some/model", dtype="auto", lora={"rank": 4}).model
    loaded = engine_process._model_settings(model, replace(policy, commit="0a1b"))
    expected = "some/model", "0a1b", "float32", None
    assert (loaded.path, loaded.revision, loaded.dtype, loaded.lora) == expected
    (tmp_path / "adapter_config.json").touch()
    adapter = settings(path=str(tmp_path)).model
    assert engine_process._model_settings(adapter, replace(policy, commit="0a1b")).revision is None
    assert engine_process._model_settings(adapter, policy).revision is None
