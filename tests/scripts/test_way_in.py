"""The way in: its counts, and its limits in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.way_in import Call, count

ROOT = Path(__file__).parents[2]


def test_calls_are_counted_by_file_and_function():
    calls = [
        Call("a.py", "f", 1),
        Call("b.py", "g", 1),
        Call("b.py", "g", 1),
        Call("b.py", "h", 9),
        Call("a.py", "f", 1),
    ]
    assert count(calls) == {"files": 2, "functions": 3, "changes of file": 2}


@pytest.mark.slow
def test_the_way_in_is_not_longer_than_its_limits():
    done = subprocess.run(
        [sys.executable, "-m", "scripts.way_in", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
