"""Sending to MLflow what a run folder has and its MLflow run lacks. Only the folder is read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.storage.files import file_digest
from bandpo_cli.storage.run_folder import run_artifacts
from bandpo_cli.storage.run_record import StoredRun, read_stored_run
from bandpo_cli.tracking.link import find_link, read_links, record_sent_files, send_lock
from bandpo_cli.tracking.mirror import RECORDS_PER_CALL, MetricRecord, MlflowMirror, Sent
from bandpo_cli.tracking.names import flat_params, run_tags
from bandpo_cli.tracking.store import Store, is_redacted, sqlite_path, tracking_store


@dataclass(frozen=True)
class SyncResult:
    """Counts of what a sync sent of a run, and of what MLflow already had.

    Attributes:
        metrics: values sent, already there, and conflicting.
        params, tags, files: numbers sent.
        files_there: number of files that MLflow already had unchanged.
        status: status of the MLflow run after the sync.
        ended: whether the sync set that status.
        writing: whether a process is still writing the run; that process then sends the files and the final status.
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
    def is_empty(self) -> bool:
        """Return whether nothing was sent."""
        return not (self.metrics.new or self.params or self.tags or self.files or self.ended)


def store_for_run(run: StoredRun, uri: str | None, environ: Mapping[str, str] = os.environ) -> Store:
    """Return the store of `run`: `uri`, else that of its settings, else the one it was first sent to.

    A run that was never sent has the store that `bandpo train` would use now; for a run of a sweep, that of the runs
    folder that contains the sweep.
    """
    runs_dir = run.path.absolute().parent
    while (runs_dir / "sweep.yaml").is_file():
        runs_dir = runs_dir.parent
    experiment = str(run.tracking.get("experiment") or TrackingConfig().experiment)
    own = run.tracking.get("uri")
    first = next((link.uri for link in read_links(run.path) if link.experiment == experiment), None)
    if first is not None and not _is_usable_uri(first):
        first = None
    config = TrackingConfig.model_construct(uri=uri or own or first, experiment=experiment)
    return tracking_store(config, runs_dir, environ)


def _is_usable_uri(uri: str) -> bool:
    """Return whether the address in a link can be used: its password was not redacted and its file has not moved."""
    database = sqlite_path(uri)
    return not is_redacted(uri) and (database is None or database.exists())


def sync_run(store: Store, path: Path) -> SyncResult:
    """Send what `store` lacks of the run in the folder `path`: params, tags, metrics, files, final status.

    Raises:
        UserError: the folder is damaged.
        Exception: any error of MLflow and the network.
    """
    with send_lock(path):
        run = read_stored_run(path)
        mirror = MlflowMirror.connect(store, path, path.name, {}, {}, run.start_ms)
        parent = run.tracking.get("parent")
        tags = mirror.send_tags(run_tags(run.env, None if parent is None else str(parent)))
        params = mirror.send_params(flat_params(run.config))
        records = [MetricRecord.of(each.step, each.line, each.clock_ms) for each in run.records]
        metrics = _send_metrics(mirror, records)
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
    """Send the new and changed files; return the numbers of files sent and of files that MLflow already had."""
    files = {path.relative_to(folder).as_posix(): path for path in run_artifacts(folder)}
    link = find_link(folder, store)
    known = {} if link is None else link.files
    sizes = mirror.files(sorted({name.rpartition("/")[0] for name in files}))
    sent: dict[str, str] = {}
    try:
        for name, path in files.items():
            digest = file_digest(path)
            if known.get(name) != digest or sizes.get(name) != path.stat().st_size:
                mirror.send_file(folder, path)
                sent[name] = digest
    finally:
        record_sent_files(folder, store, sent)
    return len(sent), len(files) - len(sent)
