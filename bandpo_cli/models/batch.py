"""Rows of tokens for a forward pass, laid one after another without padding, no shared prompt computed twice.

A row holds one prompt and one or more of its completions, each of which attends to the prompt and to itself but not
to its neighbours, at the positions it would have alone. The G completions of a group thus cost one prompt, not G:
for short answers to longer questions that is most of the work. A row of one completion is the ordinary layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bandpo_cli.models.packing import MAX_MASKED, Packing
from bandpo_cli.types import Group

MAX_SHARED_ROW = 4096
"""Most tokens in a row of several completions; in longer ones the prompt is a small part of what is computed."""
MAX_COPIES = 4
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
        predictors: [N] int64, index into the T tokens whose output predicts each completion token.
        targets: [N] int64, the tokens themselves, completion by completion in the order of the rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    packing: Packing
    predictors: torch.Tensor
    targets: torch.Tensor


def group_rows(groups: Sequence[Group]) -> list[Row]:
    """Put as many completions of a group behind one prompt as a row may hold, at least one; the order is kept."""
    rows = []
    for group in groups:
        completions = [rollout.completion.token_ids for rollout in group.rollouts_G]
        rows += _fill_rows(Row(group.rollouts_G[0].prompt_ids, completions), MAX_SHARED_ROW)
    return rows


def split_rows(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Cut rows, in order, into lists of at most `max_tokens` tokens.

    A row of several completions that is longer than that is cut into rows; one of a single completion goes alone.
    """
    batches: list[list[Row]] = []
    tokens = 0
    for row in (piece for whole in rows for piece in _fill_rows(whole, max_tokens)):
        tokens += len(row)
        if not batches or tokens > max_tokens:
            batches.append([])
            tokens = len(row)
        batches[-1].append(row)
    return batches


def _fill_rows(row: Row, max_tokens: int) -> list[Row]:
    """Cut a row where it exceeds `max_tokens`, or where attention would hold too many copies of its prompt."""
    prompt = len(row.prompt_ids)
    rows: list[Row] = []
    held: list[Sequence[int]] = []
    for completion in row.completions:
        answers = sum(map(len, held)) + len(completion)
        tokens, places = prompt + answers, prompt * (len(held) + 1) + answers
        if held and (tokens > max_tokens or (tokens > MAX_MASKED and places > MAX_COPIES * tokens)):
            rows.append(Row(row.prompt_ids, held))
            held = []
        held.append(completion)
    return [*rows, Row(row.prompt_ids, held)]


def collate(rows: Sequence[Row], device: torch.device) -> TokenBatch:
    """Lay out rows as tensors on `device`, without padding."""
    ids: list[int] = []
    positions: list[int] = []
    predictors: list[int] = []
    targets: list[int] = []
    for row in rows:
        length = len(row.prompt_ids)
        last_of_prompt = len(ids) + length - 1
        ids.extend(row.prompt_ids)
        positions.extend(range(length))
        for completion in row.completions:
            # The first token follows the prompt's last one; every other follows its own predecessor.
            predictors.append(last_of_prompt)
            predictors.extend(range(len(ids), len(ids) + len(completion) - 1))
            targets.extend(completion)
            ids.extend(completion)
            positions.extend(range(length, length + len(completion)))
    return TokenBatch(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        packing=Packing(tuple((len(row.prompt_ids), *map(len, row.completions)) for row in rows), device),
        predictors=torch.tensor(predictors, device=device),
        targets=torch.tensor(targets, device=device),
    )
