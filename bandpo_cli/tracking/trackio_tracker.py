"""trackio as a tracker, in its local store; `trackio sync` sends a project from there to a Space.

In trackio 0.43 `Run.log` queues, an error of its thread loses the values with a warning, and `init` resumes a run by
its name. So values are written with the function that the thread calls. It ignores a row whose identifier it has.
"""

import contextlib
import io
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bandpo_cli.config.layers import flatten
from bandpo_cli.storage.files import file_digest
from bandpo_cli.tracking.trackers import Point, TrackedRun, Tracker


class TrackioTracker(Tracker):
    """A run in a trackio project: settings and summary in its config, the sweep as its group, files as an artifact."""

    title = "trackio"

    @classmethod
    def destination(cls, project: str) -> str:
        """Return trackio's folder and the project."""
        from trackio import utils

        return f"{utils.TRACKIO_DIR}/{project}"

    def __init__(self, run: TrackedRun) -> None:
        """Look up the last step that the store has of the run."""
        from trackio.run import Run
        from trackio.sqlite_storage import SQLiteStorage

        super().__init__(run)
        SQLiteStorage.validate_project_name(run.project)
        last = SQLiteStorage.get_max_step_for_run(run.project, run_id=run.id)
        self.last_step = -1 if last is None else int(last)
        config = flatten(run.config, keep_empty=True)
        # For the artifact, and the config with trackio's own keys; nothing is logged with it.
        self._run = Run(None, run.project, None, run.name, run.id, run.group, config, existing_runs=[])
        self.where = f"trackio show --project {shlex.quote(run.project)}"

    def log(self, points: Sequence[Point]) -> None:
        """Write the metrics of steps and the config."""
        self._write([(str(point.step), *point) for point in points])
        self.last_step = points[-1].step

    def _write(self, rows: Sequence[tuple[str, int, int, Mapping[str, Any]]]) -> None:
        """Write rows of identifier, step, time and values, and the config, also if the store has the rows."""
        from trackio.sqlite_storage import SQLiteStorage

        ids, steps, times, values = zip(*rows, strict=True)
        SQLiteStorage.bulk_log(
            self.run.project, self.run.name, [*values], [*steps],
            [datetime.fromtimestamp(time_ms / 1000, UTC).isoformat() for time_ms in times],
            self._run.config, [f"{self.run.id}-{name}" for name in ids], run_id=self.run.id,
        )  # fmt: skip

    def finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Add the summary to the config, and log the files as an artifact and the text of a sweep's report."""
        from trackio.artifact import Artifact
        from trackio.markdown import Markdown

        self._run.config |= {"status": status} | flatten({"summary": summary})
        artifact, now = Artifact(name=self.run.name, type=self.run.kind), int(time.time() * 1000)
        if self.last_step >= 0:
            self._write([(str(self.last_step), self.last_step, now, {})])
        for file in files:
            artifact.add_file(str(file), name=file.relative_to(self.run.folder).as_posix())
            if file.name == "report.md":
                text = Markdown(file.read_text(encoding="utf-8"))._to_dict()
                self._write([(file_digest(file), self.last_step, now, {"report": text})])
        if files:
            self._run.log_artifact(artifact)
        self.close()

    def close(self) -> None:
        """End the thread of trackio's run, which prints on standard output."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
