"""Trackers: the base class, the run and the metrics that a tracker receives, and `trackers.json` with what it has.

`tracking.trackers` names an entry of `registries.TRACKERS`, or a custom subclass of `Tracker` as `module:Class`.
MLflow allows letters, digits and a few signs in the names of metrics; all trackers get the same names.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

from bandpo_cli.config.batch_and_sampling import is_installed
from bandpo_cli.custom_code import load_setting
from bandpo_cli.errors import ConfigError, UserError, definition_location
from bandpo_cli.metric_names import HELDOUT_ACCURACY, HELDOUT_REWARD, heldout_mean
from bandpo_cli.paths import read_json_object
from bandpo_cli.registries import TRACKERS, load_attribute
from bandpo_cli.storage.files import wait_for_lock, write_json

MAX_NAME_CHARS = 250  # MLflow's limit (mlflow/utils/validation.py)

FIRST_SECTION = "Main"
"""Section of MLflow's charts with copies of `FIRST_METRICS` and the means over the evaluation sets.

MLflow 3.17 makes a section of the charts whose names are equal up to the last `/`, and sorts sections and charts by
code point, in which capital letters are first. Only names decide: a rearrangement stays in the user's browser.
"""

FIRST_METRICS = {
    "train/accuracy": "accuracy",
    "train/reward": "reward",
    "train/entropy": "entropy",
    "clip/active_fraction": "clip_fraction",
}

_BIN = re.compile(r"(?:clip|gradient)/(.+)/p_([0-9.]+)_([0-9.]+)")

_WORDS = {"@": "_at_", "<": "_lt_", ">": "_gt_", "=": "_eq_", "%": "_pct_", "+": "_plus_"}

STATE_FILE = "trackers.json"
"""The file in a run folder with a list, for each tracker, of the places that the run was sent to, in that order."""


class TrackerUnavailableError(UserError):
    """A tracker cannot be used until the user changes something, such as logging in; it is not tried again."""


class Point(NamedTuple):
    """The finite metrics of a step by MLflow's names, and the time of its end in milliseconds since 1970."""

    step: int
    time_ms: int
    metrics: dict[str, float]


class Sent(NamedTuple):
    """Numbers of metric values.

    Attributes:
        new: sent now.
        there: not sent, because the tracker already has a value of the metric at that step.
        differing: of `there`, those for which the tracker has another value, which stays.
    """

    new: int = 0
    there: int = 0
    differing: int = 0


