"""MLflow stores, and the links from a run folder to its MLflow runs (`mlflow.json`).

Of a store: its address, whether it answers, the creation of a SQLite store, and the command that shows it. A link has
the digests of the files that were sent.
"""

import json
import os
import shlex
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit
from uuid import uuid4

from bandpo_cli.config.run import TrackingConfig
from bandpo_cli.errors import REDACTED, first_line, redact_credentials
from bandpo_cli.paths import relative_to_cwd
from bandpo_cli.storage.files import wait_for_lock, write_json

_DATABASE_PORTS = {"postgresql": 5432, "postgres": 5432, "mysql": 3306, "mariadb": 3306, "mssql": 1433}

_MLFLOW_VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # its address shows the run among GenAI evaluations
    "MLFLOW_LOGGING_LEVEL": "WARNING",  # otherwise each new database prints its migrations to stderr
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the tracker retries itself, and knows when the run ends
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}

CONNECT_TIMEOUT_S = 10.0
"""Timeout of `check_reachable`, in seconds."""


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


def check_reachable(uri: str) -> None:
    """Return when the store `uri` answers, or is of a kind that only MLflow can check (a file, databricks).

    A web server answers with any status below 500, a database server by accepting a connection. This check does not
    import MLflow, which takes seconds of processor time.

    Raises:
        OSError: no answer within `CONNECT_TIMEOUT_S`, or a web server answers with an error of its own (5xx).
    """
    try:
        parts = urlsplit(uri)
        scheme, host, port = parts.scheme.partition("+")[0], parts.hostname, parts.port
    except ValueError:  # MLflow reports an invalid address more precisely
        return
    if host is None:
        return
    if scheme in _DATABASE_PORTS:
        socket.create_connection((host, port or _DATABASE_PORTS[scheme]), CONNECT_TIMEOUT_S).close()
    elif scheme in ("http", "https"):
        # The request has no content, so checking the certificate is left to MLflow and its settings.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        address = f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}/health"
        try:
            urllib.request.urlopen(address, timeout=CONNECT_TIMEOUT_S, context=context).close()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code >= 500:
                raise ConnectionError(f"it answers {error.code} {error.reason}") from None
        except (urllib.error.URLError, HTTPException) as error:
            reason = getattr(error, "reason", None) or f"it does not answer in HTTP ({type(error).__name__})"
            raise ConnectionError(str(reason)) from None


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


def short_error(error: Exception) -> str:
    """Return the class and first line of an error of MLflow, without credentials, at most 200 characters."""
    return f"{type(error).__name__}: {first_line(redact_credentials(str(error)))}"[:200]


def _create_tables(uri: str) -> None:
    from mlflow.tracking import MlflowClient

    MlflowClient(tracking_uri=uri, registry_uri=uri).get_experiment_by_name("Default")


LINK = "mlflow.json"
KEY_TAG = "bandpo.run"
"""The MLflow tag with a link's `key`: it finds a run whose creation was not answered, so that none is created twice."""


@dataclass(frozen=True)
class Link:
    """The link from a run folder to its run in one store; an entry of `mlflow.json`.

    Attributes:
        uri: the store's tracking URI, passwords redacted.
        experiment: the experiment's name.
        key: random identifier that the MLflow run has as the tag `KEY_TAG`.
        run_id: MLflow's id of the run; None until the store has answered.
        experiment_id: MLflow's id of the experiment; None until then, and in links of earlier versions.
        files: SHA-256 of the files that were sent, by path in the run folder.
    """

    uri: str
    experiment: str
    key: str
    run_id: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    experiment_id: str | None = None

    def is_for(self, store: Store) -> bool:
        """Return whether this is the link to `store`."""
        return (self.uri, self.experiment) == (redact_credentials(store.uri), store.experiment)


def read_links(folder: Path) -> list[Link]:
    """Return the links of the run in `folder`, the link of the run's own store first; [] where the file is damaged."""
    try:
        content = json.loads((folder / LINK).read_text(encoding="utf-8"))
        return [
            Link(redact_credentials(str(entry["uri"])), str(entry["experiment"]), str(entry.get("key", "")),
                 entry.get("run_id"), dict(entry.get("files", {})), entry.get("experiment_id"))
            for entry in (content, *content.get("others", []))
        ]  # fmt: skip
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return []


def find_link(folder: Path, store: Store) -> Link | None:
    """Return the link of the run in `folder` to `store`, None where it has none."""
    return next((link for link in read_links(folder) if link.is_for(store)), None)


def run_url(folder: Path, store: Store) -> str | None:
    """Return the address of the charts of the run in `folder`: on the server, else where `mlflow ui` shows it.

    Return None for Databricks, and where MLflow has not answered yet. Without `workflowType`, MLflow 3.17 shows a run
    among the evaluations of GenAI applications unless the user's browser remembers another choice; the experiment's tag
    of its kind has no effect on that.
    """
    link = find_link(folder, store)
    if link is None or not link.run_id or not link.experiment_id or store.uri.startswith("databricks"):
        return None
    address = ui_command(store.uri) if is_server(store.uri) else "http://127.0.0.1:5000"
    run = f"experiments/{link.experiment_id}/runs/{link.run_id}"
    return f"{address}/#/{run}/model-metrics?workflowType=machine_learning"


def ui_text(folder: Path, store: Store) -> str:
    """Return what shows the run in `folder` in MLflow, without credentials.

    For a server this is the address of the run; for a file or a database, the command that starts MLflow's pages, and
    on a second line the address that the run then has. Without a run at MLflow it is the server or the command.
    """
    url = run_url(folder, store)
    if is_server(store.uri):
        return url or ui_command(store.uri)
    return "\n".join(filter(None, (ui_command(store.uri), url)))


def new_link(folder: Path, store: Store) -> Link:
    """Return a link from `folder` to a run of `store` that does not exist yet, after writing it.

    An existing link without a run is returned unchanged.
    """
    link = find_link(folder, store)
    if link is None or link.run_id is not None or not link.key:
        link = Link(redact_credentials(store.uri), store.experiment, uuid4().hex)
        write_link(folder, link)
    return link


def write_link(folder: Path, link: Link) -> None:
    """Write `link` to `mlflow.json`; it replaces the link to the same store."""
    links = {(known.uri, known.experiment): known for known in read_links(folder)}
    links[link.uri, link.experiment] = link
    first, *others = map(asdict, links.values())
    write_json(folder / LINK, {**first, **({"others": others} if others else {})})


def link_version(folder: Path) -> tuple[int, int] | None:
    """Return a value that changes whenever `mlflow.json` is written; None where there is no such file."""
    with suppress(OSError):
        file = (folder / LINK).stat()
        return file.st_mtime_ns, file.st_ino
    return None


def send_lock(folder: Path) -> AbstractContextManager[object]:
    """Return the lock for sending the run in `folder`: without it a tracker and `bandpo sync` would send twice."""
    return wait_for_lock(folder / ".mlflow.lock")
