"""`bandpo sync` of a run with more steps than one call sends: each step is sent once, and all are counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bandpo_cli.config.layers import to_yaml
from bandpo_cli.config.run import RunConfig
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tracking import sync
from bandpo_cli.tracking.mirror import MetricRecord, Sent
from bandpo_cli.tracking.store import Store
from bandpo_cli.tracking.sync import RECORDS_PER_CALL, sync_run

STEPS = 2 * RECORDS_PER_CALL + 20


class Mirror:
    """Stand-in for a run at MLflow that has every third step, and every fifth of these with another value."""

    status = "RUNNING"

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def send(self, records: Sequence[MetricRecord]) -> Sent:
        steps = [record.step for record in records]
        self.calls.append(steps)
        there = [step for step in steps if step % 3 == 0]
        return Sent(len(steps) - len(there), len(there), sum(step % 5 == 0 for step in there))

    def send_tags(self, tags: dict[str, str]) -> int:
        return 0

    def send_params(self, params: dict[str, str]) -> int:
        return 0

    def send_file(self, folder: Path, file: Path) -> None: ...

    def files(self, under: Sequence[str]) -> dict[str, int]:
        return {}

    def close(self, status: str, end_ms: int) -> None:
        self.status = status


def test_each_step_is_sent_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path, "long")
    folder.write_config(to_yaml(RunConfig()))
    for step in range(STEPS):
        folder.append_metrics({"step": step, "train/reward": 0.5, "time/step": 1.0})
    mirror = Mirror()
    monkeypatch.setattr(sync.MlflowMirror, "connect", lambda *_: mirror)
    synced = sync_run(Store("http://stand-in", "bandpo", None), folder.path)
    assert [step for call in mirror.calls for step in call] == list(range(STEPS))
    assert max(map(len, mirror.calls)) <= RECORDS_PER_CALL
    assert synced.metrics == Sent(80, 40, 8)  # of 0 … 119, 40 are multiples of 3 and 8 of 15
    assert (synced.files, synced.files_there) == (2, 0)  # config.yaml and metrics.jsonl