@dataclass(frozen=True)
class Place:
    """A run at one destination of a tracker.

    Attributes:
        destination: `Tracker.destination`, without secrets.
        project: `tracking.experiment`.
        id: random letters and digits, the same for every process that sends the run and at all destinations.
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


@dataclass(frozen=True, kw_only=True)
class TrackedRun(Place):
    """A run, or the report of a sweep, as a tracker receives it: what an earlier process has recorded of it, and more.

    Attributes:
        group: name of the sweep that the run belongs to; None for none.
        kind: `train`, or `sweep` for the report of a sweep.
        config: all settings, nested, and `environment` with versions and commit; without passwords.
        env: content of `env.json`.
        start_ms, end_ms: start and end of the run, milliseconds since 1970; None for now.
    """

    folder: Path
    group: str | None
    kind: str
    config: Mapping[str, Any]
    env: Mapping[str, Any] = field(default_factory=dict)
    start_ms: int | None = None
    end_ms: int | None = None

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.folder.name


class Tracker:
    """Base class of trackers: a run that is open at a tracker.

    All calls come from a thread for which the training does not wait. After an error the object is closed, and after a
    pause a new one is created, which continues after its `last_step`. `bandpo sync` also opens runs that have ended.

    Attributes:
        title: the tracker's name in messages; None for the name in the settings.
        last_step: the last step that the tracker has; the steps after it are sent.
        where: the address of the run or the command that shows it, one line; "" for none.
        compares: whether `log` and `finish` ask the tracker for what it has. Such a tracker receives all steps, also
            from `bandpo sync` of a run that another process is writing.
        remote_id: the identifier that the tracker has chosen for the run; "" if it uses `TrackedRun.id`.
        status: the status of the run at the tracker.
        new_params, new_tags: numbers of settings and tags that were sent when the run was opened.
        sent_files: `TrackedRun.files` and the files that were sent since; of a tracker that compares.
    """

    title: ClassVar[str | None] = None
    compares: ClassVar[bool] = False
    where: str = ""
    remote_id: str = ""
    sent_files: Mapping[str, str] = MappingProxyType({})
    status: str = "RUNNING"
    new_params: int = 0
    new_tags: int = 0

    @classmethod
    def destination(cls, project: str) -> str:
        """Return the address or folder that runs are sent to now, without secrets; to a new one all steps are sent.

        Raises TrackerUnavailableError if the user has to do something first, which the message says.
        """
        return ""

    @classmethod
    def server(cls, destination: str) -> str:
        """Return the address that must answer before the run is opened; one without a host is not tried."""
        parts = urlsplit(destination)
        return f"{parts.scheme}://{parts.netloc}" if parts.scheme in ("http", "https") else ""

    def __init__(self, run: TrackedRun) -> None:
        """Open `run`, or continue the run that an earlier process opened with the same id."""
        self.run, self.last_step = run, run.step

    def reopen(self) -> None:
        """Set the status of a run that had ended to RUNNING."""

    def log(self, points: Sequence[Point]) -> Sent | None:
        """Send the metrics of steps, in ascending order; return the numbers of values, None if all were sent."""
        raise NotImplementedError

    def finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> int | None:
        """End the run as FINISHED, FAILED or KILLED; return the number of files sent, None for all.

        Args:
            summary: content of `summary.json` without the last step; for a sweep, its means by their names.
            files: the files that describe the run; `report/report.html` is the report of a sweep.
        """

    def describe(self, text: str) -> None:
        """Set the description of a sweep, in Markdown; its first line is always the same."""

    def close(self) -> None:
        """Release the connection of a run that has not ended, after an error."""


def tracker_class(name: str) -> type[Tracker]:
    """Return the class of a tracker.

    Raises ConfigError if there is none, its package is not installed, or a custom class cannot be used.
    """
    key = f"tracking.trackers = '{name}'"
    try:
        package = TRACKERS[TRACKERS.check_name(name)].package
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    if not is_installed(package):
        raise ConfigError(f'{key}: {package} is not installed; pip install "bandpo[{package}]"')
    if name in TRACKERS:
        return load_attribute(TRACKERS[name].tracker)  # type: ignore[no-any-return]
    custom = load_setting("tracking.trackers", name)
    if isinstance(custom, type) and issubclass(custom, Tracker):
        return custom
    advice = "name a subclass of bandpo_cli.tracking.trackers.Tracker"
    raise ConfigError(f"{key}: no tracker; {advice}{definition_location(custom)}")


def mlflow_name(name: str) -> str:
    """Return `name` as a legal MLflow name: ASCII letters, digits, `_ - . /` and blanks, at most 250 characters.

    `@ < > = % +` become words (`mean@16` is `mean_at_16`), any other character `_`; then path parts that are
    empty, `.` or `..` are removed. A legal name is unchanged. Two names can collide (`a[b]` and `a(b)`).
    """
    spelled = re.sub(r"[@<>=%+]", lambda match: _WORDS[match[0]], name)
    plain = re.sub(r"[^A-Za-z0-9_\-. /]", "_", spelled)
    parts = [part for part in plain.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_NAME_CHARS].rstrip("/") or "unnamed"


def finite_metrics(record: Mapping[str, object]) -> dict[str, float]:
    """Return the finite numbers of `record` by the names that MLflow gets, without `step`.

    Copies of `FIRST_METRICS` and the means of held-out accuracy and reward over the evaluation sets are added under
    `FIRST_SECTION`.
    """
    named = {_sortable_name(key): value for key, value in record.items() if key != "step"}
    first = {name: record.get(key) for key, name in FIRST_METRICS.items()}
    if "time/step" in record:  # a step of training, and not `bandpo eval` of its checkpoint
        first["heldout_accuracy"] = heldout_mean(record, HELDOUT_ACCURACY)
        first["heldout_reward"] = heldout_mean(record, HELDOUT_REWARD)
    named |= {f"{FIRST_SECTION}/{name}": value for name, value in first.items()}
    return {
        mlflow_name(name): float(value)
        for name, value in named.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _sortable_name(key: str) -> str:
    """Return the name of a metric of one bin in a section for all bins, after those of the run; others unchanged.

    The edges have three decimals or more, so that the bins are in the order of their probabilities:
    `clip/token_share/p_0_0.001` is `vs_probability/token_share_p_0.000_0.001`, `gradient/weight_min/positive/p_0.5_0.9`
    is `vs_probability/weight_min_positive_p_0.500_0.900`.
    """
    match = _BIN.fullmatch(key)
    if match is None:
        return key
    metric, *edges = match.groups()
    low, high = (f"{whole}.{decimals:0<3}" for whole, _, decimals in (edge.partition(".") for edge in edges))
    return f"vs_probability/{metric.replace('/', '_')}_p_{low}_{high}"


def _read(folder: Path) -> dict[str, list[Any]]:
    """Return the content of `trackers.json`; {} if there is none or it is damaged."""
    with suppress(UserError):
        return read_json_object(folder / STATE_FILE)
    return {}


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
    """Return the run in `folder` at a destination; with `write`, a new one is written before the tracker is asked."""
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
