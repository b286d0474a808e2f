"""MLflow stores: the address of a run's store, the creation of a SQLite store, and the command that shows it."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.errors import REDACTED, redact_credentials
from bandpo_cli.paths import relative_to_cwd
from bandpo_cli.storage.files import wait_for_lock
from bandpo_cli.storage.run_record import StoredRun
from bandpo_cli.tracking.trackers import Place, find_place, read_places

MLFLOW = "mlflow"

_MLFLOW_VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # its address shows the run among GenAI evaluations
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # otherwise each new database prints its migrations to stderr
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the tracker retries itself, and knows when the run ends
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


@dataclass(frozen=True)
class Store:
    """An MLflow store.

    Attributes:
        uri: its tracking URI.
        experiment: the experiment's name.
        artifact_location: where a *new* experiment stores its files; None lets the store choose. A database would
            choose `./mlruns` in the current folder of the run.
    """

    uri: str
    experiment: str
    artifact_location: str | None

    @property
    def destination(self) -> str:
        """The tracking URI with passwords redacted, as `trackers.json` has it."""
        return redact_credentials(self.uri)

    def place(self, folder: Path) -> Place | None:
        """Return the run in `folder` at this store; None if it was not sent there."""
        return find_place(folder, MLFLOW, self.destination, self.experiment)


def tracking_store(config: TrackingConfig, runs_dir: Path, environ: Mapping[str, str] = os.environ) -> Store:
    """Return the store of `config.uri`, else of MLFLOW_TRACKING_URI, else `mlflow.db` in the runs folder.

    MLFLOW_TRACKING_URI comes first where a secret in `config.uri` was redacted.
    """
    runs_dir = runs_dir.absolute()
    usable = None if is_redacted(config.uri) else config.uri
    uri = usable or environ.get("MLFLOW_TRACKING_URI") or config.uri or sqlite_uri(runs_dir / "mlflow.db")
    scheme = uri.partition(":")[0].partition("+")[0] if ":" in uri else "file"
    if scheme in ("http", "https", "databricks", "uc", "file"):  # which choose the place of files themselves
        return Store(uri, config.experiment, None)
    database = sqlite_path(uri)
    folder = database.absolute().parent if database else runs_dir
    return Store(uri, config.experiment, (folder / "mlartifacts").as_uri())


def is_redacted(uri: str | None) -> bool:
    """Return whether a secret of an address was redacted, so that the address cannot be used."""
    return uri is not None and REDACTED in uri


def is_server(uri: str) -> bool:
    """Return whether `uri` is the address of an MLflow server, which shows its runs itself."""
    return uri.startswith(("http://", "https://"))


def ui_command(uri: str) -> str:
    """Return the shell command, or the address to open, that shows the runs of the store `uri`; without credentials."""
    if is_server(uri):
        parts = urlsplit(uri)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
    if uri.startswith("databricks"):
        return redact_credentials(uri)
    if database := sqlite_path(uri):
        uri = sqlite_uri(relative_to_cwd(database))
    return f"mlflow ui --backend-store-uri {shlex.quote(redact_credentials(uri))}"


def sqlite_uri(path: Path) -> str:
    """Return the address of a SQLite file; % and ?, which have a meaning in SQLAlchemy's addresses, are escaped."""
    return "sqlite:///" + path.as_posix().replace("%", "%25").replace("?", "%3F")


def sqlite_path(uri: str) -> Path | None:
    """Return the file of a SQLite address, None for another store or one in memory."""
    path = unquote(uri.partition("?")[0].removeprefix("sqlite:///"))
    return Path(path) if uri.startswith("sqlite:///") and path not in ("", ":memory:") else None


def create_sqlite_store(uri: str) -> None:
    """Create the SQLite file of `uri` if there is none: under another name, then renamed. Takes seconds.

    MLflow creates its tables by some fifty migrations, which take seconds and hold no lock. Two runs of a sweep that
    start together would break each other's file, and a run killed in between would leave a file that no later run can
    open (both observed with MLflow 3.17).
    """
    path = sqlite_path(uri)
    if path is None or path.exists() or os.name != "posix":
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            unfinished = path.with_name(f".{path.name}.new")
            unfinished.unlink(missing_ok=True)
            _create_tables(sqlite_uri(unfinished))
            os.replace(unfinished, path)


def mlflow_client(uri: str) -> Any:
    """Return an `MlflowClient` of the store `uri`, without telemetry and retries; a missing SQLite file is created."""
    for key, value in _MLFLOW_VARIABLES.items():
        os.environ.setdefault(key, value)
    import mlflow.store.db.utils
    from mlflow.tracking import MlflowClient

    # MLflow tries a database that does not answer ten times, over 25 minutes, with three lines on stderr each time.
    # There is no setting for this. The tracker retries itself.
    mlflow.store.db.utils.MAX_RETRY_COUNT = 0
    create_sqlite_store(uri)
    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def _create_tables(uri: str) -> None:
    from mlflow.tracking import MlflowClient

    MlflowClient(tracking_uri=uri, registry_uri=uri).get_experiment_by_name("Default")


def run_address(store: Store, remote_id: str) -> str | None:
    """Return the address of the charts of a run: on the server, else where `mlflow ui` shows it; None for Databricks.

    Without `workflowType`, MLflow 3.17 shows a run among the evaluations of GenAI applications, whatever the kind of
    its experiment, unless the user's browser remembers another choice.
    """
    if store.uri.startswith("databricks"):
        return None
    address = ui_command(store.uri) if is_server(store.uri) else "http://127.0.0.1:5000"
    return f"{address}/#/{remote_id}/model-metrics?workflowType=machine_learning"


def ui_text(folder: Path, store: Store) -> str:
    """Return what shows the run in `folder` in MLflow, without credentials: the address of the run on a server.

    For a file or a database this is the command that starts MLflow's pages, and on a second line the address that the
    run then has. Without a run at MLflow it is the server or the command.
    """
    place = store.place(folder)
    url = run_address(store, place.remote_id) if place and place.remote_id else None
    if is_server(store.uri):
        return url or ui_command(store.uri)
    return "\n".join(filter(None, (ui_command(store.uri), url)))


def store_for_run(run: StoredRun, uri: str | None, environ: Mapping[str, str] = os.environ) -> Store:
    """Return the store of `run`: `uri`, else the store of its settings, else the store that it was first sent to.

    A run that was never sent has the store that `bandpo train` would use now, in the runs folder that contains a sweep.
    """
    runs_dir = run.path.absolute().parent
    while (runs_dir / "sweep.yaml").is_file():
        runs_dir = runs_dir.parent
    experiment = str(run.tracking.get("experiment") or TrackingConfig().experiment)
    own = run.tracking.get("uri")
    places = read_places(run.path, MLFLOW)
    first = next((place.destination for place in places if place.project == experiment), None)
    database = sqlite_path(first or "")
    if is_redacted(first) or (database is not None and not database.exists()):  # its file has moved
        first = None
    config = TrackingConfig.model_construct(uri=uri or own or first, experiment=experiment)
    return tracking_store(config, runs_dir, environ)
