"""Sampling in a separate process (`sampling.engine_process`), with a lag at the same time as the trainer's updates.

Each rank has one process, with the ordinary engine of the settings. At every sync the trainer writes the weights,
tensor by tensor, to memory that the process reads. The engine never sleeps (`sampling.vllm.sleep` has no effect).
"""

import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from typing import IO, Any

import torch
from transformers import PreTrainedModel

from bandpo_cli.config.batch_and_sampling import engine_cards, resolve_engine
from bandpo_cli.config.run import ModelConfig, RunConfig
from bandpo_cli.errors import RunError, log
from bandpo_cli.models.load import Policy
from bandpo_cli.models.weights import checkpoint_weights
from bandpo_cli.paths import is_adapter_folder, user_path
from bandpo_cli.processes.ranks import LAUNCHER_VARIABLE, RUN_NAME_VARIABLE, local_rank_count
from bandpo_cli.processes.watch import ChildProcess, Wait, progress, python_command
from bandpo_cli.registries import ENGINES
from bandpo_cli.sampling import engine_server
from bandpo_cli.sampling.engine_server import NO_MORE, Answer, send_slots, send_weights
from bandpo_cli.sampling.sampler import EngineModel, Requests, Sampler, SampleRequest, SamplingParams, Stream
from bandpo_cli.sampling.sync_check import SyncCheck

CLOSE_S = 5.0
"""Seconds that an idle engine has to shut down, or any engine to end after its connection, before it is killed."""

CLOSED = (EOFError, OSError)  # Errors of a connection whose other end, or this end, is closed

_OF_RANKS = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    rf"|{LAUNCHER_VARIABLE}|{RUN_NAME_VARIABLE})"
)
"""Environment variables of one of several ranks."""


