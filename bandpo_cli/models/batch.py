"""Rows of tokens for a forward pass, laid one after another without padding, no shared prompt computed twice.

A row holds one prompt and one or more of its completions, each of which attends to the prompt and to itself but not
to its neighbours, at the positions it would have alone. The G completions of a group thus cost one prompt, not G:
for short answers to longer questions that is most of the work. A row of one completion is the ordinary layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bandpo_cli.models.packing import Packing
from bandpo_cli.types import Group

MAX_SHARING = 4
"""Attention sees a prompt once for each completion behind it: at most this many times the row's own tokens."""


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


def group_rows(groups: Sequence[Group], max_sharing: float = MAX_SHARING) -> list[Row]:
    """Put completions of a group behind one prompt, as many as `max_sharing` allows; the order is kept.

    The more completions share a prompt, the less is computed; but attention gathers keys and values of the prompt
    for each of them, k·(prompt + completion) places for prompt + k·completion tokens, and that takes memory.
    """
    rows = []
    for group in groups:
        prompt_ids = group.rollouts_G[0].prompt_ids
        held: list[Sequence[int]] = []
        for rollout in group.rollouts_G:
            row = Row(prompt_ids, [*held, rollout.completion.token_ids])
            if held and _places(row) > max_sharing * len(row):
                rows.append(Row(prompt_ids, held))
                held = []
            held.append(rollout.completion.token_ids)
        rows.append(Row(prompt_ids, held))
    return rows


def split_rows(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Cut rows, in order, into lists of at most `max_tokens` tokens; a longer row goes alone."""
    batches: list[list[Row]] = []
    tokens = 0
    for row in rows:
        tokens += len(row)
        if not batches or tokens > max_tokens:
            batches.append([])
            tokens = len(row)
        batches[-1].append(row)
    return batches


def collate(rows: Sequence[Row], pad_id: int, device: torch.device) -> TokenBatch:
    """Lay out rows as tensors on `device`. There is no padding, so `pad_id` is of no use here."""
    del pad_id
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


def _places(row: Row) -> int:
    """How many tokens attention gathers for a row."""
    return sum(len(row.prompt_ids) + len(completion) for completion in row.completions)
