"""Pools whose workers start once for a module's tests, and are gone after them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.grading import GraderPool


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    with GraderPool(GradingConfig(workers=2, deadline=30)) as pool:
        yield pool
