"""Upload of missing data of run folders to their trackers."""

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bandpo_cli.callbacks import Callback, Dispatcher
from bandpo_cli.config.layers import read_layer
from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.custom_code import code_from
from bandpo_cli.errors import RunError, UserError, user_code_location
from bandpo_cli.storage.run_folder import RunFolder, find_folder
from bandpo_cli.storage.run_record import read_stored_run
from bandpo_cli.storage.sweep_folder import PLAN_FILE, find_runs
from bandpo_cli.tracking.mlflow_store import MLFLOW, store_for_run
from bandpo_cli.tracking.outages import check_reachable, short_error
from bandpo_cli.tracking.sender import RunSender, SyncResult
from bandpo_cli.tracking.trackers import tracker_class

log = logging.getLogger("bandpo_cli")


@dataclass(frozen=True)
class SyncReport:
    """The outcome of the run `name`: what was sent, or why it was not to be sent, or why it could not be sent.

    `tracker` is the name of the tracker in `tracking.trackers`.
    """

    name: str
    result: SyncResult | None = None
    skipped: str | None = None
    error: str | None = None
    tracker: str = MLFLOW


SyncCallback = Callback[Sequence[Path], SyncReport, Sequence[SyncReport]]
"""A callback of `sync`; `start` has the folders of all runs."""


def sync(
    names: Sequence[str] = (),
    *,
    all_runs: bool = False,
    trackers: Sequence[str] = (),
    uri: str | None = None,
    runs_dir: Path | str = "runs",
    callbacks: Sequence[SyncCallback] = (),
) -> list[SyncReport]:
    """Send trackers what they lack of runs: settings, metrics of every step, files and status.

    A store that cannot be reached or does not accept a run is not tried again. The runs of the other stores are sent
    before an error is raised.

    Args:
        names: runs, by name in `runs_dir` or by folder; a sweep stands for all of its runs.
        all_runs: send every run of `runs_dir` in place of `names`; those without a tracker are skipped.
        trackers: names of the trackers; empty for the trackers of each run's settings, and MLflow for a run in `names`
            that has none.
        uri: MLflow server or store; None for the one of each run's settings.
        callbacks: `start` has the folder of each run once per tracker, `phase("tracking")` comes before each of them,
            `step` after it.

    Raises:
        RunError: a store could not be reached or did not accept a run.
        UserError: there is no such run, a run folder is damaged, or a tracker cannot be used.
    """
    for name in {*trackers} - {MLFLOW}:
        tracker_class(name)
    pairs: list[tuple[Path, str | None]] = [
        (path, tracker)
        for path, is_named in _choose_runs(names, all_runs, Path(runs_dir)).items()
        for tracker in trackers or _trackers(path, is_named, uri)
    ]
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # seconds; a person waits here, no training
    events = Dispatcher(callbacks)
    failed_places: dict[str, str] = {}
    reports: list[SyncReport] = []
    try:
        events.start([path for path, _ in pairs])
        for path, tracker in pairs:
            events.phase("tracking")
            if tracker is None:
                reports.append(SyncReport(path.name, skipped="it has no tracker; name it to send it"))
            else:
                reports.append(_send(path, tracker, uri, failed_places))
            events.step(reports[-1])
    finally:
        events.end(reports)
    unsent = [*failed_places.values()]
    errors = [report.error for report in reports if report.error and report.error not in unsent]
    if unsent:
        errors.append(f"{'; '.join(unsent)}. Nothing is lost: sync again when it is back")
    for line in errors[:-1]:
        log.warning("%s", line)
    if errors:
        raise (RunError if unsent else UserError)(errors[-1])
    return reports


def _choose_runs(names: Sequence[str], all_runs: bool, runs_dir: Path) -> dict[Path, bool]:
    """Return the folders of the runs that `names` name, or of every run in `runs_dir`; each once.

    The value is True for a run that was named itself, and not a folder that contains it.
    """
    if all_runs == bool(names):
        raise UserError("name the runs to send, or give --all for every run; not both")
    chosen: dict[Path, tuple[Path, bool]] = {}
    folders = {name: find_folder(name, runs_dir, PLAN_FILE) for name in names} or {"": runs_dir}
    for name, folder in folders.items():
        for path in [RunFolder.open(runs_dir, name).path] if folder is None else find_runs(folder):
            chosen.setdefault(path.resolve(), (path, folder is None))
    if not chosen:
        raise UserError(f"no runs in {runs_dir}; give another place with --runs-dir")
    return dict(chosen.values())


def _trackers(path: Path, named: bool, uri: str | None) -> Iterable[str | None]:
    """Return the trackers that a run is sent to; None in place of MLflow for a run that is left out."""
    config = TrackingConfig()
    with suppress(UserError, ValueError, TypeError):  # damaged settings: sending the run reports them
        tracking = read_layer(path / "config.yaml").get("tracking") or {}
        config = TrackingConfig(**{key: tracking[key] for key in ("trackers", "mlflow") if key in tracking})
    if named and (uri is not None or not config.names):
        return dict.fromkeys((MLFLOW, *config.names))
    return config.names or (None,)


def _send(path: Path, tracker: str, uri: str | None, failed_places: dict[str, str]) -> SyncReport:
    """Send one run to one tracker; the error of a tracker is added to `failed_places`, by its place.

    Nothing is sent to a place in `failed_places`: each attempt may take the timeout of the server.
    """
    place = tracker
    try:
        with code_from(path):
            store = store_for_run(read_stored_run(path), uri) if tracker == MLFLOW else None
            sender = RunSender(tracker, path, store)
            place = sender.place
            if place not in failed_places:
                check_reachable(sender.server())
                return SyncReport(path.name, result=sender.send(), tracker=tracker)
    except UserError as error:
        return SyncReport(path.name, error=str(error), tracker=tracker)
    except Exception as error:  # noqa: BLE001 - whatever the tracker and the network raise ends as one line
        how = f"did not accept run {path.name}"
        if isinstance(error, OSError):
            if error.filename and Path(str(error.filename)).absolute().is_relative_to(path.absolute()):
                what = "sync locks the run folder and records in it what was sent"
                return SyncReport(
                    path.name, error=f"{error.filename}: {error.strerror}; {what}", tracker=tracker
                )
            how = "cannot be reached"
        failed_places[place] = f"{place} {how} ({short_error(error)}){user_code_location(error)}"
    return SyncReport(path.name, error=failed_places[place], tracker=tracker)
