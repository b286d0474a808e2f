"""An engine in its own process samples what it samples in the trainer's process, with the weights of the last sync.

Tests of how processes end use a stand-in for the program of the process, which starts in milliseconds.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError, RunError, UserError, is_out_of_memory
from bandpo_cli.experiments.memory import out_of_memory_errors
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.models.weights import checkpoint_weights
from bandpo_cli.ranks import Ranks
from bandpo_cli.registries import ENGINES
from bandpo_cli.sampling import engine_child, engine_process
from bandpo_cli.sampling.base import (
    SampleRequest,
    SamplingParams,
    StaleEngineError,
    StreamingSampler,
    describe_sampler,
    is_exact,
)
from bandpo_cli.sampling.engine_channel import (
    Channel,
    ChannelClosedError,
    pack_completions,
    unpack_completions,
)
from bandpo_cli.sampling.engine_child import EngineChild, engine_environment
from bandpo_cli.sampling.engine_process import EngineProcess
from bandpo_cli.sampling.transformers_sampler import TransformersSampler
from bandpo_cli.types import Completion
from tests.sampling import stub_engine
from tests.training.several_ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8)]
PARAMS = SamplingParams(samples=5, temperature=0.8, max_tokens=12, stop_ids=(2, 3), entropy=True)
REQUESTS = [SampleRequest(PROMPTS, 1), SampleRequest(PROMPTS[:1], 90), SampleRequest(PROMPTS[1:], 5)]
WAIT_S = 30


def settings(**model: Any) -> RunConfig:
    sections = {"model": {"device": "cpu", **model}, "sampling": {"engine": "transformers", "max_lag": 1}}
    return RunConfig.model_validate(sections)


def perturb(model: PreTrainedModel, seed: int) -> None:
    """Change every weight; tied ones stay tied."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.05)


def in_this_process(policy: Policy, version: int, seed: int = 7) -> list[list[Completion]]:
    sampler = TransformersSampler(policy.model, policy.pad_id)
    sampler.sync(policy.model, version)
    return sampler.sample(PROMPTS, PARAMS, seed)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(settings().model)


@pytest.fixture(scope="module")
def engine(one_thread: None, policy: Policy) -> Iterator[EngineProcess]:
    started = EngineProcess(settings(), policy)
    yield started
    started.close()


def test_completions_are_those_of_the_engine_in_this_process(engine: EngineProcess, policy: Policy) -> None:
    """Bit by bit, with entropies: with the initial weights, and after a sync of others with them, not before it."""
    initial = in_this_process(policy, 0)
    assert engine.sample(PROMPTS, PARAMS, 7) == initial
    assert engine.sample(PROMPTS, PARAMS, 8) != initial
    assert all(len(each.entropies) == len(each.token_ids) for group in initial for each in group)
    perturb(policy.model, seed=1)
    assert engine.sample(PROMPTS, PARAMS, 7) == initial
    engine.sync(policy.model, 4)
    changed = in_this_process(policy, 4)
    assert engine.sample(PROMPTS, PARAMS, 7) == changed
    assert [[each.token_ids for each in group] for group in initial] != [
        [each.token_ids for each in group] for group in changed
    ]


def test_a_stream_gives_the_completions_of_each_request_in_order(
    engine: EngineProcess, policy: Policy
) -> None:
    assert isinstance(engine, StreamingSampler)
    engine.sync(policy.model, 1)
    groups = [*engine.sample_stream(iter(REQUESTS), PARAMS)]
    sampler = TransformersSampler(policy.model, policy.pad_id)
    sampler.sync(policy.model, 1)
    assert groups == [sampler.sample(request.prompts_P, PARAMS, request.seed) for request in REQUESTS]
    assert [*engine.sample_stream([], PARAMS)] == []


def test_a_stream_that_is_not_used_up_leaves_the_engine_usable(engine: EngineProcess) -> None:
    expected = engine.sample(PROMPTS, PARAMS, 7)
    stream = engine.sample_stream(REQUESTS, PARAMS)
    next(stream)
    stream.close()
    assert engine.sample(PROMPTS, PARAMS, 7) == expected


def test_an_error_in_the_requests_of_a_stream_is_raised(engine: EngineProcess) -> None:
    def requests() -> Iterator[SampleRequest]:
        yield REQUESTS[0]
        raise ValueError("the data set ended")

    expected = engine.sample(PROMPTS, PARAMS, 7)
    with pytest.raises(ValueError, match="the data set ended"):
        list(engine.sample_stream(requests(), PARAMS))
    assert engine.sample(PROMPTS, PARAMS, 7) == expected


