"""Commands in the process of the tests compute with one thread: more of them wait for each other in small models."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def every_command_with_one_thread(one_thread: None) -> None:
    """Set torch to one thread in all modules."""
