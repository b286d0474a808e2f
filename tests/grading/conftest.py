"""A grader pool that is shared by the tests of a module and closed after them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.grading.pool import GraderPool


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    with GraderPool(GradingConfig(workers=2, deadline=60)) as pool:
        yield pool
