"""What a run folder has and its MLflow run has not, sent later. The folder alone is read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.storage.run_folder import run_artifacts
from bandpo_cli.tracking.link import digest, find_link, read_links, record_sent_files, send_lock
from bandpo_cli.tracking.mirror import MetricRecord, MlflowMirror, Sent
from bandpo_cli.tracking.names import flat_params, run_tags
from bandpo_cli.tracking.run_record import StoredRun, read_stored_run
from bandpo_cli.tracking.store import Store, sqlite_path, tracking_store

RECORDS_PER_CALL = 50
"""Steps that are made ready to be sent at a time: some thousand values."""


@dataclass(frozen=True)
class SyncResult:
    """What a sync sent of a run, and what was there.

    Attributes:
        metrics: values by what became of them.
        params, tags, files: how many were sent.
        files_there: how many files MLflow had as they are.
        status: how MLflow shows the run now.
        ended: whether that was changed now.
        writing: whether a process is still writing the run; its files and its end are then left to that process.
    """

    metrics: Sent
    params: int
    tags: int
    files: int
    files_there: int
    status: str
    ended: bool
    writing: bool

    @property
    def nothing(self) -> bool:
        """Tell whether nothing was sent."""
        return not (self.metrics.new or self.params or self.tags or self.files or self.ended)


def store_for_run(run: StoredRun, uri: str | None, environ: Mapping[str, str] = os.environ) -> Store:
    """Return where the record of `run` belongs: at `uri`, else where its settings say, else where it was sent first.

    A run that was never sent goes where `bandpo train` would send it now; the runs folder of a sweep's run is the
    sweep's own.
    """
    runs_dir = run.path.absolute().parent
    while (runs_dir / "sweep.yaml").is_file():
        runs_dir = runs_dir.parent
    experiment = str(run.tracking.get("experiment") or TrackingConfig().experiment)
    own = run.tracking.get("uri")
    first = next((link.uri for link in read_links(run.path) if link.experiment == experiment), None)
    if first is not None and not _is_usable_uri(first):
        first = None
    chosen = uri or own or first
    config = TrackingConfig.model_construct(uri=chosen, experiment=experiment)
    return tracking_store(config, runs_dir, environ)


def _is_usable_uri(uri: str) -> bool:
    """Tell whether the address in a link leads somewhere: none without its password, none of a file that has moved."""
    database = sqlite_path(uri)
    return "***@" not in uri and (database is None or database.exists())


def sync_run(store: Store, path: Path) -> SyncResult:
    """Send what `store` lacks of the run in the folder `path`: params, tags, metrics, files, how it ended.

    Raises:
        UserError: the folder is damaged.
        Exception: whatever MLflow and the network raise.
    """
    with send_lock(path):
        run = read_stored_run(path)
        mirror = MlflowMirror.connect(store, path, path.name, {}, {}, run.start_ms)
        parent = run.tracking.get("parent")
        tags = mirror.send_tags(run_tags(run.env, None if parent is None else str(parent)))
        params = mirror.send_params(flat_params(run.config))
        metrics = _send_metrics(mirror, run.records)
        files, there, ended = 0, 0, False
        if run.status is not None:
            files, there = _send_files(mirror, store, path)
            ended = mirror.status != run.status
            if ended:
                mirror.close(run.status, run.end_ms)
        return SyncResult(metrics, params, tags, files, there, mirror.status, ended, run.status is None)


def _send_metrics(mirror: MlflowMirror, records: Sequence[MetricRecord]) -> Sent:
    parts = [
        mirror.send(records[start : start + RECORDS_PER_CALL])
        for start in range(0, len(records), RECORDS_PER_CALL)
    ]
    return Sent(
        sum(part.new for part in parts),
        sum(part.there for part in parts),
        sum(part.differing for part in parts),
    )


def _send_files(mirror: MlflowMirror, store: Store, folder: Path) -> tuple[int, int]:
    """Send the files that MLflow has not as they are now; return how many were sent, and how many were there."""
    files = {path.relative_to(folder).as_posix(): path for path in run_artifacts(folder)}
    link = find_link(folder, store)
    noted = {} if link is None else link.files
    sizes = mirror.files(sorted({name.rpartition("/")[0] for name in files}))
    sent: dict[str, str] = {}
    try:
        for name, path in files.items():
            found = digest(path)
            if noted.get(name) != found or sizes.get(name) != path.stat().st_size:
                mirror.send_file(folder, path)
                sent[name] = found
    finally:
        record_sent_files(folder, store, sent)
    return len(sent), len(files) - len(sent)
