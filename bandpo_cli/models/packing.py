"""Packed token batches: rows of tokens for a forward pass, and the layout that attention kernels take.

Rows lie one after another without padding. A row holds one prompt and one or more of its completions. Each completion
attends to the prompt and to itself but not to the other completions, at the positions that it would have without them.
The G completions of a group therefore cost one prompt instead of G; for short answers to longer questions that saves
most of the work. A row with one completion is the ordinary layout.

`Packing` describes which packed tokens attend to which. It gives the layout in two forms: padded blocks for kernels
that take sequences of equal length, and sequences with boundaries for kernels that take sequences of any length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bandpo_cli.types import Group

IntArray = NDArray[np.int64]

MAX_SHARED_ROW_TOKENS = 4096
"""Maximum tokens in a row with several completions; in longer rows the prompt is a small part of the computation."""
MAX_PROMPT_COPIES = 4
"""Rows that are too long for a mask hold one copy of the prompt per completion during attention. A row ends where the
copies bring it to more than this many times its own tokens."""
MAX_MASKED_ROW_TOKENS = 512
"""Maximum tokens in a row with several completions for attention with a mask, whose cost grows with the square of the
length. In longer rows the kernel gets each completion as a separate sequence, after its own copy of the prompt."""
MIN_FILL_RATIO = 0.75
"""Sequences share a padded kernel call if each has at least this fraction of the longest one's length."""
PROMPT = 0
"""Segment number of a row's prompt; its completions are segments 1, 2, ..."""


@dataclass(frozen=True)
class Row:
    """One prompt with one or more of its completions, as token ids."""

    prompt_ids: Sequence[int]
    completions: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.prompt_ids) + sum(len(completion) for completion in self.completions)


@dataclass(frozen=True)
class TokenBatch:
    """T packed tokens, of which N are completion tokens.

    Attributes:
        input_ids: [1, T] int64, row after row, each the prompt followed by its completions.
        position_ids: [1, T] int64, position of each token in its own prompt and completion.
        packing: which tokens attend to which.
        predictor_index: [N] int64, index into the T tokens of the token whose output predicts each completion token.
        targets: [N] int64, the completion tokens, completion by completion in the order of the rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    packing: Packing
    predictor_index: torch.Tensor
    targets: torch.Tensor


def rows_from_groups(groups: Sequence[Group], chosen_PG: Sequence[Sequence[bool]] | None = None) -> list[Row]:
    """Return the groups' completions as rows, in order, with as many completions per prompt as a row may hold.

    Args:
        chosen_PG: the completions that the rows hold; None for all of them.
    """
    rows = []
    for index, group in enumerate(groups):
        completions = [rollout.completion.token_ids for rollout in group.rollouts_G]
        if chosen_PG is not None:
            completions = [*compress(completions, chosen_PG[index])]
        if completions:
            rows += split_row(Row(group.rollouts_G[0].prompt_ids, completions), MAX_SHARED_ROW_TOKENS)
    return rows


def batch_rows(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Split rows, in order, into lists of at most `max_tokens` tokens.

    A longer row with several completions is split into several rows; a longer row with one completion is a list of
    its own.
    """
    batches: list[list[Row]] = []
    tokens = 0
    for row in (part for long_row in rows for part in split_row(long_row, max_tokens)):
        tokens += len(row)
        if not batches or tokens > max_tokens:
            batches.append([])
            tokens = len(row)
        batches[-1].append(row)
    return batches


def collate(rows: Sequence[Row], device: torch.device) -> TokenBatch:
    """Return the rows as tensors on `device`, without padding."""
    segments = [ids for row in rows for ids in (row.prompt_ids, *row.completions)]
    packing = Packing(tuple((len(row.prompt_ids), *map(len, row.completions)) for row in rows), device)
    ids = np.concatenate([np.asarray(segment, np.int64) for segment in segments])
    layout = packing.layout
    is_sampled = layout.segments != PROMPT
    predictors = np.arange(-1, len(ids) - 1)
    # The prompt's last token predicts a completion's first token; each later token is predicted by the one before it.
    is_first = is_sampled & (layout.positions == layout.prompt_lengths)
    predictors[is_first] = (layout.row_starts + layout.prompt_lengths - 1)[is_first]
    return TokenBatch(
        input_ids=device_tensor(ids[None], device),
        position_ids=device_tensor(layout.positions[None], device),
        packing=packing,
        predictor_index=device_tensor(predictors[is_sampled], device),
        targets=device_tensor(ids[is_sampled], device),
    )


def empty_batch(pad_id: int, device: torch.device) -> TokenBatch:
    """Return a batch of one prompt token without a completion: a pass over it predicts nothing."""
    return TokenBatch(
        input_ids=device_tensor([[pad_id]], device),
        position_ids=device_tensor([[0]], device),
        packing=Packing(((1, 0),), device),
        predictor_index=device_tensor([], device, torch.int64),
        targets=device_tensor([], device, torch.int64),
    )


