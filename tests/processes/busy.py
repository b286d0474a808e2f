"""The work of a child process in a test: it starts another process, reports both, and is then always at work."""

import os
import subprocess
from pathlib import Path


def work(path: str) -> None:
    """Write the ids of this process and of one that it has started to `path`, and work."""
    assert "BANDPO_PARENT_PID" not in os.environ
    left = subprocess.Popen(["sleep", "600"])
    Path(f"{path}.part").write_text(f"{os.getpid()} {left.pid}")
    Path(f"{path}.part").rename(path)
    while True:
        pass