def test_the_engine_counts_as_another_one_than_the_trainers(engine: EngineProcess, policy: Policy) -> None:
    """So that the importance correction is on: its weights are older ones."""
    assert not is_exact(engine, policy)
    assert describe_sampler(engine) == {"engine": "transformers"}


Weights = Iterator[tuple[str, torch.Tensor]]


def without_one(model: PreTrainedModel) -> Weights:
    return (each for index, each in enumerate(checkpoint_weights(model)) if index != 3)


def with_another(model: PreTrainedModel) -> Weights:
    yield "model.extra", torch.zeros(3, 2)
    yield from checkpoint_weights(model)


def with_a_transposed_one(model: PreTrainedModel) -> Weights:
    return ((name, each.T if "embed" in name else each) for name, each in checkpoint_weights(model))


def with_another_dtype(model: PreTrainedModel) -> Weights:
    return ((name, each.double() if "norm" in name else each) for name, each in checkpoint_weights(model))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            without_one,
            "version 9 of the weights only in part: model.layers.0.self_attn.k_proj.weight is missing",
        ),
        (with_another, "version 9 of the weights: model.extra is no parameter of the model"),
        (with_a_transposed_one, r"model.embed_tokens.weight has shape .* in place of"),
        (with_another_dtype, "has shape .* and dtype torch.float64 in place of .* and torch.float32"),
    ],
)
def test_weights_that_are_not_exactly_those_of_the_model_are_refused(
    engine: EngineProcess,
    policy: Policy,
    monkeypatch: pytest.MonkeyPatch,
    weights: Callable[[PreTrainedModel], Weights],
    message: str,
) -> None:
    """The engine then has no weights to sample with until the next sync."""
    monkeypatch.setattr(engine_process, "checkpoint_weights", weights)
    with pytest.raises(StaleEngineError, match=message):
        engine.sync(policy.model, 9)
    with pytest.raises(StaleEngineError, match="no complete weights"):
        engine.sample(PROMPTS, PARAMS, 7)
    monkeypatch.undo()
    engine.sync(policy.model, 10)
    assert engine.sample(PROMPTS, PARAMS, 7) == in_this_process(policy, 10)


def test_adapters_are_merged_into_the_weights_of_the_process(policy: Policy) -> None:
    config = settings(lora={"rank": 4})
    adapted, merged = load_policy(config.model), load_policy(settings().model)
    base = in_this_process(merged, 0)
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.3
                )
    merged.model.load_state_dict(dict(checkpoint_weights(adapted.model)), strict=False)
    engine = EngineProcess(config, adapted)
    try:
        assert engine.sample(PROMPTS, PARAMS, 7) == in_this_process(merged, 0) != base
    finally:
        engine.close()


def test_bfloat16_weights_are_sent_as_they_are() -> None:
    config = settings(dtype="bfloat16")
    half = load_policy(config.model)
    perturb(half.model, seed=2)
    engine = EngineProcess(config, half)
    try:
        assert engine.sample(PROMPTS, PARAMS, 7) == in_this_process(half, 0)
    finally:
        engine.close()


def sampled_by_two(ranks: Ranks) -> tuple[list[list[Completion]], str]:
    """Return the completions of one rank, and the error of a sync after the process of rank 1 has been killed."""
    sharded = load_policy(settings().model, ranks=ranks)
    engine = EngineProcess(settings(), sharded)
    try:
        with torch.no_grad():
            for parameter in sharded.model.parameters():
                parameter.mul_(1.1)
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
    finally:
        engine.close()


def test_two_ranks_have_an_engine_each_with_all_weights(tmp_path: Path) -> None:
    """A failure of one is raised on both, and neither waits for the other."""
    single = load_policy(settings().model)
    with torch.no_grad():
        for parameter in single.model.parameters():
            parameter.mul_(1.1)
    expected = in_this_process(single, 1)
    (first, first_error), (second, second_error) = run_ranks(2, tmp_path / "ranks", sampled_by_two)
    assert first == second == expected
    assert "was killed by SIGKILL" in first_error
    assert first_error == second_error


STUB_SOURCE = (
    "import json, sys; *arguments, sys.path[:] = json.loads(sys.argv[1]); "
    "from tests.sampling import stub_engine; stub_engine.register(); "
    "from bandpo_cli.sampling.engine_main import main; main(*arguments)"
)