def device_tensor(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an array, or nested lists of numbers, as a tensor on `device`.

    The copy to a GPU starts from pinned memory and does not wait for the work queued there. On a CPU the tensor may
    share the memory of the array.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def split_row(row: Row, max_tokens: int) -> list[Row]:
    """Split a row where it exceeds `max_tokens` or where attention would hold too many copies of its prompt."""
    prompt_length = len(row.prompt_ids)
    rows: list[Row] = []
    completions: list[Sequence[int]] = []
    for completion in row.completions:
        completion_tokens = sum(map(len, completions)) + len(completion)
        tokens = prompt_length + completion_tokens
        tokens_with_copies = prompt_length * (len(completions) + 1) + completion_tokens
        too_many_copies = tokens > MAX_MASKED_ROW_TOKENS and tokens_with_copies > MAX_PROMPT_COPIES * tokens
        if completions and (tokens > max_tokens or too_many_copies):
            rows.append(Row(row.prompt_ids, completions))
            completions = []
        completions.append(completion)
    return [*rows, Row(row.prompt_ids, completions)]


@dataclass(frozen=True)
class Packing:
    """Attention layout of R rows that lie one after another without padding, T tokens in total.

    With a copy of the prompt before every completion, the rows are S sequences of E tokens in total.

    Attributes:
        rows: per row the number of tokens of its prompt, followed by those of each completion.
        device: device of all tensors.
    """

    rows: tuple[tuple[int, ...], ...]
    device: torch.device

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The rows in padded blocks, those with a mask first."""
        return tuple(self._block(group) for group in self._groups)

    def drop_masks(self) -> None:
        """Free masks, which are as large as the square of the rows; they are made again when needed."""
        for block in self.__dict__.get("blocks", ()):
            block.__dict__.pop("_mask_without_window", None)

    @cached_property
    def layout(self) -> TokenLayout:
        """The place of each packed token in its row."""
        lengths = np.array([length for row in self.rows for length in row])
        segments = np.array([number for row in self.rows for number in range(len(row))])
        row_lengths = [sum(row) for row in self.rows]
        prompts = np.repeat([row[PROMPT] for row in self.rows], row_lengths)
        token_segments = np.repeat(segments, lengths)
        positions = np.arange(sum(row_lengths)) - np.repeat(lengths.cumsum() - lengths, lengths)
        return TokenLayout(
            segments=token_segments,
            positions=positions + np.where(token_segments == PROMPT, 0, prompts),
            prompt_lengths=prompts,
            row_starts=np.repeat([*accumulate(row_lengths[:-1], initial=0)], row_lengths),
        )

    @cached_property
    def block_scatter_index(self) -> torch.Tensor:
        """[T] int64: index of each packed token in the concatenation of all flattened blocks."""
        return self._scatter_index([_token_indices(group).ravel() for group in self._groups])

    @cached_property
    def gather_index(self) -> torch.Tensor:
        """[E] int64: packed token at each index of the S concatenated sequences."""
        return device_tensor(np.concatenate(self._sequence_tokens), self.device)

    @cached_property
    def scatter_index(self) -> torch.Tensor:
        """[T] int64: index of each packed token in the S concatenated sequences, one of several for the prompt's."""
        return self._scatter_index(self._sequence_tokens)

    @cached_property
    def boundaries(self) -> torch.Tensor:
        """[S + 1] int32: index of the first token of each of the S sequences, followed by E."""
        lengths = accumulate((row[PROMPT] + length for row in self.rows for length in row[1:]), initial=0)
        return device_tensor([*lengths], self.device, torch.int32)

    @cached_property
    def longest(self) -> int:
        """Number of tokens of the longest prompt with one completion."""
        return max(row[PROMPT] + max(row[1:]) for row in self.rows)

    @cached_property
    def _groups(self) -> list[list[_Sequence]]:
        """The sequences of each block: rows within a mask, then prompts with one completion."""
        masked: list[_Sequence] = []
        plain: list[_Sequence] = []
        for row, sequences in self._rows_with_sequences():
            if len(row) > 2 and sum(row) <= MAX_MASKED_ROW_TOKENS:
                masked.append(_Sequence(sequences[0].prompt, sum(row), sequences[0].prompt, 0, masked=True))
            else:
                plain += sequences
        return [*_group_by_length(masked), *_group_by_length(plain)]

    @property
    def _sequence_tokens(self) -> list[IntArray]:
        return [
            _token_indices([sequence])[0]
            for _, sequences in self._rows_with_sequences()
            for sequence in sequences
        ]

    def _rows_with_sequences(self) -> Iterator[tuple[tuple[int, ...], list[_Sequence]]]:
        """Yield each row with its sequences, one per completion."""
        start = 0
        for row in self.rows:
            prompt = row[PROMPT]
            firsts = accumulate(row[1:-1], initial=start + prompt)
            yield (
                row,
                [
                    _Sequence(start, prompt + length, first, prompt)
                    for first, length in zip(firsts, row[1:], strict=True)
                ],
            )
            start += sum(row)

    def _scatter_index(self, gathered: Sequence[IntArray]) -> torch.Tensor:
        """Return for each packed token the first index at which the concatenation of `gathered` has it."""
        tokens = np.concatenate(gathered)
        first = np.empty(sum(map(sum, self.rows)), np.int64)
        # Of repeated indices, NumPy keeps the last assignment.
        first[tokens[::-1]] = np.arange(len(tokens))[::-1]
        return device_tensor(first, self.device)

    def _block(self, sequences: Sequence[_Sequence]) -> Block:
        tokens = _token_indices(sequences)
        positions, segments = self.layout.positions[tokens], self.layout.segments[tokens]
        masked = sequences[0].masked
        return Block(
            gather_index=device_tensor(tokens.ravel(), self.device),
            shape=(len(sequences), sequences[0].length),
            tokens=sum(sequence.length for sequence in sequences),
            segments=device_tensor(segments, self.device) if masked else None,
            positions=device_tensor(positions if masked else positions[:1], self.device),
        )


@dataclass(frozen=True)
class Block:
    """B sequences of similar length, padded on the right to L tokens, for one kernel call.

    Attributes:
        gather_index: [B·L] int64, packed token at each index; padding repeats a sequence's last token.
        shape: (B, L).
        tokens: number of the B·L positions that are not padding.
        segments: [B, L] int64 for rows with several completions. None for plain sequences: their causal attention
            needs no mask, since padding comes last.
        positions: [B, L] int64, position of each token; [1, L] if all sequences have the same positions.
    """

    gather_index: torch.Tensor
    shape: tuple[int, int]
    tokens: int
    segments: torch.Tensor | None
    positions: torch.Tensor

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Return [B or 1, 1, L, L] bool, True where a query may attend to a key; None for plain causal attention.

        Args:
            window: number of tokens that a token attends to, itself included; None for all tokens before it.
        """
        if window is None or window >= self.shape[1]:
            return None if self.segments is None else self._mask_without_window
        positions = self.positions[:, None]
        return self._mask_without_window & (positions[..., :, None] - positions[..., None, :] < window)

    @cached_property
    def _mask_without_window(self) -> torch.Tensor:
        mask = causal_mask(self.shape[1], self.gather_index.device)
        if self.segments is None:
            return mask
        query_segments, key_segments = self.segments[:, None, :, None], self.segments[:, None, None, :]
        return mask & ((query_segments == key_segments) | (key_segments == PROMPT))


def causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """Return [1, 1, L, L] bool, True where the key is the query's own token or one before it."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()


class TokenLayout(NamedTuple):
    """Place of each of T packed tokens, [T] int64 each.

    Attributes:
        segments: 0 in the prompt of its row, 1, 2, ... in the completions.
        positions: position in its own prompt and completion.
        prompt_lengths: number of tokens of its row's prompt.
        row_starts: index of the first token of its row.
    """

    segments: IntArray
    positions: IntArray
    prompt_lengths: IntArray
    row_starts: IntArray


class _Sequence(NamedTuple):
    """Packed tokens that attend only to each other: a prompt and one completion, or with a mask a complete row.

    Attributes:
        prompt: index of the first token of the prompt.
        length: number of tokens.
        rest: index of the first token after those of the prompt, which need not follow them.
        prompt_length: number of tokens of the prompt.
        masked: the sequence is a complete row.
    """

    prompt: int
    length: int
    rest: int
    prompt_length: int
    masked: bool = False


def _token_indices(sequences: Sequence[_Sequence]) -> IntArray:
    """Return the packed tokens of B sequences, [B, L]; shorter ones than the first repeat their last token."""
    prompt, length, rest, prompt_length, _ = (
        np.array(column)[:, None] for column in zip(*sequences, strict=True)
    )
    index = np.minimum(np.arange(sequences[0].length), length - 1)
    tokens: IntArray = np.where(index < prompt_length, prompt + index, rest + index - prompt_length)
    return tokens


def _group_by_length(sequences: list[_Sequence]) -> list[list[_Sequence]]:
    """Return groups of sequences of similar length, the longest first."""
    groups: list[list[_Sequence]] = []
    for sequence in sorted(sequences, key=lambda sequence: sequence.length, reverse=True):
        if not groups or sequence.length < MIN_FILL_RATIO * groups[-1][0].length:
            groups.append([])
        groups[-1].append(sequence)
    return groups
