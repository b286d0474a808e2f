"""Rows are split and batched in order and within their limits; packing maps every token to its place and back."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.models import packing
from bandpo_cli.models.packing import Packing, Row, batch_rows, shared_rows

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 9), min_size=2, max_size=6).map(tuple)


def test_batches_keep_the_order_and_the_token_limit():
    rows = [Row([0] * n, [[1] * m]) for n, m in [(3, 2), (1, 1), (9, 9), (2, 2), (2, 1), (2, 1)]]
    batches = batch_rows(rows, max_tokens=10)
    assert [row for batch in batches for row in batch] == rows
    assert [[len(row) for row in batch] for batch in batches] == [[5, 2], [18], [4, 3, 3]]
    # A row with many long completions does not exceed the limit of a batch.
    long = Row([0, 1], [[2, 3, 4], [5, 6, 7], [8], [9] * 20])
    parts = [[Row([0], [[1]])], [Row([0, 1], [[2, 3, 4], [5, 6, 7], [8]])], [Row([0, 1], [[9] * 20])]]
    assert batch_rows([Row([0], [[1]]), long], max_tokens=10) == parts


@pytest.mark.parametrize(
    ("prompt", "completions", "expected"),
    [
        (12, [8] * 16, [16]),  # short answers: one row of 140 tokens
        (300, [10] * 16, [16]),  # 460 tokens, which a mask covers
        # 5·1100 tokens with copies for 1500 tokens; 6·1100 for 1600 would be more than 4 times as many
        (1000, [100] * 16, [5, 5, 5, 1]),
        (100, [4000, 3000, 900, 96, 1], [1, 3, 1]),  # at most 4096 tokens
        (100, [8000, 8000], [1, 1]),
    ],
)
def test_prompt_is_shared_within_limits(prompt, completions, expected):
    ids = itertools.count()  # of consecutive tokens, so that all completions differ
    prompt_ids, *answers = ([*itertools.islice(ids, length)] for length in (prompt, *completions))
    others = [[0, 0], [1, 1], [2, 2]]
    chosen = [[True] * len(answers), [True, False, True]]
    rows = shared_rows([prompt_ids, [7, 8, 9]], [answers, others], chosen)
    assert rows[-1] == Row([7, 8, 9], [[0, 0], [2, 2]])
    assert [len(row.completions) for row in rows] == [*expected, 2]
    flat = [token for row in rows[:-1] for completion in row.completions for token in completion]
    assert flat == list(range(prompt, prompt + sum(completions)))
    for row in rows:
        assert len(row.completions) == 1 or len(row) <= packing.MAX_SHARED_ROW_TOKENS
        with_copies = sum(len(row.prompt_ids) + len(completion) for completion in row.completions)
        assert len(row.completions) == 1 or len(row) <= 512 or with_copies <= 4 * len(row)


@given(rows=st.lists(LENGTHS, min_size=1, max_size=8), limit=st.sampled_from([0, 12, 512]))
def test_scatter_inverts_gather_and_masks_are_correct(rows, limit):
    """The tokens that a token attends to in its block are compared, one by one, with those of its row."""
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
    gathered = torch.cat([block.gather_index for block in blocks])
    assert torch.equal(gathered[packed.block_scatter_index], torch.arange(tokens))
    assert packed.boundaries.diff().sum() == len(packed.gather_index)
    assert packed.longest == packed.boundaries.diff().max()

    index_of_token = packed.block_scatter_index.tolist()
    first = 0
    for block in blocks:
        count, length = block.shape
        assert len(block.gather_index) == count * length
        for window in (None, 3):
            mask = block.mask if window is None else block.windowed_mask(window)
            allowed = torch.ones(1, length, length, dtype=torch.bool).tril() if mask is None else mask[:, 0]
            allowed = allowed.expand(count, length, length)
            tokens_of_block = block.gather_index.view(count, length)
            for token, index in enumerate(index_of_token):
                if not first <= index < first + len(block.gather_index):
                    continue
                sequence, column = divmod(index - first, length)
                attended = sorted(tokens_of_block[sequence][allowed[sequence, column]].tolist())
                expected = [
                    other
                    for other in range(token + 1)
                    if row_of[other] == row_of[token]
                    and segment_of[other] in (0, segment_of[token])
                    and (window is None or position_of[token] - position_of[other] < window)
                ]
                assert attended == expected
        first += len(block.gather_index)


def test_dropped_masks_are_made_again():
    layout = Packing(((3, 2, 4), (2, 1, 1)), CPU)
    before = [block.mask for block in layout.blocks]
    assert all(mask is not None for mask in before)
    layout.drop_masks()
    assert not any("mask" in vars(block) for block in layout.blocks)
    after = [block.mask for block in layout.blocks]
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))


def test_copies_to_a_gpu_start_from_pinned_memory_and_do_not_wait(monkeypatch):
    """Pinned memory and a GPU are stand-ins: both need CUDA."""
    calls: list[str] = []

    def to(tensor: torch.Tensor, device: torch.device, **options: bool) -> torch.Tensor:
        calls.append(f"to {device.type}, {options}")
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: (calls.append("pin"), tensor)[1])
    monkeypatch.setattr(torch.Tensor, "to", to)
    assert packing.device_tensor([[1, 2]], torch.device("cuda")).tolist() == [[1, 2]]
    assert calls == ["pin", "to cuda, {'non_blocking': True}"]