@pytest.fixture(scope="module")
def stub(one_thread: None, policy: Policy) -> Iterator[EngineProcess]:
    """An engine of the kind `stub_engine`, started with the variables of a rank of torchrun."""
    stub_engine.register()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_child, "_SOURCE", STUB_SOURCE)
            patch.setenv("RANK", "3")
            config = RunConfig.model_validate({"sampling": {"engine": "stub", "max_lag": 1}})
            started = EngineProcess(config, policy)
        yield started
        started.close()
    finally:
        ENGINES.unregister("stub")


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
def test_errors_are_raised_with_their_type_and_text(
    stub: EngineProcess, seed: int, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        stub.sample(PROMPTS, PARAMS, seed)
    assert (type(caught.value), str(caught.value)) == (kind, text)
    assert not is_out_of_memory(caught.value)
    with pytest.raises(kind):
        list(stub.sample_stream([SampleRequest(PROMPTS, 0), SampleRequest(PROMPTS, seed)], PARAMS))
    assert stub.sample(PROMPTS, PARAMS, 0)


@pytest.mark.parametrize("seed", [5, 6, 8])
def test_out_of_memory_in_the_process_is_out_of_memory_in_the_trainer(stub: EngineProcess, seed: int) -> None:
    size = "MemoryError" if seed == 8 else "CUDA out of memory. Tried to allocate 2.00 GiB"
    with (
        pytest.raises(RunError, match=rf"^out of memory \(engine process: {size}\); for less memory"),
        out_of_memory_errors(RunConfig()),
    ):
        stub.sample(PROMPTS, PARAMS, seed)


def test_completions_keep_every_bit_and_may_have_no_entropies(stub: EngineProcess, policy: Policy) -> None:
    stub.sync(policy.model, 5)
    groups = stub.sample([(3, 4), ()], SamplingParams(2, 1.0, 8, ()), seed=0)
    floats = stub_engine.FLOATS
    assert groups == [
        [Completion((4, 3, 0), floats, "length", 5), Completion((4, 3, 1), floats, "stop", 5)],
        [Completion((0,), floats, "length", 5), Completion((1,), floats, "stop", 5)],
    ]
    assert stub.sample([], PARAMS, 0) == []
    assert unpack_completions(pack_completions([[], []])) == [[], []]


def test_a_failed_check_of_the_engine_is_raised_by_the_sync(stub: EngineProcess, policy: Policy) -> None:
    with pytest.raises(StaleEngineError, match="the engine's check failed"):
        stub.sync(policy.model, 666)
    with pytest.raises(StaleEngineError):
        stub.sample(PROMPTS, PARAMS, 0)
    stub.sync(policy.model, 6)
    assert stub.sample(PROMPTS, PARAMS, 0)[0][0].policy_version == 6


def test_warnings_are_logged_once_by_the_trainer(
    stub: EngineProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "bandpo_cli"):
        stub.sample(PROMPTS, PARAMS, stub_engine.WARNING_SEED)
        stub.sample(PROMPTS, PARAMS, 0)
    assert caplog.record_tuples == [("bandpo_cli", logging.WARNING, "a warning of the engine")]


def test_the_process_is_a_single_one_whose_engine_never_sleeps(stub: EngineProcess) -> None:
    assert RunConfig().sampling.vllm.sleep
    expected = {"engine": "stub", "max_lag": "0", "sleep": "False", "rank": "none", "threads": "1"}
    assert stub.describe() == expected


def test_an_engine_that_cannot_start_is_a_mistake_of_the_user(policy: Policy, tmp_path: Path) -> None:
    """The process has the settings of the trainer; here their model does not exist any more."""
    with pytest.raises(UserError, match="nowhere"):
        EngineProcess(settings(path=str(tmp_path / "nowhere")), policy)


def test_the_environment_has_no_ranks_and_the_gpus_of_the_engine() -> None:
    environ = {
        "PATH": "/bin",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "x",
        "BANDPO_NPROC": "2",
    }
    assert engine_environment(environ, []) == {"PATH": "/bin"}
    assert engine_environment({}, [3, 1]) == {"CUDA_VISIBLE_DEVICES": "3,1"}
    listed = {"CUDA_VISIBLE_DEVICES": "4, GPU-5f,6"}
    assert engine_environment(listed, [1, 2]) == {"CUDA_VISIBLE_DEVICES": "GPU-5f,6"}
    assert engine_environment(listed, []) == listed


@pytest.mark.parametrize(
    ("device", "count", "tensor_parallel", "expected"),
    [
        ("cuda", 1, 1, [0]),
        ("cuda", 2, 1, [1]),
        ("cuda:1", 3, 1, [0]),
        ("cuda:1", 4, 3, [0, 2, 3]),
        ("cuda", 2, 2, [1, 0]),
    ],
)
def test_the_engine_takes_gpus_that_train_nothing_first(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int, tensor_parallel: int, expected: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    config = RunConfig.model_validate({"sampling": {"vllm": {"tensor_parallel": tensor_parallel}}})
    on_gpu: Any = type("OnGpu", (), {"device": torch.device(device), "ranks": Ranks()})
    assert engine_process._engine_cards(config, on_gpu) == expected


# The program of the process without an engine: it answers the start and the first sync, then the test's line runs when
# the trainer asks for completions.
STAND_IN = """
import json, os, socket, struct, sys, time
descriptor, trainer, path = json.loads(sys.argv[1])
end = socket.socket(fileno=descriptor)
file = end.makefile("rb")
def receive():
    header = json.loads(file.read(struct.unpack("!I", file.read(4))[0]))
    file.read(sum(int(dtype[2:]) * count for dtype, count in header["arrays"]) + header.get("bytes", 0))
    return header["kind"]
def done():
    text = json.dumps({"kind": "done", "arrays": [], "warnings": []}).encode()
    end.sendall(struct.pack("!I", len(text)) + text)
receive()
done()
while receive() != "end":
    pass
done()
kind = receive()
"""


def started(monkeypatch: pytest.MonkeyPatch, policy: Policy, line: str) -> EngineProcess:
    """Return an engine whose process runs `line` when it receives its first command after the start."""
    monkeypatch.setattr(engine_child, "_SOURCE", STAND_IN + line)
    return EngineProcess(settings(), policy)


def child_of(engine: EngineProcess) -> EngineChild:
    assert engine._child is not None
    return engine._child


def in_a_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """Start a thread that calls the function; return it with the list that gets its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


KILLED = (
    r"^the engine process was killed by SIGKILL \(as the system does when memory runs out\); .*max_lag=0$"
)


def test_a_process_that_is_killed_while_it_samples_is_an_error(
    monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    engine = started(monkeypatch, policy, "time.sleep(600)")
    thread, errors = in_a_thread(lambda: engine.sample(PROMPTS, PARAMS, 0))
    os.kill(child_of(engine).pid, signal.SIGKILL)
    thread.join(WAIT_S)
    assert [type(each) for each in errors] == [RunError]
    with pytest.raises(RunError, match=KILLED):
        raise errors[0]
    with pytest.raises(RunError, match=KILLED):
        engine.sample(PROMPTS, PARAMS, 0)
    engine.close()
    engine.close()


def test_a_process_that_is_killed_while_it_is_idle_is_an_error_of_the_next_call(
    monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    for call in (
        lambda engine: engine.sample(PROMPTS, PARAMS, 0),
        lambda engine: engine.sync(policy.model, 1),
        lambda engine: next(engine.sample_stream(REQUESTS, PARAMS)),
        lambda engine: engine.describe(),
    ):
        engine = started(monkeypatch, policy, "")
        os.kill(child_of(engine).pid, signal.SIGKILL)
        with pytest.raises(RunError, match=KILLED):
            call(engine)
        engine.close()


def test_the_error_of_a_process_that_ended_has_the_last_line_of_its_output(
    monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    engine = started(
        monkeypatch, policy, "print('x' * 10**6); print('Fatal: no more', file=sys.stderr); sys.exit(3)"
    )
    text = r"^the engine process ended with exit code 3 \(its last output: Fatal: no more\); "
    with pytest.raises(RunError, match=text):
        engine.sample(PROMPTS, PARAMS, 0)


def test_a_process_of_the_engine_that_holds_the_connection_is_ended_with_it(
    monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    """The trainer would wait for an answer that does not come, and memory on a GPU would stay in use."""
    line = "pid = os.fork(); print(pid, flush=True)\nif pid: os._exit(4)\ntime.sleep(600)"
    engine = started(monkeypatch, policy, line)
    thread, errors = in_a_thread(lambda: engine.sample(PROMPTS, PARAMS, 0))
    thread.join(WAIT_S)
    assert [type(each) for each in errors] == [RunError]
    assert "ended with exit code 4" in str(errors[0])
    assert has_ended(int(child_of(engine)._output.split()[0]))


def test_close_ends_a_process_that_samples(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    """The thread that waits for the completions gets an error at once."""
    monkeypatch.setattr(engine_process, "CLOSE_S", 10.0 * WAIT_S)
    engine = started(monkeypatch, policy, "time.sleep(600)")
    thread, errors = in_a_thread(lambda: engine.sample(PROMPTS, PARAMS, 0))
    while not engine._lock.locked():
        time.sleep(0.01)
    engine.close()
    thread.join(WAIT_S)
    assert [(type(each), str(each)) for each in errors] == [(RunError, "the engine process is closed")]
    assert child_of(engine).wait(0)
    engine.close()


def test_close_ends_a_process_with_an_open_stream(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    """The end of the stream is then no error."""
    arrays = [[each.dtype.str, 0] for each in pack_completions([])]
    text = json.dumps({"kind": "completions", "arrays": arrays})
    line = f"end.sendall(struct.pack('!I', {len(text)}) + {text.encode()!r}); time.sleep(600)"
    engine = started(monkeypatch, policy, line)
    stream = engine.sample_stream(REQUESTS, PARAMS)
    assert next(stream) == []
    with pytest.raises(RunError, match="a call of another thread"):
        engine.describe()
    engine.close()
    assert child_of(engine).wait(0)
    stream.close()


def test_close_lets_an_idle_engine_shut_down(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    engine = started(monkeypatch, policy, "sys.exit(5 if kind == 'close' else 6)")
    engine.close()
    assert child_of(engine)._process.returncode == 5
    with pytest.raises(RunError, match=r"^the engine process is closed$"):
        engine.sample(PROMPTS, PARAMS, 0)


def test_an_interrupted_call_ends_the_process(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    """Otherwise its answer would be taken for that of the next call."""
    engine = started(monkeypatch, policy, "time.sleep(600)")
    monkeypatch.setattr(Channel, "receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.sample(PROMPTS, PARAMS, 0)
    assert child_of(engine).wait(0)
    with pytest.raises(RunError, match="in the middle of a call"):
        engine.sample(PROMPTS, PARAMS, 0)


def interrupt(channel: Channel) -> None:
    raise KeyboardInterrupt


# The real program of the process with a server that is always at work, and says so.
BUSY = (
    "import json, sys, types; *arguments, sys.path[:] = json.loads(sys.argv[1])\n"
    "class Server:\n"
    "    def __init__(self, end): self.end = end\n"
    "    def serve(self):\n"
    "        self.end.sendall(b'started')\n"
    "        while True: pass\n"
    "sys.modules['bandpo_cli.sampling.engine_server'] = types.SimpleNamespace(EngineServer=Server)\n"
    "from bandpo_cli.sampling.engine_main import main; main(*arguments)"
)


def trainer_that_starts_a_busy_process(folder: Path) -> None:
    child = EngineChild(os.environ)
    child.channel.receive_bytes(memoryview(bytearray(7)))
    (folder / "pid.part").write_text(str(child.pid))
    (folder / "pid.part").rename(folder / "pid")
    time.sleep(600)


def test_a_working_process_ends_when_the_trainer_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine_child, "_SOURCE", BUSY)
    context = multiprocessing.get_context("fork")
    trainer = context.Process(target=trainer_that_starts_a_busy_process, args=(tmp_path,))
    trainer.start()
    until = time.monotonic() + WAIT_S
    while not (tmp_path / "pid").exists() and time.monotonic() < until:
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    assert not has_ended(pid, seconds=0)
    trainer.kill()
    trainer.join()
    assert has_ended(pid)


def test_signals_to_the_job_leave_the_process_to_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in a process group of its own, and SIGTERM, which a cluster sends to every process, does not end it."""
    monkeypatch.setattr(engine_child, "_SOURCE", BUSY)
    child = EngineChild(os.environ)
    child.channel.receive_bytes(memoryview(bytearray(7)))
    assert os.getpgid(child.pid) == child.pid
    os.kill(child.pid, signal.SIGTERM)
    os.kill(child.pid, signal.SIGINT)
    assert not child.wait(0.5)
    child.kill()
    assert child.describe_end().startswith("was killed by SIGKILL")
    child.kill()


def has_ended(pid: int, seconds: float = WAIT_S) -> bool:
    """Wait for the end of a process of another parent; a zombie has ended."""
    until = time.monotonic() + seconds
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)


def test_a_closed_connection_is_an_error_of_every_call() -> None:
    first, second = map(Channel, socket.socketpair())
    first.send("half", x=json.loads("[1, null]"))
    assert second.receive().header == {"kind": "half", "x": [1, None]}
    first.close()
    with pytest.raises(ChannelClosedError):
        second.receive()
    with pytest.raises(ChannelClosedError):
        second.send("end")
