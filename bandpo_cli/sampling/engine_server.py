"""Commands of an engine process: build the engine, receive weights, sample, describe, close.

A command is the name of a method of `EngineServer` with its arguments. It ends with one `Answer`.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

import torch

from bandpo_cli.config.run import ModelConfig, RunConfig, SamplingConfig
from bandpo_cli.errors import RunError, UserError
from bandpo_cli.models.load import Policy, load_policy
from bandpo_cli.sampling.base import (
    EngineModel,
    LoadingSampler,
    Sampler,
    SampleRequest,
    SamplingParams,
    StaleEngineError,
    StreamingSampler,
    TokenIds,
    build_sampler,
    describe_sampler,
    engine_model,
)
from bandpo_cli.sampling.engine_channel import (
    Answer,
    Weights,
    portable_error,
    receive_slots,
    receive_weights,
)
from bandpo_cli.types import Completion


class EngineServer:
    """An engine whose weights the trainer sends; one that runs the trainer's own model has a policy for it here."""

    _slots: torch.Tensor
    _device: torch.device
    _policy: Policy | None = None
    _sampler: Sampler | None = None
    _is_current = False
    _has_sampled = False

    def __init__(self, pipe: Connection) -> None:
        """Serve the trainer at the other end of the connection."""
        self._pipe = pipe
        self._log = _WarningLog()
        logger = logging.getLogger("bandpo_cli")
        logger.addHandler(self._log)
        logger.propagate = False

    def serve(self) -> None:
        """Carry out commands, one after the other, until `close` or the end of the connection."""
        try:
            while (command := self._pipe.recv())[0] != "close":
                self._pipe.send(self._answer(*command))
        except (EOFError, OSError):  # the trainer has ended
            return
        if self._sampler is not None:
            self._sampler.close()

    def _answer(self, name: str, *arguments: Any) -> Answer:
        try:
            value = getattr(self, name)(*arguments)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            traceback.print_exc()
            sent = portable_error(error)
            if not self._has_sampled and type(error) is RunError and isinstance(sent, RunError):
                sent = UserError(f"the engine process cannot run this model here: {error}")
            return Answer(error=sent, warnings=self._log.taken())
        return Answer(value, warnings=self._log.taken())

    def build(
        self, model: ModelConfig | EngineModel, sampling: SamplingConfig, threads: int, gpu: int | None
    ) -> None:
        """Build the engine, with a policy where it gets the settings of the model.

        Args:
            gpu: the number of the trainer's GPU in this process where the weights come through its memory.
        """
        self._slots = receive_slots(self._pipe, gpu)
        torch.set_num_threads(threads)
        if isinstance(model, ModelConfig):
            # Its parameters require gradients, as the trainer's do: on a CPU the last bits of log-probs depend on that.
            self._policy = load_policy(model, for_training=False)
            model = engine_model(self._policy.model)
        self._device = model.device
        config = RunConfig().model_copy(update={"sampling": sampling})
        self._sampler = build_sampler(config, self._policy or model)

    def sync(self, version: int) -> None:
        """Receive all weights of the policy and load them into the engine, one at a time."""
        assert self._sampler is not None
        self._is_current = False
        weights = receive_weights(self._pipe, self._slots)
        try:
            if self._policy is not None:
                _copy(weights, dict(self._policy.model.named_parameters()), version)
                self._sampler.sync(self._policy.model, version)
            else:
                assert isinstance(self._sampler, LoadingSampler)
                # vLLM keeps the tensors of a layer until it has all of them, longer than they are valid.
                copies = ((name, tensor.to(self._device, copy=True)) for name, tensor in weights)
                self._sampler.load(copies, version)
        finally:
            for _ in weights:  # the trainer sends all of them in any case
                pass
        self._is_current = True

    def sample(
        self, prompts_P: Sequence[TokenIds], params: SamplingParams, seed: int
    ) -> list[list[Completion]]:
        """Return completions [P][n]."""
        completions = self._current_sampler().sample(prompts_P, params, seed)
        self._has_sampled = True
        return completions

    def stream(self, params: SamplingParams) -> None:
        """Send the completions of each request; the trainer answers each with whether it takes more."""
        with closing(_stream_of(self._current_sampler(), self._requests(), params)) as stream:
            for groups in stream:
                self._pipe.send(groups)
                if not self._pipe.recv():
                    break

    def _requests(self) -> Iterator[SampleRequest]:
        """Ask the trainer for one request after the other."""
        while True:
            self._pipe.send(None)
            request = self._pipe.recv()
            if request is None:
                return
            yield request

    def describe(self) -> dict[str, str]:
        """Return what the engine describes; see `describe_sampler`."""
        assert self._sampler is not None
        return describe_sampler(self._sampler)

    def _current_sampler(self) -> Sampler:
        assert self._sampler is not None
        if not self._is_current:
            raise StaleEngineError("the engine process has no complete weights since the last sync failed")
        return self._sampler


def _stream_of(
    sampler: Sampler, requests: Iterator[SampleRequest], params: SamplingParams
) -> Generator[list[list[Completion]], None, None]:
    """Yield the completions of each request, at the same time if the engine can."""
    if isinstance(sampler, StreamingSampler):
        yield from sampler.sample_stream(requests, params)
        return
    for prompts_P, seed in requests:
        yield sampler.sample(prompts_P, params, seed)


@torch.no_grad()
def _copy(weights: Weights, parameters: Mapping[str, torch.Tensor], version: int) -> None:
    """Copy each weight into the parameter of its name.

    Raises:
        StaleEngineError: the weights are not exactly those of the parameters.
    """
    missing = dict.fromkeys(parameters)
    for name, tensor in weights:
        problem = _mismatch(parameters.get(name), tensor)
        if problem is not None:
            raise StaleEngineError(
                f"the engine process cannot load version {version} of the weights: {name} {problem}"
            )
        parameters[name].copy_(tensor)
        del missing[name]
    if missing:
        raise StaleEngineError(
            f"the engine process received version {version} of the weights only in part: "
            f"{next(iter(missing))} is missing ({len(missing)} in total)"
        )


def _mismatch(parameter: torch.Tensor | None, tensor: torch.Tensor) -> str | None:
    """Return how a received weight differs from the parameter of its name; None if it does not."""
    if parameter is None:
        return "is no parameter of the model"
    if (parameter.shape, parameter.dtype) != (tensor.shape, tensor.dtype):
        return (
            f"has shape {[*tensor.shape]} and dtype {tensor.dtype} in place of {[*parameter.shape]} and "
            f"{parameter.dtype}"
        )
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
