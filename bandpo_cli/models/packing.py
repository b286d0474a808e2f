"""Which packed tokens attend to which, in the forms that attention kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

MAX_MASKED = 512
"""Longest row of several completions that attends under a mask; its cost grows with the square of the length. In
longer rows each completion is a sequence of its own to the kernel, behind its own copy of the prompt."""
FILL = 0.75
"""Sequences are padded for one kernel call together with others that are at least this long in proportion."""
PROMPT = 0
"""Segment of a row's prompt; its completions are segments 1, 2, ..."""


class _Sequence(NamedTuple):
    """Packed tokens that attend to each other alone; `segments` where they are a row of several completions."""

    tokens: list[int]
    positions: list[int]
    segments: list[int]


@dataclass(frozen=True)
class Block:
    """B sequences of similar length, padded to L places, as one kernel call takes them.

    Attributes:
        take: [B·L] int64, the packed token at each place; behind a sequence's end its last token again.
        shape: (B, L).
        segments: [B, L] int64 of rows of several completions; None for plain sequences, whose causal attention
            needs no mask, since padding comes last.
        positions: [B, L] int64, of the tokens; [1, L] where all count alike.
    """

    take: torch.Tensor
    shape: tuple[int, int]
    segments: torch.Tensor | None
    positions: torch.Tensor

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Return [B or 1, 1, L, L] bool, True where a token may look; None where that is plain causal attention.

        Args:
            window: a token sees this many tokens, itself included; None for all before it.
        """
        if window is None or window >= self.shape[1]:
            return None if self.segments is None else self._unlimited
        positions = self.positions[:, None]
        return self._unlimited & (positions[..., :, None] - positions[..., None, :] < window)

    @cached_property
    def _unlimited(self) -> torch.Tensor:
        mask = causal_mask(self.shape[1], self.take.device)
        if self.segments is None:
            return mask
        looking, looked_at = self.segments[:, None, :, None], self.segments[:, None, None, :]
        return mask & ((looking == looked_at) | (looked_at == PROMPT))


@dataclass(frozen=True)
class Packing:
    """R rows, one after another, without padding.

    Attributes:
        rows: of each row the tokens of its prompt and then of each of its completions.
        device: of all tensors.
    """

    rows: tuple[tuple[int, ...], ...]
    device: torch.device

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The rows in padded blocks, those under a mask first."""
        masked: list[_Sequence] = []
        plain: list[_Sequence] = []
        for start, row in self._placed():
            if len(row) > 2 and sum(row) <= MAX_MASKED:
                positions = [*range(row[0]), *(row[0] + i for length in row[1:] for i in range(length))]
                segments = [segment for segment, length in enumerate(row) for _ in range(length)]
                masked.append(_Sequence(list(range(start, start + sum(row))), positions, segments))
            else:
                plain += [_Sequence(tokens, list(range(len(tokens))), []) for tokens in _apart(start, row)]
        return tuple(self._block(part) for part in [*_by_length(masked), *_by_length(plain)])

    @cached_property
    def keep_in_blocks(self) -> torch.Tensor:
        """[T] int64: where each packed token is, counting places through all blocks."""
        return self._keep(torch.cat([block.take for block in self.blocks]))

    @cached_property
    def take(self) -> torch.Tensor:
        """[E] int64: the packed token at each place, if every completion has its own copy of the prompt before it."""
        return torch.tensor([token for tokens in self._all_apart() for token in tokens], device=self.device)

    @cached_property
    def keep(self) -> torch.Tensor:
        """[T] int64: a place among those E of each packed token."""
        return self._keep(self.take)

    @cached_property
    def boundaries(self) -> torch.Tensor:
        """[S + 1] int32: among those E places, where each sequence starts, and the end."""
        lengths = accumulate((len(tokens) for tokens in self._all_apart()), initial=0)
        return torch.tensor(list(lengths), dtype=torch.int32, device=self.device)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt with one completion."""
        return max(row[0] + max(row[1:]) for row in self.rows)

    def _placed(self) -> list[tuple[int, tuple[int, ...]]]:
        return list(zip(accumulate(map(sum, self.rows), initial=0), self.rows, strict=False))

    def _all_apart(self) -> list[list[int]]:
        return [tokens for start, row in self._placed() for tokens in _apart(start, row)]

    def _keep(self, take: torch.Tensor) -> torch.Tensor:
        """Return a place of each token; of several the first."""
        places = torch.full((sum(map(sum, self.rows)),), len(take))
        return places.scatter_reduce(0, take.cpu(), torch.arange(len(take)), "amin").to(self.device)

    def _block(self, sequences: Sequence[_Sequence]) -> Block:
        length = len(sequences[0].tokens)

        def padded(lists: Sequence[list[int]]) -> torch.Tensor:
            rows = [values + values[-1:] * (length - len(values)) for values in lists]
            return torch.tensor(rows, device=self.device)

        masked = bool(sequences[0].segments)
        return Block(
            take=padded([sequence.tokens for sequence in sequences]).flatten(),
            shape=(len(sequences), length),
            segments=padded([sequence.segments for sequence in sequences]) if masked else None,
            positions=padded([sequence.positions for sequence in (sequences if masked else sequences[:1])]),
        )


def causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """Return [1, 1, L, L] bool, True for each token's own place and those before it."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()


def _apart(start: int, row: tuple[int, ...]) -> list[list[int]]:
    """Return the packed tokens of each completion of a row, those of the prompt before them."""
    prompt = range(start, start + row[0])
    ends = accumulate(row[1:], initial=start + row[0])
    return [[*prompt, *range(first, last)] for first, last in pairwise(ends)]


def _by_length(sequences: list[_Sequence]) -> list[list[_Sequence]]:
    """Group sequences of similar length, the longest first."""
    parts: list[list[_Sequence]] = []
    for sequence in sorted(sequences, key=lambda sequence: len(sequence.tokens), reverse=True):
        if not parts or len(sequence.tokens) < FILL * len(parts[-1][0].tokens):
            parts.append([])
        parts[-1].append(sequence)
    return parts
