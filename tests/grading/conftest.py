"""One grader pool for all tests of graders: the import of sympy or of reasoning-gym takes seconds."""

import pytest

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.grading.pool import GraderPool


@pytest.fixture(scope="session")
def pool():
    with GraderPool(GradingConfig(workers=1, deadline=60)) as pool:
        yield pool
