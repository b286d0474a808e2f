"""Packed token batches: rows of tokens that lie one after another without padding, and the layout for attention.

A row holds one prompt and one or more of its completions. Each completion attends to the prompt and to itself but not
to the other completions, at the positions that it would have without them. The G completions of a group therefore cost
one prompt instead of G. `Packing` gives the layout in two forms: padded blocks for kernels that take sequences of equal
length, and sequences with boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]

MAX_SHARED_ROW_TOKENS = 4096
"""Maximum tokens in a row with several completions; in longer rows the prompt is a small part of the computation."""
MAX_MASKED_ROW_TOKENS = 512
"""The same for attention with a mask, whose cost grows with the square of the length. In longer rows the kernel gets
each completion as a separate sequence, after its own copy of the prompt."""
MAX_PROMPT_COPIES = 4
"""A longer row ends where these copies bring it to more than this many times its own tokens."""
MIN_FILL_RATIO = 0.75
"""Sequences share a padded kernel call if each has at least this fraction of the longest one's length."""
PROMPT = 0
"""Segment number of a row's prompt; its completions are segments 1, 2, ..."""
BALANCED = 1.01
"""Completions are moved between ranks until the rank with the most tokens has at most this many times the mean."""


@dataclass(frozen=True)
class Row:
    """One prompt with one or more of its completions, as token ids; inserted ones as in `Completion.marked_ids`."""

    prompt_ids: Sequence[int]
    completions: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.prompt_ids) + sum(len(completion) for completion in self.completions)


@dataclass(frozen=True)
class TokenBatch:
    """T packed tokens, of which N are sampled tokens of completions; all tensors are int64."""

    input_ids: Tensor  # [1, T], row after row, each the prompt followed by its completions
    position_ids: Tensor  # [1, T], position of each token in its own prompt and completion
    packing: Packing
    predictor_index: Tensor  # [N], index into the T tokens of the one that predicts each sampled token
    targets: Tensor  # [N], the sampled tokens, completion by completion in the order of the rows


def balanced_owners(
    prompts_P: Sequence[int], completions_PG: Sequence[Sequence[int]], size: int
) -> list[list[int]]:
    """Distribute completions over ranks so that all ranks have about the same number of tokens.

    A rank holds a prompt once for all of its completions, so that a group on two ranks costs a second copy of its
    prompt. Groups go to the ranks as a whole, those of the most tokens first; then completions move, one by one, from
    the rank with the most tokens to the one with the fewest.

    Returns the rank of each completion [P][G] of `size` ranks, from the tokens of prompts and completions.
    """
    costs_P = [prompt + sum(lengths) for prompt, lengths in zip(prompts_P, completions_PG, strict=True)]
    loads = [0] * size
    owners_PG: list[list[int]] = [[]] * len(costs_P)
    for group in sorted(range(len(costs_P)), key=costs_P.__getitem__, reverse=True):
        rank = loads.index(min(loads))
        owners_PG[group] = [rank] * len(completions_PG[group])
        loads[rank] += costs_P[group]

    def loads_after(group: int, index: int, donor: int, receiver: int) -> tuple[int, int]:
        length, owners = completions_PG[group][index], owners_PG[group]
        taken = length + (prompts_P[group] if owners.count(donor) == 1 else 0)
        given = length + (0 if receiver in owners else prompts_P[group])
        return loads[donor] - taken, loads[receiver] + given

    while max(loads) * size > BALANCED * sum(loads):
        donor, receiver = loads.index(max(loads)), loads.index(min(loads))
        moves = [
            (max(loads_after(group, index, donor, receiver)), group, index)
            for group, owners in enumerate(owners_PG)
            for index, owner in enumerate(owners)
            if owner == donor
        ]
        most, group, index = min(moves)
        if most >= loads[donor]:
            break
        loads[donor], loads[receiver] = loads_after(group, index, donor, receiver)
        owners_PG[group][index] = receiver
    return owners_PG


def shared_rows(
    prompts_P: Sequence[Sequence[int]],
    completions_PG: Sequence[Sequence[Sequence[int]]],
    chosen_PG: Sequence[Sequence[bool]],
) -> list[Row]:
    """Return the chosen completions of prompts as rows, with as many of a prompt as one may hold."""
    rows = []
    for prompt, completions_G, chosen_G in zip(prompts_P, completions_PG, chosen_PG, strict=True):
        if chosen := [*compress(completions_G, chosen_G)]:
            rows += split_row(Row(prompt, chosen), MAX_SHARED_ROW_TOKENS)
    return rows


