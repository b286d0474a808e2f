"""Sampling in a process of its own, so that the trainer can update at the same time (`sampling.max_lag`).

The process has the ordinary engine of the settings and a model of its own. The trainer sends it the weights tensor by
tensor at every sync, which ends with the checks of the engine itself. There is one process per rank. Its memory is that
of a model in the dtype of forward passes, of the engine, and of a second copy of the weights where the engine has one.

The engine never sleeps (`sampling.vllm.sleep` has no effect): it samples while the trainer updates.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from bandpo_cli.config.hardware import engine_cards, trainer_cards
from bandpo_cli.config.run import ModelConfig, RunConfig, SamplingConfig
from bandpo_cli.config.sampling import resolve_engine
from bandpo_cli.errors import RunError
from bandpo_cli.models.adapter_files import adapter_folder
from bandpo_cli.models.load import Policy
from bandpo_cli.models.weights import checkpoint_weights
from bandpo_cli.rank_process import local_rank_count
from bandpo_cli.sampling.base import SampleRequest, SamplingParams, TokenIds
from bandpo_cli.sampling.engine_channel import (
    Channel,
    ChannelClosedError,
    Message,
    pack_prompts,
    received_error,
    send_weight,
    unpack_completions,
)
from bandpo_cli.sampling.engine_child import EngineChild, engine_environment
from bandpo_cli.types import Completion

CLOSE_S = 5.0
"""Seconds that an idle engine has to shut down before it is killed."""

_CLOSED = "the engine process is closed"

log = logging.getLogger("bandpo_cli")


class EngineProcess:
    """A sampling engine in a child process; see `Sampler` and `StreamingSampler`.

    One thread at a time may sample, sync or describe; `close` may be called from any thread at any time.

    Every method but `close` and `sleep` raises RunError after the process has ended, with how it ended.
    """

    shares_weights = False

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        """Start the process, build the engine there and send the weights as version 0; all ranks do so together.

        Raises:
            ConfigError: the engine is not installed.
            UserError: the engine cannot start with this model and these settings.
            RunError: the process cannot be started, or it ended.
            StaleEngineError: the first sync failed.
        """
        self._ranks = policy.ranks
        self._lock = threading.Lock()
        self._error: str | None = None
        self._child: EngineChild | None = None
        self._trainer_threads = torch.get_num_threads()
        try:
            self._ranks.agree(lambda: self._start(config, policy))
            self.sync(policy.model, version=0)
        except BaseException:
            self.close()
            raise

    def sample(
        self, prompts_P: Sequence[TokenIds], params: SamplingParams, seed: int
    ) -> list[list[Completion]]:
        """Return completions [P][n]; see `Sampler`. They are those of the same engine in the trainer's process.

        Raises:
            UserError: the engine does not support the request.
            RunError: the engine failed, or its process ended or was closed by another thread.
            EngineMemoryError: the engine ran out of memory.
        """
        with self._conversation() as channel:
            channel.send("sample", pack_prompts(prompts_P), params=asdict(params), seed=seed)
            answer = channel.receive()
        return unpack_completions(_checked(answer).arrays)

    def sample_stream(
        self, requests: Iterable[SampleRequest], params: SamplingParams
    ) -> Generator[list[list[Completion]], None, None]:
        """Yield the completions [P][n] of each request; see `StreamingSampler`. Errors as in `sample`.

        The process asks for requests as its engine has room for them. It waits while the caller uses completions.
        """
        more = iter(requests)
        failure: BaseException | None = None
        with self._conversation() as channel:
            channel.send("stream", params=asdict(params))
            while (message := channel.receive()).kind != "done":
                if message.kind == "next":
                    try:
                        _send_request(channel, next(more, None))
                    except ChannelClosedError:
                        raise
                    except BaseException as error:  # noqa: BLE001 - raised below, after the end of the stream
                        failure = error
                        channel.send("stop")
                    continue
                try:
                    yield unpack_completions(message.arrays)
                except GeneratorExit:
                    with suppress(ChannelClosedError):  # the process may have been closed in between
                        channel.send("taken", more=False)
                        channel.receive()
                    raise
                channel.send("taken", more=True)
        if failure is not None:
            raise failure
        _checked(message)

    def sleep(self) -> None:
        """Do nothing: the engine samples while the trainer updates."""

    def sync(self, model: PreTrainedModel, version: int) -> None:
        """Send the weights; all ranks must call this together.

        Raises:
            StaleEngineError: the engine does not run the given weights; on all ranks, if it is so on one.
            RunError: the process ended.
            EngineMemoryError: the engine ran out of memory.
        """
        weights = checkpoint_weights(model)
        answer: Message | None = None
        failure: RunError | None = None
        try:
            with self._conversation() as channel:
                channel.send("sync", version=version)
                for name, tensor in weights:
                    send_weight(channel, name, tensor)
                channel.send("end")
                answer = channel.receive()
        except RunError as error:
            failure = error
            for _ in weights:  # a sharded model gathers each weight on all ranks together
                pass

        def raise_failure() -> None:
            if failure is not None:
                raise failure
            assert answer is not None
            _checked(answer)

        self._ranks.agree(raise_failure)

    def describe(self) -> dict[str, str]:
        """Return what the engine in the process describes; see `describe_sampler`."""
        with self._conversation() as channel:
            channel.send("describe")
            answer = channel.receive()
        description: dict[str, str] = _checked(answer).header["description"]
        return description

    def close(self) -> None:
        """End the process: an idle engine shuts down, one that works is killed. Further calls do nothing.

        A thread that waits for the engine gets RunError.
        """
        child, error, self._error = self._child, self._error, self._error or _CLOSED
        torch.set_num_threads(self._trainer_threads)
        if child is None:
            return
        idle = self._lock.acquire(blocking=False)
        try:
            if idle and error is None:
                with suppress(ChannelClosedError):
                    child.channel.send("close")
                child.wait(CLOSE_S)
            child.kill()
            if idle:  # else a thread may still be reading
                child.channel.close()
        finally:
            if idle:
                self._lock.release()

    def _start(self, config: RunConfig, policy: Policy) -> None:
        """Start the process and build the engine there."""
        on_gpu = policy.device.type == "cuda"
        sampling = _engine_settings(config.sampling, policy)
        threads = engine_threads(self._trainer_threads, on_gpu)
        self._child = EngineChild(engine_environment(os.environ, _engine_card(policy)))
        with self._conversation() as channel:
            channel.send(
                "build",
                model=_model_settings(config.model, policy).model_dump(mode="json"),
                sampling=sampling.model_dump(mode="json"),
                threads=threads,
            )
            answer = channel.receive()
        _checked(answer)
        if not on_gpu:
            torch.set_num_threads(max(1, self._trainer_threads - threads))

    @contextmanager
    def _conversation(self) -> Iterator[Channel]:
        """Yield the channel for one command and its answer.

        A command that is interrupted ends the process, since its answer would be taken for that of the next one.
        """
        if not self._lock.acquire(blocking=False):
            raise RunError(self._error or "the engine process already has a call of another thread")
        try:
            if self._error is not None:
                raise RunError(self._error)
            assert self._child is not None
            try:
                yield self._child.channel
            except ChannelClosedError:
                end = self._child.describe_end()
                self._error = self._error or (
                    f"the engine process {end}; a new run with sampling.max_lag=0 samples in the trainer's "
                    "process, which needs less memory"
                )
                raise RunError(self._error) from None
            except GeneratorExit:  # a stream that has been ended
                raise
            except BaseException:
                self._error = self._error or "the engine process was ended in the middle of a call"
                self._child.kill()
                raise
        finally:
            self._lock.release()


def engine_threads(threads: int, on_gpu: bool) -> int:
    """Return the number of torch threads of an engine process.

    On a CPU it is half of the trainer's threads, which the trainer then does without: with more threads than cores,
    both would wait for threads that do not run, at each operation.

    Args:
        threads: number of threads of the trainer.
        on_gpu: the engine runs on a GPU.
    """
    return threads if on_gpu else max(1, threads // 2)


def _engine_settings(config: SamplingConfig, policy: Policy) -> SamplingConfig:
    """Return the sampling settings in the process: an engine that never sleeps, as it is in use during updates."""
    return config.model_copy(
        update={
            "engine": resolve_engine(config.engine, policy.device.type == "cuda"),
            "max_lag": 0,
            "vllm": config.vllm.model_copy(update={"sleep": False}),
        }
    )


def _model_settings(config: ModelConfig, policy: Policy) -> ModelConfig:
    """Return the settings of the model in the process: without adapters, since they are merged before they are sent."""
    settings: dict[str, Any] = {
        "lora": None,
        "dtype": str(policy.dtype).removeprefix("torch."),
        "device": "cuda" if policy.device.type == "cuda" else str(policy.device),
    }
    if policy.commit is not None and adapter_folder(config) is None:
        settings["revision"] = policy.commit  # the files that the trainer has loaded
    return config.model_copy(update=settings)


def _engine_card(policy: Policy) -> int | None:
    """Return the GPU of the engine of this rank, in the trainer's numbers; None on a CPU."""
    if policy.device.type != "cuda":
        return None
    trainers = trainer_cards(policy.device.index or 0, local_rank_count())
    return engine_cards(trainers, torch.cuda.device_count())[policy.ranks.local_rank]


def _send_request(channel: Channel, request: SampleRequest | None) -> None:
    """Send the next request of a stream, or that there is none."""
    if request is None:
        channel.send("end")
    else:
        channel.send("request", pack_prompts(request.prompts_P), seed=request.seed)


def _checked(answer: Message) -> Message:
    """Log the warnings of an answer and return it, or raise its error."""
    for level, text in answer.header["warnings"]:
        log.log(level, "%s", text)
    if "error" in answer.header:
        raise received_error(answer.header["error"])
    return answer
