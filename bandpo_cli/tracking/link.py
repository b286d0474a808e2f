"""`mlflow.json` in a run folder: which MLflow runs mirror it, and which of its files they have."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from bandpo_cli.storage.environment import redact_credentials
from bandpo_cli.storage.files import file_lock, write_json
from bandpo_cli.tracking.store import Store

LINK = "mlflow.json"
KEY_TAG = "bandpo.run"
"""The tag with a link's `key`: a run whose making was not answered is found again by it, instead of made twice."""


@dataclass(frozen=True)
class Link:
    """A run folder's mirror at one store.

    Attributes:
        uri: the store's address, passwords blotted out.
        experiment: its experiment.
        key: a word of our own that the MLflow run has as a tag.
        run_id: MLflow's name for the run; None until it has answered.
        files: digests of the files that were sent, by path in the run folder.
    """

    uri: str
    experiment: str
    key: str
    run_id: str | None = None
    files: dict[str, str] = field(default_factory=dict)

    def fits(self, store: Store) -> bool:
        """Tell whether this is the link to `store`."""
        return (self.uri, self.experiment) == (redact_credentials(store.uri), store.experiment)


def read_links(folder: Path) -> list[Link]:
    """Return the links of the run in `folder`, that of the run's own tracking first; [] where the file is damaged."""
    try:
        found = json.loads((folder / LINK).read_text(encoding="utf-8"))
        entries = [found, *found.get("others", [])]
        return [
            Link(str(each["uri"]), str(each["experiment"]), str(each.get("key", "")), each.get("run_id"),
                 dict(each.get("files", {})))
            for each in entries
        ]  # fmt: skip
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return []


def find_link(folder: Path, store: Store) -> Link | None:
    """Return the link of the run in `folder` to `store`, None where it has none."""
    return next((link for link in read_links(folder) if link.fits(store)), None)


def new_link(folder: Path, store: Store) -> Link:
    """Link the run in `folder` to a run of `store` that is yet to be made; a link that waits for its run is kept."""
    link = find_link(folder, store)
    if link is None or link.run_id is not None or not link.key:
        link = Link(redact_credentials(store.uri), store.experiment, uuid4().hex)
        write_link(folder, link)
    return link


def write_link(folder: Path, link: Link) -> None:
    """Keep `link`, in the place of the one to the same store."""
    links = read_links(folder)
    places = [(each.uri, each.experiment) for each in links]
    if (link.uri, link.experiment) in places:
        links[places.index((link.uri, link.experiment))] = link
    else:
        links.append(link)
    first, *others = map(asdict, links)
    write_json(folder / LINK, {**first, **({"others": others} if others else {})})


def record_sent_files(folder: Path, store: Store, digests: Mapping[str, str]) -> None:
    """Keep in mind that `store` has files of the run in `folder`, as these digests by path tell them."""
    link = find_link(folder, store)
    if link is not None and digests:
        write_link(folder, replace(link, files={**link.files, **digests}))


def digest(file: Path) -> str:
    """Return the SHA-256 of what `file` holds."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def link_version(folder: Path) -> tuple[int, int] | None:
    """Return what changes whenever `mlflow.json` is written; None where there is none."""
    try:
        found = (folder / LINK).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def send_lock(folder: Path) -> AbstractContextManager[None]:
    """Hold the right to send the run in `folder`: a tracker and `bandpo sync` that send at once would send twice."""
    return file_lock(folder / ".mlflow.lock")