def batch_rows(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Split rows, in order, into lists of at most `max_tokens` tokens; a longer row with one completion is a list."""
    batches: list[list[Row]] = []
    for row in (part for long_row in rows for part in split_row(long_row, max_tokens)):
        if batches and sum(map(len, batches[-1])) + len(row) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def collate(rows: Sequence[Row], device: torch.device) -> TokenBatch:
    """Return the rows as tensors on `device`, without padding."""
    packing = Packing(tuple((len(row.prompt_ids), *map(len, row.completions)) for row in rows), device)
    parts = [ids for row in rows for ids in (row.prompt_ids, *row.completions)]
    marked = np.concatenate([np.asarray(part, np.int64) for part in parts])
    ids = np.where(marked < 0, ~marked, marked)
    # The prompt's last token predicts a completion's first token; each later token is predicted by the one before it.
    predictors = np.arange(-1, len(ids) - 1)
    start, length, row_start, prompt, number = packing.segments.T
    has_first = (number != PROMPT) & (length > 0)
    predictors[start[has_first]] = (row_start + prompt - 1)[has_first]
    token_segments, positions = packing.token_layout
    is_sampled = (token_segments != PROMPT) & (marked >= 0)
    tokens = device_tensor(ids[None], device), device_tensor(positions[None], device)
    sampled = device_tensor(predictors[is_sampled], device), device_tensor(ids[is_sampled], device)
    return TokenBatch(*tokens, packing, *sampled)


def empty_batch(pad_id: int, device: torch.device) -> TokenBatch:
    """Return a batch of one prompt token without a completion: a pass over it predicts nothing."""
    return collate([Row([pad_id], [()])], device)


def device_tensor(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return an array, or nested lists of numbers, as a tensor on `device`, which may share the memory of the array."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # does not wait for the work queued on the GPU


def host_copy(tensor: Tensor) -> Tensor:
    """Return a tensor in memory of the host; a copy from a GPU is complete after the next `torch.cuda.synchronize`."""
    return tensor.to("cpu", non_blocking=True)


def split_row(row: Row, max_tokens: int) -> list[Row]:
    """Split a row where it exceeds `max_tokens` or where attention would hold too many copies of its prompt."""
    rows = [Row(row.prompt_ids, row.completions[:1])]
    for completion in row.completions[1:]:
        longer = Row(row.prompt_ids, [*rows[-1].completions, completion])
        tokens, copied = len(longer), len(row.prompt_ids) * len(rows[-1].completions)
        too_many_copies = tokens > MAX_MASKED_ROW_TOKENS and tokens + copied > MAX_PROMPT_COPIES * tokens
        if tokens > max_tokens or too_many_copies:
            rows.append(Row(row.prompt_ids, [completion]))
        else:
            rows[-1] = longer
    return rows


@dataclass(frozen=True)
class Packing:
    """Attention layout of R rows that lie one after another without padding, T tokens in total.

    With a copy of the prompt before every completion, the rows are S sequences of E tokens in total. `rows` has per row
    the number of tokens of its prompt, followed by those of each completion.
    """

    rows: tuple[tuple[int, ...], ...]
    device: torch.device

    @cached_property
    def segments(self) -> IntArray:
        """All prompts and completions in order, [segments, 5].

        The columns are the first token, the number of tokens, the first token of the row, the number of tokens of its
        prompt, and the number of the segment in the row: `PROMPT`, or 1, 2, ... for completions.
        """
        counts = [len(row) for row in self.rows]
        lengths = np.concatenate(self.rows)
        number = np.concatenate([np.arange(count) for count in counts])
        start = lengths.cumsum() - lengths
        row_start, prompt = (np.repeat(column[number == PROMPT], counts) for column in (start, lengths))
        return np.stack([start, lengths, row_start, prompt, number], axis=1)

    @cached_property
    def token_layout(self) -> tuple[IntArray, IntArray]:
        """The number of the segment of each token, and its position in its own prompt and completion, [T] each."""
        start, lengths, _, prompt, number = self.segments.T
        first_position = np.where(number == PROMPT, 0, prompt)
        positions = np.arange(lengths.sum()) - np.repeat(start - first_position, lengths)
        return np.repeat(number, lengths), positions

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The rows in padded blocks, those with a mask first."""
        blocks, device = [], self.device
        token_segments, token_positions = self.token_layout
        for group in self._groups:
            tokens, masked = _token_indices(group), group[0, 1] == 0
            index, shape = device_tensor(tokens.ravel(), device), (len(tokens), tokens.shape[1])
            segments = device_tensor(token_segments[tokens], device) if masked else None
            positions = device_tensor(token_positions[tokens if masked else tokens[:1]], device)
            blocks.append(Block(index, shape, int(group[:, 3].sum()), segments, positions))
        return tuple(blocks)

    def drop_masks(self) -> None:
        """Free masks, which are as large as the square of the rows; they are made again when needed."""
        for block in self.__dict__.get("blocks", ()):
            block.__dict__.pop("mask", None)

    @cached_property
    def block_scatter_index(self) -> Tensor:
        """[T] int64: index of each packed token in the concatenation of all flattened blocks."""
        return self._scatter_index(np.concatenate([_token_indices(group).ravel() for group in self._groups]))

    @cached_property
    def gather_index(self) -> Tensor:
        """[E] int64: packed token at each index of the S concatenated sequences."""
        return device_tensor(self._sequence_tokens, self.device)

    @cached_property
    def scatter_index(self) -> Tensor:
        """[T] int64: index of each packed token in the S concatenated sequences, one of several for the prompt's."""
        return self._scatter_index(self._sequence_tokens)

    @cached_property
    def boundaries(self) -> Tensor:
        """[S + 1] int32: index of the first token of each of the S sequences, followed by E."""
        return device_tensor([0, *self._sequences[:, 3].cumsum()], self.device, torch.int32)

    @cached_property
    def longest(self) -> int:
        """Number of tokens of the longest prompt with one completion."""
        return int(self._sequences[:, 3].max())

    @cached_property
    def _sequences(self) -> IntArray:
        """[S, 4]: first token of the prompt, its length, first token of the completion, length of both."""
        start, lengths, row_start, prompt, number = self.segments.T
        sequences = np.stack([row_start, prompt, start, prompt + lengths], axis=1)
        return cast(IntArray, sequences[number != PROMPT])

    @cached_property
    def _groups(self) -> list[IntArray]:
        """The sequences of each block, [B, 4]: complete rows with a mask, without a prompt, then single completions."""
        totals = np.array([sum(row) for row in self.rows])
        completions = np.array([len(row) - 1 for row in self.rows])
        masked = (completions > 1) & (totals <= MAX_MASKED_ROW_TOKENS)
        starts, nothing = totals.cumsum() - totals, np.zeros_like(totals)
        rows = np.stack([starts, nothing, starts, totals], axis=1)[masked]
        separate = self._sequences[np.repeat(~masked, completions)]
        return [*_group_by_length(rows), *_group_by_length(separate)]

    @property
    def _sequence_tokens(self) -> IntArray:
        return np.concatenate([_token_indices(sequence[None])[0] for sequence in self._sequences])

    def _scatter_index(self, gathered: IntArray) -> Tensor:
        """Return for each packed token the first index at which `gathered` has it."""
        first = np.empty(sum(map(sum, self.rows)), np.int64)
        # Of repeated indices, NumPy keeps the last assignment.
        first[gathered[::-1]] = np.arange(len(gathered))[::-1]
        return device_tensor(first, self.device)


@dataclass(frozen=True)
class Block:
    """B sequences of similar length, padded on the right to L tokens, for one kernel call; the tensors are int64."""

    gather_index: Tensor  # [B·L], packed token at each index; padding repeats a sequence's last token
    shape: tuple[int, int]  # (B, L)
    tokens: int  # number of the B·L positions that are not padding
    segments: Tensor | None  # [B, L], of rows with several completions; others need no mask: padding is last
    positions: Tensor  # [B, L], position of each token; [1, L] if all sequences have the same positions

    @cached_property
    def mask(self) -> Tensor | None:
        """[B, 1, L, L] bool, True where a query may attend to a key; None for plain causal attention."""
        if self.segments is None:
            return None
        query_segments, key_segments = self.segments[:, None, :, None], self.segments[:, None, None, :]
        same = (query_segments == key_segments) | (key_segments == PROMPT)
        return causal_mask(self.shape[1], self.gather_index.device) & same

    def windowed_mask(self, window: int) -> Tensor | None:
        """Return the mask of a layer in which a token attends to `window` tokens, itself included."""
        if window >= self.shape[1]:
            return self.mask
        mask = causal_mask(self.shape[1], self.gather_index.device) if self.mask is None else self.mask
        positions = self.positions[:, None]
        return mask & (positions[..., :, None] - positions[..., None, :] < window)


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Return [1, 1, L, L] bool, True where the key is the query's own token or one before it."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()


def _token_indices(sequences: IntArray) -> IntArray:
    """Return the packed tokens of B sequences, [B, L]; shorter ones than the first repeat their last token."""
    first, prompt, rest, length = (column[:, None] for column in sequences.T)
    index = np.minimum(np.arange(sequences[0, 3]), length - 1)
    return cast(IntArray, np.where(index < prompt, first + index, rest + index - prompt))


def _group_by_length(sequences: IntArray) -> list[IntArray]:
    """Return groups of sequences of similar length, the longest first."""
    ordered = sequences[np.argsort(-sequences[:, 3], kind="stable")]
    begins: list[int] = []
    for index, length in enumerate(ordered[:, 3].tolist()):
        if not begins or length < MIN_FILL_RATIO * ordered[begins[-1], 3]:
            begins.append(index)
    return np.split(ordered, begins[1:]) if begins else []
