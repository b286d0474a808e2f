"""Processes of engines: their environment, and how they end, together with the trainer or by themselves.

The program of the process is a stand-in, which starts in milliseconds.
"""

import inspect
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import Mock

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError, RunError, UserError
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.processes import watch
from bandpo_cli.processes.ranks import Ranks
from bandpo_cli.processes.watch import ChildProcess
from bandpo_cli.sampling import engine_process, engine_server
from bandpo_cli.sampling.engine_process import EngineProcess, engine_environment, start_engine
from bandpo_cli.sampling.engine_server import Answer
from bandpo_cli.sampling.rollouts import check_engine_settings
from bandpo_cli.sampling.sampler import SampleRequest, SamplingParams
from tests.processes.checks import check_ended, wait_for

CONFIG = RunConfig.model_validate({"sampling": {"engine": "transformers", "max_lag": 1}})
PROMPTS = [(1, 2, 3), (4,)]
PARAMS = SamplingParams(samples=2, temperature=1.0, max_tokens=8, stop_ids=())
REQUESTS = [SampleRequest(PROMPTS, 1)]
WAIT_S = 30
"""Seconds after which a process that should have ended, or a thread that should have an error, fails the test."""


Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(RunConfig().model)


def test_the_environment_has_no_ranks_and_the_gpus_of_the_engine():
    names = (
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_NAME ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT "
        "TORCHELASTIC_RUN_ID BANDPO_NPROC BANDPO_RUN_NAME"
    )
    others = {"PATH": "/bin", "LOCAL_SCRATCH": "/tmp", "RANKS": "1"}
    assert engine_environment(others | dict.fromkeys(names.split(), "1"), []) == others
    assert engine_environment({}, [3]) == {"CUDA_VISIBLE_DEVICES": "3"}
    listed = {"CUDA_VISIBLE_DEVICES": "4, GPU-5f,MIG-7a"}
    for cards, expected in (([0], "4"), ([1], "GPU-5f"), ([2], "MIG-7a"), ([2, 0], "MIG-7a,4")):
        assert engine_environment(listed, cards)["CUDA_VISIBLE_DEVICES"] == expected
    assert engine_environment(listed, []) == listed


ALONE, SECOND = Ranks(), Ranks(5, 8, 1)


@pytest.mark.parametrize(
    ("ranks", "device", "count", "expected"),
    [
        (ALONE, "cpu", 2, []), (ALONE, "cuda", 1, [0]), (ALONE, "cuda", 2, [1]), (ALONE, "cuda:1", 2, [0]),
        (ALONE, "cuda:1", 3, [0]), (SECOND, "cuda:1", 4, [3]), (SECOND, "cuda:1", 3, [1]),
    ],
)  # fmt: skip
def test_the_engine_of_each_rank_takes_a_gpu_that_trains_nothing(monkeypatch, ranks, device, count, expected):
    if ranks is SECOND:
        for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    policy: Any = SimpleNamespace(device=torch.device(device), ranks=ranks)
    assert engine_process._visible_cards(policy, sees_trainer=False) == expected
    trainer = [torch.device(device).index or 0] if expected else []
    with_trainer = [*dict.fromkeys(expected + trainer)]
    assert engine_process._visible_cards(policy, sees_trainer=True) == with_trainer


# The program of the process without an engine: it answers the start and the first sync, then the test's line runs when
# the trainer asks for completions. It imports no torch: what it receives is not unpickled.
STAND_IN = f"""
import json, os, pickle, sys, time
from multiprocessing import reduction
from multiprocessing.connection import Connection
pipe = Connection(json.loads(sys.argv[1])[2][0])
def done():
    pipe.send_bytes({pickle.dumps(Answer())!r})
pipe.recv_bytes()
reduction.recv_handle(pipe)
done()
pipe.recv_bytes()
while pipe.recv_bytes() != pickle.dumps(None):
    pipe.send(None)
done()
kind = pipe.recv_bytes()
"""


def test_weights_through_a_gpu_need_one():
    sections = {"engine": "transformers", "max_lag": 1, "weight_transfer": "cuda-ipc"}
    with pytest.raises(UserError, match="weight_transfer = 'cuda-ipc' needs a GPU"):
        check_engine_settings(RunConfig.model_validate({"sampling": sections}))
    names = [*inspect.signature(rebuild_cuda_tensor).parameters]
    assert names[engine_server._HANDLE_DEVICE] == "storage_device"


def test_an_engine_that_cannot_start_is_an_error_and_leaves_no_process(monkeypatch, policy):
    before, _, _ = STAND_IN.partition("done()\npipe.recv_bytes()\nwhile")
    error = pickle.dumps(Answer(error=ConfigError("vllm is not installed")))
    monkeypatch.setattr(watch, "_CHILD_SOURCE", f"{before}pipe.send_bytes({error!r})\npipe.recv_bytes()")
    children: list[ChildProcess] = []

    def start(variables: dict[str, str]) -> tuple[ChildProcess, Connection, IO[bytes]]:
        started = start_engine(variables)
        children.append(started[0])
        return started

    monkeypatch.setattr(engine_process, "start_engine", start)
    with pytest.raises(ConfigError, match=r"^vllm is not installed$"):
        EngineProcess(CONFIG, policy)
    assert [child.wait(0) for child in children] == [True]


def started(monkeypatch: Patch, policy: Policy, line: str) -> EngineProcess:
    """Return an engine whose process runs `line` when it receives its first command after the start."""
    monkeypatch.setattr(watch, "_CHILD_SOURCE", STAND_IN + line)
    return EngineProcess(CONFIG, policy)


def child_of(engine: EngineProcess) -> ChildProcess:
    return engine._child


