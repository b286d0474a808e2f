"""The ranks of an evaluation: their connection, and what rank 0 and the others exchange.

Rank 0 stores and scores the completions. The others sample and grade their share of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from bandpo_cli.config.run import ModelConfig
from bandpo_cli.experiments.eval_source import CompletionSource
from bandpo_cli.ranks import Ranks, connected, ranks_from_environment
from bandpo_cli.storage.eval_folder import PartKey

T = TypeVar("T")


@contextmanager
def connected_ranks(model: ModelConfig) -> Iterator[Ranks]:
    """Connect this process with the other ranks that torchrun has started for the duration of the block.

    Without torchrun there is one rank, nothing is connected, and torch is not imported.
    """
    ranks = ranks_from_environment()
    if ranks.size == 1:
        yield ranks
        return
    from bandpo_cli.models.device import is_on_cuda

    with connected(ranks, "cuda" if is_on_cuda(model) else "cpu"):
        yield ranks


def sample_share(source: CompletionSource, stored: set[PartKey]) -> None:
    """Sample and grade the share of a rank other than 0, which stores nothing.

    Args:
        stored: keys of the batches that rank 0 has stored.
    """
    for _ in source.batches(stored):
        pass


def result_of_main(result: T | None, ranks: Ranks) -> T:
    """Return the result of rank 0, which is None elsewhere, on every rank."""
    found = ranks.gather(result)[0]
    assert found is not None
    return found
