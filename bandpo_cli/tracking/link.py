"""Links from a run folder to its MLflow runs (`mlflow.json`), with the digests of the files that were sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from bandpo_cli.errors import redact_credentials
from bandpo_cli.storage.files import file_lock, write_json
from bandpo_cli.tracking.store import Store, is_server, run_page, ui_command

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
        entries = [content, *content.get("others", [])]
        return [
            Link(redact_credentials(str(entry["uri"])), str(entry["experiment"]), str(entry.get("key", "")),
                 entry.get("run_id"), dict(entry.get("files", {})), entry.get("experiment_id"))
            for entry in entries
        ]  # fmt: skip
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return []


def find_link(folder: Path, store: Store) -> Link | None:
    """Return the link of the run in `folder` to `store`, None where it has none."""
    return next((link for link in read_links(folder) if link.is_for(store)), None)


def run_url(folder: Path, store: Store) -> str | None:
    """Return the address of the run in `folder` in MLflow's pages; None where MLflow has not answered yet."""
    link = find_link(folder, store)
    if link is None or link.run_id is None or link.experiment_id is None:
        return None
    return run_page(store.uri, link.experiment_id, link.run_id)


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
    links = read_links(folder)
    stores = [(known.uri, known.experiment) for known in links]
    if (link.uri, link.experiment) in stores:
        links[stores.index((link.uri, link.experiment))] = link
    else:
        links.append(link)
    first, *others = map(asdict, links)
    write_json(folder / LINK, {**first, **({"others": others} if others else {})})


def record_sent_files(folder: Path, store: Store, digests: Mapping[str, str]) -> None:
    """Record that `store` has files of the run in `folder`, given as SHA-256 by path in the folder."""
    link = find_link(folder, store)
    if link is not None and digests:
        write_link(folder, replace(link, files={**link.files, **digests}))


def link_version(folder: Path) -> tuple[int, int] | None:
    """Return a value that changes whenever `mlflow.json` is written; None where there is no such file."""
    try:
        file = (folder / LINK).stat()
    except OSError:
        return None
    return file.st_mtime_ns, file.st_ino


def send_lock(folder: Path) -> AbstractContextManager[object]:
    """Return the lock for sending the run in `folder`: without it a tracker and `bandpo sync` would send twice."""
    return file_lock(folder / ".mlflow.lock")