def in_a_thread(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call the function in a thread that does not keep this process alive."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call(*arguments))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


KILLED = (
    r"^the engine process was killed by SIGKILL \(as the system does when memory runs out\); "
    r"sampling\.engine_process=false samples in the trainer's process, which needs less memory$"
)


def test_a_process_that_is_killed_is_an_error_of_the_call_and_of_all_later_ones(monkeypatch, policy):
    engine = started(monkeypatch, policy, "time.sleep(600)")
    sampled = in_a_thread(engine.sample, PROMPTS, PARAMS, 0)
    os.kill(child_of(engine).pid, signal.SIGKILL)
    with pytest.raises(RunError, match=KILLED):
        sampled.result(WAIT_S)
    for call in (
        lambda: engine.sample(PROMPTS, PARAMS, 0),
        lambda: engine.sync(policy.model, 1),
        lambda: next(engine.sample_stream(REQUESTS, PARAMS)),
        engine.describe,
    ):
        with pytest.raises(RunError, match=KILLED):
            call()
    engine.close()
    engine.close()
    idle = started(monkeypatch, policy, "")
    os.kill(child_of(idle).pid, signal.SIGKILL)
    with pytest.raises(RunError, match=KILLED):
        idle.sync(policy.model, 1)
    idle.close()


def test_a_process_of_the_engine_that_holds_the_connection_is_ended_with_it(monkeypatch, policy):
    """The trainer would wait for an answer that does not come, and memory on a GPU would stay in use."""
    line = "pid = os.fork(); print(pid, flush=True)\nif pid: os._exit(4)\ntime.sleep(600)"
    engine = started(monkeypatch, policy, line)
    error = in_a_thread(engine.sample, PROMPTS, PARAMS, 0).exception(WAIT_S)
    (pid,) = re.findall(r"ended with exit code 4 \(its last output: (\d+)\)", str(error))
    check_ended([int(pid)])


@pytest.mark.slow
def test_an_engine_that_does_not_answer_is_named(monkeypatch, policy, caplog):
    engine = started(monkeypatch, policy, "time.sleep(600)")
    monkeypatch.setattr(watch, "stall_after", 0.3)
    sampled = in_a_thread(engine.sample, PROMPTS, PARAMS, 0)
    os.kill(child_of(engine).pid, signal.SIGSTOP)
    wait_for(lambda: caplog.messages)
    assert caplog.messages[0].startswith(f"waiting for the engine (process {child_of(engine).pid}) since ")
    engine.close()
    assert isinstance(sampled.exception(WAIT_S), RunError)


def test_close_ends_a_process_that_samples(monkeypatch, policy):
    """The thread that waits for the completions gets an error at once."""
    monkeypatch.setattr(engine_process, "CLOSE_S", 10.0 * WAIT_S)
    engine = started(monkeypatch, policy, "time.sleep(600)")
    sampled = in_a_thread(engine.sample, PROMPTS, PARAMS, 0)
    wait_for(engine._lock.locked)
    engine.close()
    with pytest.raises(RunError, match=r"^the engine process is closed$"):
        sampled.result(WAIT_S)
    assert child_of(engine).wait(0)
    engine.close()


def test_close_ends_a_process_with_an_open_stream(monkeypatch, policy):
    """The end of the stream is then no error."""
    engine = started(
        monkeypatch, policy, "pipe.send(None); pipe.recv_bytes(); pipe.send((0, [])); time.sleep(600)"
    )
    stream = engine.sample_stream(REQUESTS, PARAMS)
    assert next(stream) == (0, [])
    with pytest.raises(RunError, match="a call of another thread"):
        engine.describe()
    engine.close()
    assert child_of(engine).wait(0)
    stream.close()


def test_close_lets_an_idle_engine_shut_down(monkeypatch, policy):
    engine = started(monkeypatch, policy, "sys.exit(5 if pickle.loads(kind) == ('close',) else 6)")
    engine.close()
    assert child_of(engine).code == 5
    with pytest.raises(RunError, match=r"^the engine process is closed$"):
        engine.sample(PROMPTS, PARAMS, 0)


def test_an_interrupted_call_ends_the_process(monkeypatch, policy):
    """Otherwise its answer would be taken for that of the next call."""
    engine = started(monkeypatch, policy, "time.sleep(600)")
    monkeypatch.setattr(Connection, "recv", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.sample(PROMPTS, PARAMS, 0)
    assert child_of(engine).wait(0)
    with pytest.raises(RunError, match="in the middle of a call"):
        engine.sample(PROMPTS, PARAMS, 0)


# The real program of the process with a server that is always at work, and says so.
BUSY = (
    "import sys, types\n"
    "from multiprocessing.connection import Connection\n"
    "def serve(descriptor):\n"
    "    Connection(descriptor).send('started')\n"
    "    while True: pass\n"
    "sys.modules['bandpo_cli.sampling.engine_server'] = types.SimpleNamespace(serve=serve)\n"
) + watch._CHILD_SOURCE


@pytest.mark.slow
def test_signals_to_the_job_leave_the_process_to_the_trainer(monkeypatch):
    """It is in a process group of its own, and SIGTERM, which a cluster sends to every process, does not end it."""
    monkeypatch.setattr(watch, "_CHILD_SOURCE", BUSY)
    child, pipe, _output = start_engine(os.environ)
    assert pipe.recv() == "started"
    assert os.getpgid(child.pid) == child.pid
    os.kill(child.pid, signal.SIGTERM)
    os.kill(child.pid, signal.SIGINT)
    assert not child.wait(0.5)
    child.kill()
    assert child.describe_end().startswith("was killed by SIGKILL")
    child.kill()
