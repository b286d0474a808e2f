"""Commands of an engine process: build the engine, receive weights, sample, describe, close.

Each command ends with one answer of the kind `done`, which has the error if there was one, and the warnings that were
logged since the last answer.
"""

from __future__ import annotations

import logging
import socket
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch

from bandpo_cli.config.run import ModelConfig, RunConfig, SamplingConfig
from bandpo_cli.errors import is_out_of_memory
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.sampling.base import (
    Sampler,
    SampleRequest,
    SamplingParams,
    StaleEngineError,
    StreamingSampler,
    build_sampler,
    describe_sampler,
)
from bandpo_cli.sampling.engine_channel import (
    Array,
    Channel,
    ChannelClosedError,
    Message,
    error_header,
    pack_completions,
    receive_weight,
    unpack_prompts,
)
from bandpo_cli.types import Completion

Answer = tuple[dict[str, Any], Sequence[Array]]
"""Further values of the header of an answer, and its arrays."""


class _StreamEndedError(Exception):
    """The trainer takes no more completions of a stream."""


class EngineServer:
    """An engine with a policy of its own, whose weights the trainer sends."""

    def __init__(self, end: socket.socket) -> None:
        """Serve the trainer at the other end of the socket pair."""
        self._channel = Channel(end)
        self._log = _WarningLog()
        logger = logging.getLogger("bandpo_cli")
        logger.addHandler(self._log)
        logger.propagate = False
        self._policy: Policy | None = None
        self._sampler: Sampler | None = None
        self._is_current = False

    def serve(self) -> None:
        """Carry out commands, one after the other, until `close` or the end of the connection."""
        commands: dict[str, Callable[[Message], Answer]] = {
            "build": self._build,
            "sync": self._sync,
            "sample": self._sample,
            "stream": self._stream,
            "describe": self._describe,
        }
        try:
            while (message := self._channel.receive()).kind != "close":
                self._answer(commands[message.kind], message)
        except ChannelClosedError:  # the trainer has ended
            return
        if self._sampler is not None:
            self._sampler.close()

    def _answer(self, command: Callable[[Message], Answer], message: Message) -> None:
        header: dict[str, Any] = {}
        arrays: Sequence[Array] = ()
        try:
            header, arrays = command(message)
        except ChannelClosedError:
            raise
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            traceback.print_exc()
            header = {"error": error_header(error)}
        self._channel.send("done", arrays, **header, warnings=self._log.taken())

    def _build(self, message: Message) -> Answer:
        """Load the policy and build the engine."""
        header = message.header
        torch.set_num_threads(header["threads"])
        sections = {
            "model": ModelConfig.model_validate(header["model"]),
            "sampling": SamplingConfig.model_validate(header["sampling"]),
        }
        config = RunConfig().model_copy(update=sections)
        # Its parameters require gradients, as the trainer's do: on a CPU the last bits of log-probs depend on that.
        self._policy = load_policy(config.model, for_training=False)
        self._sampler = build_sampler(config, self._policy)
        return {}, ()

    def _sync(self, message: Message) -> Answer:
        """Receive all weights of the policy, then load them into the engine."""
        assert self._policy is not None
        assert self._sampler is not None
        version = message.header["version"]
        self._is_current = False
        self._receive_weights(version)
        self._sampler.sync(self._policy.model, version)
        self._is_current = True
        return {}, ()

    def _receive_weights(self, version: int) -> None:
        """Copy each weight into the parameter of its name.

        All of them are received, also after one that cannot be used: the trainer sends them in any case.

        Raises:
            StaleEngineError: the received weights are not exactly those of the policy.
        """
        assert self._policy is not None
        parameters = dict(self._policy.model.named_parameters())
        missing = dict.fromkeys(parameters)
        failure: Exception | None = None
        while (message := self._channel.receive()).kind == "weight":
            name, size = message.header["name"], message.header["bytes"]
            problem = _mismatch(parameters.get(name), message.header)
            if problem is not None:
                receive_weight(self._channel, size, None)
                failure = failure or StaleEngineError(
                    f"the engine process cannot load version {version} of the weights: {name} {problem}"
                )
                continue
            missing.pop(name, None)
            try:
                receive_weight(self._channel, size, parameters[name])
            except RuntimeError as error:
                failure = failure or error
        if failure is not None:
            if is_out_of_memory(failure) or isinstance(failure, StaleEngineError):
                raise failure
            raise StaleEngineError(f"version {version} of the weights: {failure}") from failure
        if missing:
            raise StaleEngineError(
                f"the engine process received version {version} of the weights only in part: "
                f"{next(iter(missing))} is missing ({len(missing)} in total)"
            )

    def _sample(self, message: Message) -> Answer:
        sampler, params = self._current_sampler(), _params(message)
        groups = sampler.sample(unpack_prompts(message.arrays), params, message.header["seed"])
        return {}, pack_completions(groups)

    def _stream(self, message: Message) -> Answer:
        """Send the completions of each request; the trainer answers each with whether it takes more."""
        sampler, params = self._current_sampler(), _params(message)
        try:
            with closing(_stream_of(sampler, self._requests(), params)) as stream:
                for groups in stream:
                    self._channel.send("completions", pack_completions(groups))
                    if not self._channel.receive().header["more"]:
                        break
        except _StreamEndedError:
            pass
        return {}, ()

    def _requests(self) -> Iterator[SampleRequest]:
        """Ask the trainer for one request after the other."""
        while True:
            self._channel.send("next")
            message = self._channel.receive()
            if message.kind == "stop":
                raise _StreamEndedError
            if message.kind == "end":
                return
            yield SampleRequest(unpack_prompts(message.arrays), message.header["seed"])

    def _current_sampler(self) -> Sampler:
        assert self._sampler is not None
        if not self._is_current:
            raise StaleEngineError("the engine process has no complete weights since the last sync failed")
        return self._sampler

    def _describe(self, _: Message) -> Answer:
        assert self._sampler is not None
        return {"description": describe_sampler(self._sampler)}, ()


def _stream_of(
    sampler: Sampler, requests: Iterable[SampleRequest], params: SamplingParams
) -> Generator[list[list[Completion]], None, None]:
    """Yield the completions of each request, at the same time if the engine can."""
    if isinstance(sampler, StreamingSampler):
        yield from sampler.sample_stream(requests, params)
        return
    for prompts_P, seed in requests:
        yield sampler.sample(prompts_P, params, seed)


def _params(message: Message) -> SamplingParams:
    values = message.header["params"]
    return SamplingParams(**{**values, "stop_ids": tuple(values["stop_ids"])})


def _mismatch(parameter: torch.Tensor | None, header: dict[str, Any]) -> str | None:
    """Return how a received weight differs from the parameter of its name; None if it does not."""
    if parameter is None:
        return "is no parameter of the model"
    own = [*parameter.shape], str(parameter.dtype)
    if own != (header["shape"], header["dtype"]):
        return f"has shape {header['shape']} and dtype {header['dtype']} in place of {own[0]} and {own[1]}"
    return None


class _WarningLog(logging.Handler):
    """Collects warnings for the trainer, which logs them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._records: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep level and text."""
        self._records.append((record.levelno, record.getMessage()))

    def taken(self) -> list[tuple[int, str]]:
        """Return the records since the last call."""
        records, self._records = self._records, []
        return records
