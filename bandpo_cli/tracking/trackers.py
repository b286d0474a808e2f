"""The base class of trackers, and the run that a tracker receives.

`tracking.trackers` names an entry of `registries.TRACKERS`, or a custom subclass of `Tracker` as `module:Class`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

from bandpo_cli.config.sampling import is_installed
from bandpo_cli.custom_code import load_setting
from bandpo_cli.errors import ConfigError, UserError, definition_location
from bandpo_cli.registries import TRACKERS, load_attribute


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
class TrackedRun:
    """A run, or the report of a sweep, as a tracker receives it.

    Attributes:
        id: letters and digits, the same for every process that sends the run in `folder`.
        project: `tracking.experiment`.
        group: name of the sweep that the run belongs to; None for none.
        kind: `train`, or `sweep` for the report of a sweep.
        config: all settings, nested, and `environment` with versions and commit; without passwords.
        recorded_step: the last step that the tracker has accepted; -1 for none.
        remote_id: `Tracker.remote_id` of an earlier process; "" for none.
        sent_files: SHA-256 of the files that the tracker has, by path in the folder.
        env: content of `env.json`.
        start_ms, end_ms: start and end of the run, milliseconds since 1970; None for now.
    """

    folder: Path
    id: str
    project: str
    group: str | None
    kind: str
    config: Mapping[str, Any]
    recorded_step: int = -1
    remote_id: str = ""
    sent_files: Mapping[str, str] = field(default_factory=dict)
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
        sent_files: as in `TrackedRun`, with the files that were sent since; of a tracker that compares.
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
        self.run, self.last_step = run, run.recorded_step

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