class EngineProcess(Sampler):
    """A sampling engine in a child process; see `Sampler`.

    One thread at a time may sample, sync or describe; `close` may be called from any thread at any time. All other
    methods raise RunError after the process has ended, with how it ended.
    """

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        """Start the process, build the engine there and send the weights as version 0; all ranks do so together.

        Raise ConfigError if the engine is not installed, UserError if it cannot start with this model and these
        settings, RunError if the process cannot be started or ended, StaleEngineError if the first sync failed.
        """
        self._ranks = policy.ranks
        self._lock = threading.Lock()
        self._error: str | None = None
        self._child: ChildProcess | None = None
        self._trainer_threads = torch.get_num_threads()
        self._entry = ENGINES[resolve_engine(config.sampling.engine, policy.device.type == "cuda")]
        self.streams = not self._entry.shares_weights
        checked = None if self._entry.shares_weights else policy
        self.check = SyncCheck(checked, config.sampling.max_prompt_tokens + config.sampling.max_tokens)
        try:
            self._ranks.agree(lambda: self._start(config, policy))
            self.sync(policy.model, version=0)
        except BaseException:
            self.close()
            raise

    def sample_stream(self, requests: Requests, params: SamplingParams, in_order: bool = True) -> Stream:
        """Yield number and completions [P][n] of each request, as the same engine in the trainer's process.

        The process asks for requests as its engine has room for them. It waits while the caller uses completions.
        """
        more, taken = iter(requests), dict[int, SampleRequest]()
        numbers, stopped = count(), None
        try:
            with self._conversation("stream", params, in_order) as pipe:
                while not isinstance(message := self._receive(pipe), Answer):
                    reply: object = NO_MORE if message is None else False  # it ends the stream
                    try:
                        if stopped is None and message is None:  # the engine has room for a request
                            reply = next(more, NO_MORE)
                            if isinstance(reply, SampleRequest):
                                taken[next(numbers)] = reply
                        elif stopped is None:
                            number, groups = message
                            request = taken.pop(number)
                            if groups:
                                self.check.observe(request.prompts_P[0], groups[0][0])
                            yield number, groups
                            reply = True
                    except (Exception, GeneratorExit) as error:  # noqa: BLE001 - raised below
                        stopped = error
                    pipe.send(reply)
        except RunError:
            if stopped is None:  # the process may have been closed before the stream
                raise
        if stopped is not None:
            raise stopped
        _checked(message)

    def sync(self, model: PreTrainedModel, version: int) -> None:
        """Send the weights, and compare log-probs as `SyncCheck` says; all ranks must call this together.

        Errors as in `Sampler`, on all ranks if one fails.
        """
        weights = checkpoint_weights(model)

        def send() -> None:
            try:
                self._call("sync", version, send=lambda pipe: send_weights(pipe, self._slots, weights))
            except RunError:
                deque(weights, maxlen=0)  # a sharded model gathers each weight on all ranks together
                raise

        with self.check.scheduled() as is_complete:
            self._ranks.agree(send)
            if is_complete:
                self.check.check(model, version, self)

    def describe(self) -> dict[str, str]:
        """Return what the engine in the process describes."""
        return dict(self._call("describe"))

    def close(self) -> None:
        """End the process: an idle engine shuts down, one that works is killed. Further calls do nothing.

        A thread that waits for the engine gets RunError.
        """
        child, error, self._error = self._child, self._error, self._error or "the engine process is closed"
        torch.set_num_threads(self._trainer_threads)
        if child is None:
            return
        idle = self._lock.acquire(blocking=False)  # not released: no further call may begin
        if idle and error is None:
            with suppress(*CLOSED):
                self._pipe.send(("close",))
            child.wait(CLOSE_S)
        child.kill()
        if idle:  # else a thread may still be reading
            self._pipe.close()

    def _start(self, config: RunConfig, policy: Policy) -> None:
        """Start the process and build the engine there."""
        on_gpu = policy.device.type == "cuda"
        # On a CPU the engine has half of the trainer's threads, which the trainer then does without: with more threads
        # than cores, both would wait for threads that do not run, at each operation.
        threads = self._trainer_threads if on_gpu else max(1, self._trainer_threads // 2)
        largest = max(weight.numel() for weight in policy.model.parameters()) * policy.dtype.itemsize
        gpu = policy.device if config.sampling.weight_transfer == "cuda-ipc" else None
        cards = _visible_cards(policy, sees_trainer=gpu is not None)
        self._child, self._pipe, self._output = start_engine(engine_environment(os.environ, cards))
        model: ModelConfig | EngineModel = _model_settings(config.model, policy)
        if not self._entry.shares_weights:
            tokenizer = policy.tokenizer if config.sampling.stop else None
            device = torch.device(policy.device.type)
            model = replace(EngineModel.of(policy.model), device=device, tokenizer=tokenizer)
        # The engine never sleeps, as it is in use during updates.
        vllm = config.sampling.vllm.model_copy(update={"sleep": False})
        sampling = config.sampling.model_copy(update={"engine": self._entry.name, "max_lag": 0, "vllm": vllm})

        def send(pipe: Connection) -> None:
            self._slots = send_slots(pipe, largest, gpu)

        trainers_gpu = None if gpu is None else len(cards) - 1
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        self._call("build", model, sampling, threads, is_deterministic, trainers_gpu, send=send)
        if not on_gpu:
            torch.set_num_threads(max(1, self._trainer_threads - threads))

    def _call(self, *command: object, send: Callable[[Connection], None] = lambda pipe: None) -> Any:
        """Send a command, and what `send` sends after it; return the value of the answer, or raise its error."""
        with self._conversation(*command) as pipe:
            send(pipe)
            answer = self._receive(pipe)
        return _checked(answer)

    def _receive(self, pipe: Connection) -> Any:
        """Return the next message of the process."""
        progress()
        pid = self._child and self._child.pid
        with Wait(f"the engine (process {pid})", "it may sample long completions"):
            return pipe.recv()

    @contextmanager
    def _conversation(self, *command: object) -> Iterator[Connection]:
        """Send a command of `EngineServer`, and yield the connection for its further messages and its answer.

        An interrupted command ends the process: its answer would be taken for that of the next command.
        """
        if not self._lock.acquire(blocking=False):
            raise RunError(self._error or "the engine process already has a call of another thread")
        try:
            if self._error is not None:
                raise RunError(self._error)
            assert self._child is not None
            try:
                self._pipe.send(command)
                yield self._pipe
            except CLOSED:
                if not self._child.wait(CLOSE_S):
                    self._child.kill()
                end = self._child.describe_end(self._output)
                self._error = self._error or (
                    f"the engine process {end}; sampling.engine_process=false samples in the trainer's "
                    "process, which needs less memory"
                )
                raise RunError(self._error) from None
            except BaseException:
                self._error = self._error or "the engine process was ended in the middle of a call"
                self._child.kill()
                raise
        finally:
            self._lock.release()


def engine_environment(environ: Mapping[str, str], cards: Sequence[int]) -> dict[str, str]:
    """Return the environment of a single process that sees only the GPUs `cards`, in the numbers of `environ`."""
    variables = {name: value for name, value in environ.items() if not _OF_RANKS.fullmatch(name)}
    if cards:
        listed = environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(card) if listed is None else listed.split(",")[card].strip() for card in cards]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    return variables


