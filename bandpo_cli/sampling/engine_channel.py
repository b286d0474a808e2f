"""Messages between the trainer and its engine process: JSON headers with arrays, weights and completions as raw bytes.

Both sides use these functions. Nothing is pickled, and floats arrive with the bits that they were sent with.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, cast

import numpy as np
import torch

from bandpo_cli.errors import (
    ConfigError,
    EngineMemoryError,
    RunError,
    UserError,
    find_out_of_memory,
    first_line,
)
from bandpo_cli.sampling.base import StaleEngineError, TokenIds
from bandpo_cli.types import Completion, FinishReason

Array = np.ndarray[Any, Any]

PIECE_BYTES = 1 << 20
"""Bytes of a weight that are copied at a time, so that neither side holds a second copy of a large tensor. Between two
processes on two CPU cores, 1 MiB gives up to 2.0 GB/s; a quarter or four times as much gives 1.3 GB/s."""
SOCKET_BYTES = 1 << 22
"""Requested size of the socket's buffer; the system may grant less."""

_LENGTH = struct.Struct("!I")
_REASONS: tuple[FinishReason, ...] = ("stop", "length")
_VALUES = (("token_ids", np.int64), ("logprobs", np.float64), ("entropies", np.float64))
"""The fields of a completion that have one value per token, and the dtypes that hold Python's numbers exactly."""
_MAX_ERROR_CHARS = 1000
_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each for each in (StaleEngineError, ConfigError, UserError, RunError, EngineMemoryError)
}
"""The types of errors that are raised again in the trainer, by name."""


class ChannelClosedError(Exception):
    """The connection is closed: the other process has ended, or another thread has closed this end."""


@dataclass(frozen=True)
class Message:
    """A received message: `header` has JSON values, `arrays` are one-dimensional."""

    header: dict[str, Any]
    arrays: Sequence[Array] = ()

    @property
    def kind(self) -> str:
        """What the message asks for or answers."""
        return str(self.header["kind"])


class Channel:
    """One end of a socket pair. Every method raises ChannelClosedError where the connection is closed."""

    def __init__(self, end: socket.socket) -> None:
        """Take over the socket."""
        self._socket = end
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)

    def send(self, kind: str, arrays: Sequence[Array] = (), **header: Any) -> None:
        """Send a message.

        Args:
            arrays: one-dimensional arrays of numbers.
            header: further values of the header, for JSON.
        """
        listed = [[each.dtype.str, len(each)] for each in arrays]
        text = json.dumps({**header, "kind": kind, "arrays": listed}).encode()
        self.send_bytes(memoryview(_LENGTH.pack(len(text)) + text))
        for each in arrays:
            self.send_bytes(_bytes_of(each))

    def receive(self) -> Message:
        """Wait for a message and return it."""
        length = bytearray(_LENGTH.size)
        self.receive_bytes(memoryview(length))
        text = bytearray(_LENGTH.unpack(length)[0])
        self.receive_bytes(memoryview(text))
        header = json.loads(text)
        arrays = [np.empty(count, np.dtype(dtype)) for dtype, count in header.pop("arrays")]
        for each in arrays:
            self.receive_bytes(_bytes_of(each))
        return Message(header, arrays)

    def send_bytes(self, data: memoryview) -> None:
        """Send bytes as they are."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ChannelClosedError from error

    def receive_bytes(self, data: memoryview) -> None:
        """Fill `data` with the next bytes."""
        filled = 0
        while filled < len(data):
            try:
                count = self._socket.recv_into(data[filled:])
            except OSError as error:
                raise ChannelClosedError from error
            if not count:
                raise ChannelClosedError
            filled += count

    def shutdown(self) -> None:
        """Close the connection: a thread that waits in another method gets ChannelClosedError."""
        with contextlib.suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket; no other thread may be using it."""
        self._socket.close()


def send_weight(channel: Channel, name: str, tensor: torch.Tensor) -> None:
    """Send a tensor of any shape, dtype and device."""
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    channel.send("weight", name=name, shape=[*tensor.shape], dtype=str(tensor.dtype), bytes=len(content))
    for start in range(0, len(content), PIECE_BYTES):
        channel.send_bytes(_bytes_of(content[start : start + PIECE_BYTES].cpu().numpy()))


