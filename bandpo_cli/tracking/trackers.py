"""Trackers beside MLflow: the base class of a tracker, and the run that it receives.

`tracking.trackers` names an entry of `registries.TRACKERS`, or a custom subclass of `Tracker` as `module:Class`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

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
    """

    folder: Path
    id: str
    project: str
    group: str | None
    kind: str
    config: Mapping[str, Any]
    recorded_step: int = -1

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
    """

    title: ClassVar[str | None] = None
    where: str = ""

    @classmethod
    def destination(cls, project: str) -> str:
        """Return the address or folder that runs are sent to now, without secrets; to a new one all steps are sent.

        Raises TrackerUnavailableError if the user has to do something first, which the message says.
        """
        return ""

    def __init__(self, run: TrackedRun) -> None:
        """Open `run`, or continue the run that an earlier process opened with the same id."""
        self.run, self.last_step = run, run.recorded_step

    def log(self, points: Sequence[Point]) -> None:
        """Send the metrics of steps, in ascending order."""
        raise NotImplementedError

    def finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """End the run as FINISHED, FAILED or KILLED.

        Args:
            summary: content of `summary.json` without the last step; for a sweep, its means by their names.
            files: the files that describe the run; `report/report.html` is the report of a sweep.
        """

    def close(self) -> None:
        """Release the connection of a run that has not ended, after an error."""


def tracker_class(name: str) -> type[Tracker]:
    """Return the class of a tracker other than MLflow.

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
        return load_attribute(str(TRACKERS[name].tracker))  # type: ignore[no-any-return]
    custom = load_setting("tracking.trackers", name)
    if isinstance(custom, type) and issubclass(custom, Tracker):
        return custom
    advice = "name a subclass of bandpo_cli.tracking.trackers.Tracker"
    raise ConfigError(f"{key}: no tracker; {advice}{definition_location(custom)}")
