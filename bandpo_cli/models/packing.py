"""Which packed tokens attend to which, in the forms that attention kernels take."""

# MERGED: Rows of tokens for a forward pass, laid one after another without padding, no shared prompt computed twice. A row holds one prompt and one or more of its completions, each of which attends to the prompt and to itself but not to its neighbours, at the positions it would have alone. The G completions of a group thus cost one prompt, not G: for short answers to longer questions that is most of the work. A row of one completion is the ordinary layout.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from bandpo_cli.types import Group

MAX_MASKED_ROW_TOKENS = 512
"""Longest row of several completions that attends under a mask; its cost grows with the square of the length. In
longer rows each completion is a sequence of its own to the kernel, behind its own copy of the prompt."""
MIN_FILL_RATIO = 0.75
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
            if len(row) > 2 and sum(row) <= MAX_MASKED_ROW_TOKENS:
                positions = [*range(row[0]), *(row[0] + i for length in row[1:] for i in range(length))]
                segments = [segment for segment, length in enumerate(row) for _ in range(length)]
                masked.append(_Sequence(list(range(start, start + sum(row))), positions, segments))
            else:
                plain += [
                    _Sequence(tokens, list(range(len(tokens))), [])
                    for tokens in _sequences_of_row(start, row)
                ]
        return tuple(self._block(part) for part in [*_group_by_length(masked), *_group_by_length(plain)])

    @cached_property
    def block_scatter_index(self) -> torch.Tensor:
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
        return [tokens for start, row in self._placed() for tokens in _sequences_of_row(start, row)]

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


def _sequences_of_row(start: int, row: tuple[int, ...]) -> list[list[int]]:
    """Return the packed tokens of each completion of a row, those of the prompt before them."""
    prompt = range(start, start + row[0])
    ends = accumulate(row[1:], initial=start + row[0])
    return [[*prompt, *range(first, last)] for first, last in pairwise(ends)]


def _group_by_length(sequences: list[_Sequence]) -> list[list[_Sequence]]:
    """Group sequences of similar length, the longest first."""
    parts: list[list[_Sequence]] = []
    for sequence in sorted(sequences, key=lambda sequence: len(sequence.tokens), reverse=True):
        if not parts or len(sequence.tokens) < MIN_FILL_RATIO * len(parts[-1][0].tokens):
            parts.append([])
        parts[-1].append(sequence)
    return parts


MAX_SHARED_ROW_TOKENS = 4096
"""Most tokens in a row of several completions; in longer ones the prompt is a small part of what is computed."""
MAX_PROMPT_COPIES = 4
"""In rows too long for a mask, attention holds the prompt once for each completion behind it. Rows end where that
comes to more than this many times their own tokens."""


@dataclass(frozen=True)
class Row:
    """One prompt with one or more completions of it, as token ids."""

    prompt_ids: Sequence[int]
    completions: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.prompt_ids) + sum(len(completion) for completion in self.completions)


@dataclass(frozen=True)
class TokenBatch:
    """T packed tokens, N of which are completion tokens, of S completions.

    Attributes:
        input_ids: [1, T] int64, row after row, each the prompt and then its completions.
        position_ids: [1, T] int64, those that each token has in its own prompt and completion.
        packing: which tokens attend to which.
        predictor_index: [N] int64, index into the T tokens whose output predicts each completion token.
        targets: [N] int64, the tokens themselves, completion by completion in the order of the rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    packing: Packing
    predictor_index: torch.Tensor
    targets: torch.Tensor


def rows_from_groups(groups: Sequence[Group]) -> list[Row]:
    """Put as many completions of a group behind one prompt as a row may hold, at least one; the order is kept."""
    rows = []
    for group in groups:
        completions = [rollout.completion.token_ids for rollout in group.rollouts_G]
        rows += _split_row(Row(group.rollouts_G[0].prompt_ids, completions), MAX_SHARED_ROW_TOKENS)
    return rows


def batch_rows(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Cut rows, in order, into lists of at most `max_tokens` tokens.

    A row of several completions that is longer than that is cut into rows; one of a single completion goes alone.
    """
    batches: list[list[Row]] = []
    tokens = 0
    for row in (piece for whole in rows for piece in _split_row(whole, max_tokens)):
        tokens += len(row)
        if not batches or tokens > max_tokens:
            batches.append([])
            tokens = len(row)
        batches[-1].append(row)
    return batches


def _split_row(row: Row, max_tokens: int) -> list[Row]:
    """Cut a row where it exceeds `max_tokens`, or where attention would hold too many copies of its prompt."""
    prompt = len(row.prompt_ids)
    rows: list[Row] = []
    held: list[Sequence[int]] = []
    for completion in row.completions:
        answers = sum(map(len, held)) + len(completion)
        tokens, places = prompt + answers, prompt * (len(held) + 1) + answers
        if held and (
            tokens > max_tokens or (tokens > MAX_MASKED_ROW_TOKENS and places > MAX_PROMPT_COPIES * tokens)
        ):
            rows.append(Row(row.prompt_ids, held))
            held = []
        held.append(completion)
    return [*rows, Row(row.prompt_ids, held)]


def collate(rows: Sequence[Row], device: torch.device) -> TokenBatch:
    """Lay out rows as tensors on `device`, without padding."""
    ids: list[int] = []
    positions: list[int] = []
    predictor_index: list[int] = []
    targets: list[int] = []
    for row in rows:
        length = len(row.prompt_ids)
        last_of_prompt = len(ids) + length - 1
        ids.extend(row.prompt_ids)
        positions.extend(range(length))
        for completion in row.completions:
            # The first token follows the prompt's last one; every other follows its own predecessor.
            predictor_index.append(last_of_prompt)
            predictor_index.extend(range(len(ids), len(ids) + len(completion) - 1))
            targets.extend(completion)
            ids.extend(completion)
            positions.extend(range(length, length + len(completion)))
    return TokenBatch(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        packing=Packing(tuple((len(row.prompt_ids), *map(len, row.completions)) for row in rows), device),
        predictor_index=torch.tensor(predictor_index, device=device),
        targets=torch.tensor(targets, device=device),
    )
