"""The way in: its counts, and its limits in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.way_in import Call, count


def test_calls_are_counted_by_file_and_function():
    order = (("a.py", "f", 1), ("b.py", "g", 1), ("b.py", "g", 1), ("b.py", "h", 9), ("a.py", "f", 1))
    calls = [Call(*place) for place in order]
    assert count(calls) == {"files": 2, "functions": 3, "changes of file": 2}


@pytest.mark.slow
def test_the_way_in_is_not_longer_than_its_limits():
    command = [sys.executable, "-m", "scripts.way_in", "--check"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
