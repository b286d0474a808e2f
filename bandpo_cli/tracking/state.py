"""`trackers.json` in a run folder: for each tracker what it has accepted of the run, and where the run is there.

For each tracker the file has a list of the destinations that the run was sent to, the first one first.
"""

import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from bandpo_cli.storage.files import wait_for_lock, write_json

STATE_FILE = "trackers.json"


@dataclass(frozen=True)
class Place:
    """A run at one destination of a tracker.

    Attributes:
        destination: `Tracker.destination`, without secrets.
        project: `tracking.experiment`.
        id: random identifier of the run, the same at all destinations of a tracker.
        remote_id: the identifier that the tracker has chosen; "" until it has answered, or if it uses `id`.
        where: the address of the run or the command that shows it; "" for none.
        step: the last step that was accepted; -1 for none.
        status: how the run ended; RUNNING before.
        files: SHA-256 of the files that were sent, by path in the run folder.
    """

    destination: str
    project: str
    id: str
    remote_id: str = ""
    where: str = ""
    step: int = -1
    status: str = "RUNNING"
    files: dict[str, str] = field(default_factory=dict)


def _read(folder: Path) -> dict[str, list[Any]]:
    """Return the content of `trackers.json`; {} if there is none or it is damaged."""
    try:
        content = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_places(folder: Path, tracker: str) -> list[Place]:
    """Return where `tracker` has the run in `folder`, the first destination first; [] for a damaged file."""
    try:
        return [Place(**entry) for entry in _read(folder).get(tracker, [])]
    except TypeError:
        return []


def find_place(folder: Path, tracker: str, destination: str, project: str) -> Place | None:
    """Return the run in `folder` at a destination of `tracker`; None if it was not sent there."""
    places = read_places(folder, tracker)
    return next((p for p in places if (p.destination, p.project) == (destination, project)), None)


def open_place(folder: Path, tracker: str, destination: str, project: str, write: bool = True) -> Place:
    """Return the run in `folder` at a destination; with `write`, a new one is written before the tracker is asked.

    A run whose creation the tracker did not answer is therefore found by its identifier, and not created twice.
    """
    place = find_place(folder, tracker, destination, project)
    if place is None:
        known = read_places(folder, tracker)
        place = Place(destination, project, known[0].id if known else uuid4().hex[:16])
        if write:
            write_place(folder, tracker, place)
    return place


def write_place(folder: Path, tracker: str, place: Place) -> None:
    """Write `place`, which replaces the one of the same destination; threads of several trackers share the file."""
    with wait_for_lock(folder / ".trackers.lock"):
        places = {(known.destination, known.project): known for known in read_places(folder, tracker)}
        places[place.destination, place.project] = place
        write_json(folder / STATE_FILE, {**_read(folder), tracker: [*map(asdict, places.values())]})


def send_lock(folder: Path, tracker: str) -> AbstractContextManager[object]:
    """Return the lock for sending a run to a tracker: without it a training and `bandpo sync` would send twice."""
    return wait_for_lock(folder / f".{tracker.replace(':', '.')}.lock")