def start_engine(environment: Mapping[str, str]) -> tuple[ChildProcess, Connection, IO[bytes]]:
    """Start a process that runs `engine_server.serve`; return it with the connection to it and its output.

    multiprocessing's spawn would run the user's __main__ again. Calls of the connection raise EOFError or OSError once
    the process has ended. Raise RunError if the system refuses to start a process.
    """
    ours, theirs = socket.socketpair()
    output = tempfile.TemporaryFile()  # noqa: SIM115 - the process writes to it
    # A cluster sends SIGTERM to all processes of a job; the trainer completes its step first, for which it needs this
    # process. It ends it itself.
    ignored = [signal.SIGINT, signal.SIGTERM]
    command = python_command("engine", f"{engine_server.__name__}:serve", [theirs.fileno()], ignored)
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    try:
        child = ChildProcess(command, environment, pass_fds=[theirs.fileno()], **streams)
    except OSError as error:
        raise RunError(f"cannot start the engine process: {error}") from error
    finally:
        theirs.close()

    def close_at_end() -> None:
        """Wake a thread that waits for the connection, which a process of the engine may still hold."""
        child.wait()
        with suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)
        ours.close()

    pipe = Connection(os.dup(ours.fileno()))
    threading.Thread(target=close_at_end, name="engine-watch", daemon=True).start()
    return child, pipe, output


def _model_settings(config: ModelConfig, policy: Policy) -> ModelConfig:
    """Return the settings of the model in the process: without adapters, since they are merged before they are sent."""
    settings: dict[str, Any] = {
        "lora": None,
        "dtype": str(policy.dtype).removeprefix("torch."),
        "device": "cuda" if policy.device.type == "cuda" else str(policy.device),
    }
    if policy.commit is not None and not is_adapter_folder(user_path(config.path)):
        settings["revision"] = policy.commit  # the files that the trainer has loaded
    return config.model_copy(update=settings)


def _visible_cards(policy: Policy, sees_trainer: bool) -> list[int]:
    """Return the GPUs that the process of this rank sees, in the trainer's numbers; none on a CPU.

    The process computes on the first; with `sees_trainer` the last is the GPU of the trainer.
    """
    if policy.device.type != "cuda":
        return []
    own = policy.device.index or 0
    cards = engine_cards(own, local_rank_count(), torch.cuda.device_count())
    return [*dict.fromkeys([cards[policy.ranks.local_rank], *([own] if sees_trainer else [])])]


def _checked(answer: Answer) -> Any:
    """Log the warnings of an answer and return its value, or raise its error."""
    for level, text in answer.warnings:
        log.log(level, "%s", text)
    if answer.error is not None:
        raise answer.error
    return answer.value
