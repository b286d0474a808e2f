"""Rows of tokens for a forward pass, without computing a shared prompt twice.

A row holds one prompt and one or more of its completions, each of which attends to the prompt and to itself but not
to its neighbours, at the positions it would have alone. The G completions of a group thus cost one prompt, not G:
for short answers to longer questions that is most of the work. A row of one completion is the ordinary layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bandpo_cli.types import Group

PROMPT = 0
"""Segment of the prompt's tokens; completions are segments 1, 2, ...; padding is −1."""

MAX_SHARED_ROW = 512
"""Most tokens in a row of several completions: the attention mask is dense, so its cost grows with the square."""


@dataclass(frozen=True)
class Row:
    """One prompt with one or more completions of it, as token ids."""

    prompt_ids: Sequence[int]
    completions: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.prompt_ids) + sum(len(completion) for completion in self.completions)


@dataclass(frozen=True)
class TokenBatch:
    """R rows padded to L tokens, holding N completion tokens of S completions.

    Attributes:
        input_ids, position_ids: [R, L] int64.
        attend: [R, 1, L, L] bool, True where a token (third axis) may look at another (fourth).
        predictors: [N] int64, index into the flattened [R·L] positions whose output predicts each token.
        targets: [N] int64, the tokens themselves, completion by completion in the order of the rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attend: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor


def group_rows(groups: Sequence[Group], max_row: int = MAX_SHARED_ROW) -> list[Row]:
    """Put as many completions of a group behind one prompt as fit in `max_row` tokens, at least one."""
    rows = []
    for group in groups:
        prompt_ids = group.rollouts_G[0].prompt_ids
        held: list[Sequence[int]] = []
        for rollout in group.rollouts_G:
            ids = rollout.completion.token_ids
            if held and len(prompt_ids) + sum(map(len, held)) + len(ids) > max_row:
                rows.append(Row(prompt_ids, held))
                held = []
            held.append(ids)
        rows.append(Row(prompt_ids, held))
    return rows


def split_rows(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Cut rows, in order, into lists whose padded size stays within `max_tokens`; a longer row goes alone."""
    batches: list[list[Row]] = []
    longest = 0
    for row in rows:
        longest = max(longest, len(row))
        if not batches or longest * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
            longest = len(row)
        batches[-1].append(row)
    return batches


def collate(rows: Sequence[Row], pad_id: int, device: torch.device) -> TokenBatch:
    """Lay out rows as tensors on `device`."""
    width = max(len(row) for row in rows)
    ids: list[list[int]] = []
    positions: list[list[int]] = []
    segments: list[list[int]] = []
    predictors: list[int] = []
    targets: list[int] = []
    for index, row in enumerate(rows):
        prompt = len(row.prompt_ids)
        row_ids, row_positions, row_segments = list(row.prompt_ids), list(range(prompt)), [PROMPT] * prompt
        for segment, completion in enumerate(row.completions, start=1):
            start = index * width + len(row_ids)
            # The first token follows the prompt's last one; every other follows its own predecessor.
            predictors.append(index * width + prompt - 1)
            predictors.extend(range(start, start + len(completion) - 1))
            targets.extend(completion)
            row_ids.extend(completion)
            row_positions.extend(range(prompt, prompt + len(completion)))
            row_segments.extend([segment] * len(completion))
        padding = width - len(row_ids)
        ids.append(row_ids + [pad_id] * padding)
        positions.append(row_positions + [0] * padding)
        segments.append(row_segments + [-1] * padding)
    return TokenBatch(
        input_ids=torch.tensor(ids, device=device),
        position_ids=torch.tensor(positions, device=device),
        attend=_attention(torch.tensor(segments, device=device)),
        predictors=torch.tensor(predictors, device=device),
        targets=torch.tensor(targets, device=device),
    )


def _attention(segments_RL: torch.Tensor) -> torch.Tensor:
    """Return [R, 1, L, L]: earlier tokens of the same segment, and the prompt. Padding sees itself: no empty row."""
    length = segments_RL.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments_RL.device).tril()
    looking, looked_at = segments_RL[:, :, None], segments_RL[:, None, :]
    return (causal & ((looking == looked_at) | (looked_at == PROMPT)))[:, None]
