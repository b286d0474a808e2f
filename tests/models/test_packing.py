"""Rows are cut and grouped in order, within their budgets, and packing finds every token again."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.models import packing
from bandpo_cli.models.packing import (
    MAX_PROMPT_COPIES,
    MAX_SHARED_ROW_TOKENS,
    Packing,
    Row,
    batch_rows,
    collate,
    rows_from_groups,
)
from bandpo_cli.types import Completion, Grade, Group, Problem, Rollout

CPU = torch.device("cpu")
PROBLEM = Problem("1", "1+1", "2", "test", "integer")
LENGTHS = st.lists(st.integers(1, 9), min_size=2, max_size=6).map(tuple)


def group(prompt: int, completions: list[int]) -> Group:
    """Token ids count on, so that each completion is told from the others."""
    ids = itertools.count()
    prompt_ids = tuple(next(ids) for _ in range(prompt))
    return Group(
        PROBLEM,
        tuple(
            Rollout(
                PROBLEM, "", prompt_ids, Completion(tuple(next(ids) for _ in range(n)), (0.0,) * n, "stop", 0), "",
                Grade(0.0, False, "wrong"),
            )
            for n in completions
        ),
    )  # fmt: skip


def test_splitting_keeps_order_and_counts_tokens() -> None:
    rows = [Row([0] * n, [[1] * m]) for n, m in [(3, 2), (1, 1), (9, 9), (2, 2), (2, 1), (2, 1)]]
    parts = batch_rows(rows, max_tokens=10)
    assert [row for part in parts for row in part] == rows
    assert [len(part) for part in parts] == [2, 1, 3]
    assert [sum(map(len, part)) for part in parts] == [7, 18, 10]


def test_splitting_cuts_rows_that_do_not_fit() -> None:
    """A group of long completions behind one prompt must not undo the budget."""
    long = Row([0, 1], [[2, 3, 4], [5, 6, 7], [8], [9] * 20])
    parts = batch_rows([Row([0], [[1]]), long], max_tokens=10)
    assert [row for part in parts for row in part] == [
        Row([0], [[1]]), Row([0, 1], [[2, 3, 4], [5, 6, 7], [8]]), Row([0, 1], [[9] * 20])
    ]  # fmt: skip
    assert [len(part) for part in parts] == [1, 1, 1]


@pytest.mark.parametrize(
    ("prompt", "completions", "expected"),
    [
        (12, [8] * 16, [16]),  # short answers: one row of 140 tokens
        (300, [10] * 16, [16]),  # 460 tokens, few enough for a mask
        (
            1000,
            [100] * 16,
            [5, 5, 5, 1],
        ),  # 5·1100 places for 1500 tokens; 6·1100 for 1600 would be more than 4 times
        (100, [4000, 3000, 900, 96, 1], [1, 3, 1]),  # at most 4096 tokens
        (100, [8000, 8000], [1, 1]),
    ],
)
def test_a_prompt_is_shared_as_far_as_memory_allows(
    prompt: int, completions: list[int], expected: list[int]
) -> None:
    rows = rows_from_groups([group(prompt, completions), group(3, [2, 2])])
    assert [len(row.completions) for row in rows] == [*expected, 2]
    flat = [token for row in rows[:-1] for completion in row.completions for token in completion]
    assert flat == list(range(prompt, prompt + sum(completions)))
    for row in rows:
        assert len(row.completions) == 1 or len(row) <= MAX_SHARED_ROW_TOKENS
        places = sum(len(row.prompt_ids) + len(completion) for completion in row.completions)
        assert len(row.completions) == 1 or len(row) <= 512 or places <= MAX_PROMPT_COPIES * len(row)


@given(rows=st.lists(LENGTHS, min_size=1, max_size=8), limit=st.sampled_from([0, 12, 512]))
def test_every_token_is_found_again_and_sees_what_it_should(rows: list[tuple[int, ...]], limit: int) -> None:
    """What the blocks let a token see is compared with who shares its row, token by token."""
    row_of, segment_of, position_of = [], [], []
    for index, lengths in enumerate(rows):
        for segment, length in enumerate(lengths):
            row_of += [index] * length
            segment_of += [segment] * length
            position_of += range(length) if segment == 0 else range(lengths[0], lengths[0] + length)
    tokens = len(row_of)
    before, packing.MAX_MASKED_ROW_TOKENS = packing.MAX_MASKED_ROW_TOKENS, limit
    try:
        packed = Packing(tuple(rows), CPU)
        blocks = packed.blocks
    finally:
        packing.MAX_MASKED_ROW_TOKENS = before
    assert torch.equal(packed.gather_index[packed.scatter_index], torch.arange(tokens))
    assert torch.equal(
        torch.cat([block.gather_index for block in blocks])[packed.block_scatter_index], torch.arange(tokens)
    )
    assert packed.boundaries.diff().sum() == len(packed.gather_index)
    assert packed.longest == packed.boundaries.diff().max()

    kept = packed.block_scatter_index.tolist()
    first = 0
    for block in blocks:
        count, length = block.shape
        assert len(block.gather_index) == count * length
        for window in (None, 3):
            mask = block.mask(window)
            sees = torch.ones(length, length, dtype=torch.bool).tril()[None] if mask is None else mask[:, 0]
            sees = sees.expand(count, length, length)
            for token, place in enumerate(kept):
                if not first <= place < first + len(block.gather_index):
                    continue
                sequence, column = divmod(place - first, length)
                seen = sorted(
                    block.gather_index.view(count, length)[sequence][sees[sequence, column]].tolist()
                )
                expected = [
                    other
                    for other in range(token + 1)
                    if row_of[other] == row_of[token]
                    and segment_of[other] in (0, segment_of[token])
                    and (window is None or position_of[token] - position_of[other] < window)
                ]
                assert seen == expected
        first += len(block.gather_index)


def test_nothing_outside_attention_is_padded() -> None:
    rows = [Row([1, 2, 3], [[4, 5], [6]]), Row([7], [[8, 9, 10]])]
    batch = collate(rows, CPU)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2, 3]]
    assert batch.predictor_index.tolist() == [2, 3, 2, 6, 7, 8]
    assert batch.targets.tolist() == [4, 5, 6, 8, 9, 10]