def receive_weight(channel: Channel, size: int, target: torch.Tensor | None) -> None:
    """Receive the bytes of a tensor after its header.

    All of them are received, also where a copy to the target's device fails.

    Args:
        size: number of bytes.
        target: a tensor of that size, which gets the values; None to drop them.

    Raises:
        RuntimeError: the copy failed.
    """
    # Of a tensor with strides of its own, contiguous() is a copy, which it gets at the end.
    whole = None if target is None else target.detach().contiguous()
    content = None if whole is None else whole.view(-1).view(torch.uint8)
    buffer = torch.empty(min(size, PIECE_BYTES), dtype=torch.uint8)
    failure: RuntimeError | None = None
    for start in range(0, size, PIECE_BYTES):
        piece = buffer[: min(PIECE_BYTES, size - start)]
        channel.receive_bytes(_bytes_of(piece.numpy()))
        if content is None or failure is not None:
            continue
        try:
            content[start : start + len(piece)].copy_(piece)
        except RuntimeError as error:
            failure = error
    if failure is not None:
        raise failure
    if target is not None and whole is not None and not target.is_contiguous():
        target.detach().copy_(whole)


def pack_prompts(prompts_P: Sequence[TokenIds]) -> list[Array]:
    """Return the arrays from which `unpack_prompts` makes the prompts."""
    return _flat(prompts_P, np.int64)


def unpack_prompts(arrays: Sequence[Array]) -> list[tuple[int, ...]]:
    """Return prompts [P] of token ids."""
    lengths, values = arrays
    return _rows(lengths, values)


def pack_completions(groups: Sequence[Sequence[Completion]]) -> list[Array]:
    """Return the arrays from which `unpack_completions` makes the completions [P][n]."""
    flat = [*chain.from_iterable(groups)]
    arrays: list[Array] = [
        np.array([len(group) for group in groups], np.int64),
        np.array([_REASONS.index(each.finish_reason) for each in flat], np.uint8),
        np.array([each.policy_version for each in flat], np.int64),
    ]
    for name, dtype in _VALUES:
        arrays += _flat([getattr(each, name) for each in flat], dtype)
    return arrays


def unpack_completions(arrays: Sequence[Array]) -> list[list[Completion]]:
    """Return completions [P][n]."""
    sizes, reasons, versions, *values = arrays
    columns = [_rows(*values[start : start + 2]) for start in range(0, len(values), 2)]
    flat = [
        Completion(ids, logprobs, _REASONS[reason], version, entropies)
        for reason, version, ids, logprobs, entropies in zip(
            reasons.tolist(), versions.tolist(), *columns, strict=True
        )
    ]
    return [flat[start:end] for start, end in _bounds(sizes)]


def error_header(error: Exception) -> dict[str, str]:
    """Return the type and the text of an error, for the header of an answer."""
    failed = find_out_of_memory(error)
    if failed is not None:
        text = f"engine process: {first_line(failed, _MAX_ERROR_CHARS)}"
        return {"type": EngineMemoryError.__name__, "text": text}
    for each in type(error).__mro__:
        if each.__name__ in _ERRORS:
            return {"type": each.__name__, "text": str(error)}
    line = first_line(str(error), _MAX_ERROR_CHARS)
    text = f"the engine process failed: {type(error).__name__}" + (f": {line}" if line else "")
    return {"type": "RunError", "text": text}


def received_error(header: Mapping[str, str]) -> Exception:
    """Return the error that `error_header` described, of the same type where `errors` has it."""
    return _ERRORS[header["type"]](header["text"])


def _flat(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> list[Array]:
    """Return the lengths of the rows and all of their values."""
    lengths = np.array([len(row) for row in rows], np.int64)
    return [lengths, np.fromiter(chain.from_iterable(rows), cast(Any, dtype), int(lengths.sum()))]


def _rows(lengths: Array, values: Array) -> list[tuple[Any, ...]]:
    flat = values.tolist()
    return [tuple(flat[start:end]) for start, end in _bounds(lengths)]


def _bounds(lengths: Array) -> list[tuple[int, int]]:
    """Return start and end of each row in the values of all rows."""
    ends = [*accumulate(lengths.tolist())]
    return [*zip([0, *ends[:-1]], ends, strict=True)] if ends else []


def _bytes_of(array: Array) -> memoryview:
    return memoryview(cast(Any, array.view(np.uint8)))
