"""MLflow servers for tests: a real one that is killed, stopped and restarted, and a port that never answers."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

Triple = tuple[str, int, float]


class MlflowServer:
    """`mlflow server` on a free port, with its SQLite file and artifacts in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, unless it runs, and wait until it answers."""
        if self._process is not None:
            return
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--artifacts-destination", str(self.folder / "files")]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )
        for _ in range(1200):
            assert self._process.poll() is None, (self.folder / "server.log").read_text()
            if self.answers():
                return
            time.sleep(0.1)
        raise AssertionError("the server did not start within two minutes")

    def send(self, number: int) -> None:
        """Send a signal to the server and its workers."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the server by SIGTERM or SIGKILL, and wait for its end."""
        if self._process is not None:
            self.send(number)
            self.send(signal.SIGCONT)  # a stopped process handles SIGTERM only after this
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                # On a busy machine the server's job runner can hang in its shutdown.
                self.send(signal.SIGKILL)
                self._process.wait(60)
            self._process = None

    def answers(self) -> bool:
        """Return whether the server answers within a second."""
        try:
            urlopen(f"{self.uri}/health", timeout=1.0).close()
        except (OSError, HTTPException):
            return False
        return True

    def metrics(self, run: str) -> Counter[Triple]:
        """Return the run's metrics in the database as (key, step, value), whether or not the server runs."""
        query = (
            "SELECT key, step, value FROM metrics JOIN runs USING (run_uuid) WHERE name = ? AND NOT is_nan"
        )
        return Counter(self._query(query, run))

    def statuses(self, run: str) -> list[str]:
        """Return the status of each run of that name."""
        return [status for (status,) in self._query("SELECT status FROM runs WHERE name = ?", run)]

    def _query(self, query: str, run: str) -> list[tuple[Any, ...]]:
        with closing(
            sqlite3.connect(f"file:{self.folder}/server.db?mode=ro", uri=True, timeout=30)
        ) as database:
            return list(database.execute(query, (run,)))


def silent_port() -> socket.socket:
    """Return a socket that accepts connections and never answers; its port is `getsockname()[1]`."""
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen(64)
    return silent
