"""Packed token batches: rows of tokens for a forward pass, and the layout that attention kernels take.

Rows lie one after another without padding. A row holds one prompt and one or more of its completions. Each completion
attends to the prompt and to itself but not to the other completions, at the positions that it would have without them.
The G completions of a group therefore cost one prompt instead of G; for short answers to longer questions that saves
most of the work. A row with one completion is the ordinary layout.

`Packing` describes which packed tokens attend to which. It gives the layout in two forms: padded blocks for kernels
that take sequences of equal length, and sequences with boundaries for kernels that take sequences of any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from bandpo_cli.types import Group

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


def rows_from_groups(groups: Sequence[Group]) -> list[Row]:
    """Return the groups' completions as rows, in order, with as many completions per prompt as a row may hold."""
    rows = []
    for group in groups:
        completions = [rollout.completion.token_ids for rollout in group.rollouts_G]
        rows += _split_row(Row(group.rollouts_G[0].prompt_ids, completions), MAX_SHARED_ROW_TOKENS)
    return rows


def batch_rows(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Split rows, in order, into lists of at most `max_tokens` tokens.

    A longer row with several completions is split into several rows; a longer row with one completion is a list of
    its own.
    """
    batches: list[list[Row]] = []
    tokens = 0
    for row in (part for long_row in rows for part in _split_row(long_row, max_tokens)):
        tokens += len(row)
        if not batches or tokens > max_tokens:
            batches.append([])
            tokens = len(row)
        batches[-1].append(row)
    return batches


def collate(rows: Sequence[Row], device: torch.device) -> TokenBatch:
    """Return the rows as tensors on `device`, without padding."""
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
            # The prompt's last token predicts a completion's first token; each later token is predicted by the one
            # before it.
            predictor_index.append(last_of_prompt)
            predictor_index.extend(range(len(ids), len(ids) + len(completion) - 1))
            targets.extend(completion)
            ids.extend(completion)
            positions.extend(range(length, length + len(completion)))
    return TokenBatch(
        input_ids=device_tensor([ids], device),
        position_ids=device_tensor([positions], device),
        packing=Packing(tuple((len(row.prompt_ids), *map(len, row.completions)) for row in rows), device),
        predictor_index=device_tensor(predictor_index, device),
        targets=device_tensor(targets, device),
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
    """Return nested lists of numbers as a tensor on `device`.

    The copy to a GPU starts from pinned memory and does not wait for the work queued there.
    """
    tensor = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _split_row(row: Row, max_tokens: int) -> list[Row]:
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
        """Free masks, which are as large as the square of the rows, and lists; they are made again when needed."""
        self.__dict__.pop("_groups", None)
        for block in self.__dict__.get("blocks", ()):
            block.__dict__.pop("_mask_without_window", None)

    @cached_property
    def _groups(self) -> list[list[_Sequence]]:
        """The sequences of each block, before padding."""
        masked: list[_Sequence] = []
        plain: list[_Sequence] = []
        for start, row in self._rows_with_offsets():
            if len(row) > 2 and sum(row) <= MAX_MASKED_ROW_TOKENS:
                positions = [*range(row[0]), *(row[0] + i for length in row[1:] for i in range(length))]
                segments = [segment for segment, length in enumerate(row) for _ in range(length)]
                masked.append(_Sequence(list(range(start, start + sum(row))), positions, segments))
            else:
                plain += [
                    _Sequence(tokens, list(range(len(tokens))), [])
                    for tokens in _sequences_of_row(start, row)
                ]
        return [*_group_by_length(masked), *_group_by_length(plain)]

    @cached_property
    def block_scatter_index(self) -> torch.Tensor:
        """[T] int64: index of each packed token in the concatenation of all flattened blocks."""
        gathered = (_padded([sequence.tokens for sequence in group]) for group in self._groups)
        return self._scatter_index([token for rows in gathered for row in rows for token in row])

    @cached_property
    def gather_index(self) -> torch.Tensor:
        """[E] int64: packed token at each index of the S concatenated sequences."""
        return device_tensor([token for tokens in self._all_sequences() for token in tokens], self.device)

    @cached_property
    def scatter_index(self) -> torch.Tensor:
        """[T] int64: index of each packed token in the S concatenated sequences, one of several for the prompt's."""
        return self._scatter_index([token for tokens in self._all_sequences() for token in tokens])

    @cached_property
    def boundaries(self) -> torch.Tensor:
        """[S + 1] int32: index of the first token of each of the S sequences, followed by E."""
        lengths = accumulate((len(tokens) for tokens in self._all_sequences()), initial=0)
        return device_tensor(list(lengths), self.device, torch.int32)

    @cached_property
    def longest(self) -> int:
        """Number of tokens of the longest prompt with one completion."""
        return max(row[0] + max(row[1:]) for row in self.rows)

    def _rows_with_offsets(self) -> list[tuple[int, tuple[int, ...]]]:
        return list(zip(accumulate(map(sum, self.rows), initial=0), self.rows, strict=False))

    def _all_sequences(self) -> list[list[int]]:
        return [
            tokens for start, row in self._rows_with_offsets() for tokens in _sequences_of_row(start, row)
        ]

    def _scatter_index(self, gather_index: Sequence[int]) -> torch.Tensor:
        """Return for each packed token the first index at which `gather_index` has it."""
        first: dict[int, int] = {}
        for index, token in enumerate(gather_index):
            first.setdefault(token, index)
        return device_tensor([first[token] for token in range(len(first))], self.device)

    def _block(self, sequences: Sequence[_Sequence]) -> Block:
        length = len(sequences[0].tokens)

        def padded(lists: Sequence[list[int]]) -> torch.Tensor:
            return device_tensor(_padded(lists), self.device)

        masked = bool(sequences[0].segments)
        return Block(
            gather_index=padded([sequence.tokens for sequence in sequences]).flatten(),
            shape=(len(sequences), length),
            tokens=sum(len(sequence.tokens) for sequence in sequences),
            segments=padded([sequence.segments for sequence in sequences]) if masked else None,
            positions=padded([sequence.positions for sequence in (sequences if masked else sequences[:1])]),
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


class _Sequence(NamedTuple):
    """Indices of packed tokens that attend only to each other; `segments` is empty for a plain sequence."""

    tokens: list[int]
    positions: list[int]
    segments: list[int]


def _padded(lists: Sequence[list[int]]) -> list[list[int]]:
    """Return the lists with the length of the first one, which is the longest, by repeating their last entries."""
    length = len(lists[0])
    return [values + values[-1:] * (length - len(values)) for values in lists]


def _sequences_of_row(start: int, row: tuple[int, ...]) -> list[list[int]]:
    """Return the packed tokens of each completion of a row, each after those of the prompt."""
    prompt = range(start, start + row[0])
    ends = accumulate(row[1:], initial=start + row[0])
    return [[*prompt, *range(first, last)] for first, last in pairwise(ends)]


def _group_by_length(sequences: list[_Sequence]) -> list[list[_Sequence]]:
    """Return groups of sequences of similar length, the longest first."""
    groups: list[list[_Sequence]] = []
    for sequence in sorted(sequences, key=lambda sequence: len(sequence.tokens), reverse=True):
        if not groups or len(sequence.tokens) < MIN_FILL_RATIO * len(groups[-1][0].tokens):
            groups.append([])
        groups[-1].append(sequence)
    return groups
