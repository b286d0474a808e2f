"""Upload of missing data of run folders to MLflow."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bandpo_cli.callbacks import Callback
from bandpo_cli.errors import RunError, UserError, redact_credentials
from bandpo_cli.experiments.rank_group import Dispatcher
from bandpo_cli.storage.run_folder import RunFolder, find_folder
from bandpo_cli.storage.run_record import read_stored_run
from bandpo_cli.sweeps.folder import PLAN_FILE, find_runs
from bandpo_cli.tracking.store import check_reachable, short_error
from bandpo_cli.tracking.sync import RunSender, SyncResult, store_for_run

log = logging.getLogger("bandpo_cli")


@dataclass(frozen=True)
class SyncReport:
    """The outcome of the run `name`: what was sent, or why it was not to be sent, or why it could not be sent."""

    name: str
    result: SyncResult | None = None
    skipped: str | None = None
    error: str | None = None


SyncCallback = Callback[Sequence[Path], SyncReport, Sequence[SyncReport]]
"""A callback of `sync`; `start` has the folders of all runs."""


def sync(
    names: Sequence[str] = (),
    *,
    all_runs: bool = False,
    uri: str | None = None,
    runs_dir: Path | str = "runs",
    callbacks: Sequence[SyncCallback] = (),
) -> list[SyncReport]:
    """Send MLflow what it lacks of runs: params, tags, metrics of every step, files and status.

    A store that cannot be reached or does not accept a run is not tried again. The runs of the other stores are sent
    before an error is raised.

    Args:
        names: runs, by name in `runs_dir` or by folder; a sweep stands for all of its runs.
        all_runs: send every run of `runs_dir` in place of `names`; those with `tracking.mlflow: false` are skipped.
        uri: MLflow server or store; None for the one of each run's settings.
        callbacks: `start` has all runs, `phase("tracking")` comes before each run, `step` after it.

    Raises:
        RunError: a store could not be reached or did not accept a run.
        UserError: there is no such run, or a run folder is damaged.
    """
    named = _choose_runs(names, all_runs, Path(runs_dir))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # seconds; a person waits here, no training
    events = Dispatcher(callbacks)
    failed_stores: dict[str, str] = {}
    reports: list[SyncReport] = []
    try:
        events.start([*named])
        for path, is_named in named.items():
            events.phase("tracking")
            reports.append(_send(path, is_named, uri, failed_stores))
            events.step(reports[-1])
    finally:
        events.end(reports)
    unsent = [*failed_stores.values()]
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


def _send(path: Path, named: bool, uri: str | None, failed_stores: dict[str, str]) -> SyncReport:
    """Send one run; the error of a store is added to `failed_stores`, by the store's URI.

    Nothing is sent to a store in `failed_stores`: each attempt may take the store's timeout.
    """
    try:
        run = read_stored_run(path)
        if not named and run.tracking.get("mlflow") is False:
            return SyncReport(path.name, skipped="tracking.mlflow is false; name it to send it")
        store = store_for_run(run, uri)
    except UserError as error:
        return SyncReport(path.name, error=str(error))
    try:
        if store.uri not in failed_stores:
            check_reachable(store.uri)
            return SyncReport(path.name, result=RunSender(store, path).send())
    except UserError as error:
        return SyncReport(path.name, error=str(error))
    except Exception as error:  # noqa: BLE001 - whatever MLflow and the network raise ends as one line
        how = f"did not accept run {path.name}"
        if isinstance(error, OSError):
            if Path(str(error.filename)).absolute().is_relative_to(path.absolute()):
                what = "sync locks the run folder and records in it what was sent"
                return SyncReport(path.name, error=f"{error.filename}: {error.strerror}; {what}")
            how = "cannot be reached"
        failed_stores[store.uri] = f"MLflow at {redact_credentials(store.uri)} {how} ({short_error(error)})"
    return SyncReport(path.name, error=failed_stores[store.uri])
