"""Trackers of optional packages: Weights & Biases, trackio, TensorBoard.

Behaviour of wandb 0.31, from its source and from tests:

- wandb-core, a process of its own, buffers what is logged, writes it to `<run folder>/wandb` and uploads it. SIGKILL of
  the training loses up to 32 KiB. A resumed online run continues after the last step that the server has; a step that
  is not larger than the last one is dropped.
- A run that is offline cannot be resumed: every process writes a file of its own. `wandb sync` of a second file with
  the same id replaces the history of the first one, unless one call sends both; a file that was cut off ends such a
  call. Therefore every process writes all steps, and removes the files that its own file replaces.
- `wandb.init` asks for an API key on a terminal if there is none.

Of trackio 0.43, which has a local store that `trackio sync` sends to a Space: `Run.log` queues, an error of its thread
loses the values with a warning, and `init` resumes a run by its name. So values are written with the function that the
thread calls. It ignores a row whose identifier it has.
"""

import contextlib
import glob
import io
import os
import re
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bandpo_cli.config.layers import flatten
from bandpo_cli.paths import relative_to_cwd
from bandpo_cli.storage.files import file_digest, iterate_metrics
from bandpo_cli.tracking.trackers import FIRST_SECTION, Point, TrackedRun, Tracker, TrackerUnavailableError

INIT_TIMEOUT_S, FINISH_TIMEOUT_S = 10.0, 30.0
"""Seconds for the answer of the server to a new run, and for the upload at its end; the rest is sent later."""

_EXIT_CODES = {"FINISHED": 0, "KILLED": 255}


def _wandb() -> Any:
    os.environ.setdefault("WANDB_SILENT", "true")  # read at the import
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # an outage prints lines of its telemetry
    import wandb

    return wandb


class WandbTracker(Tracker):
    """A run at W&B: settings in its config, the sweep as its group, the run's record as its files."""

    title = "W&B"

    @classmethod
    def destination(cls, project: str) -> str:
        """Return the server's address and the project, or `offline` in W&B's offline mode."""
        wandb = _wandb()
        settings = wandb.setup().settings
        if settings.mode in ("offline", "dryrun"):
            return "offline"
        if settings.mode == "disabled":
            raise TrackerUnavailableError("W&B is disabled; unset WANDB_MODE, or type: wandb enabled")
        if wandb.run is None and not wandb.login(prompt=False, verify=False):
            raise TrackerUnavailableError(
                "W&B has no API key; type wandb login or set WANDB_API_KEY, or WANDB_MODE=offline to keep a local copy"
            )
        return f"{settings.base_url}/{settings.entity or ''}/{project}"

    def __init__(self, run: TrackedRun) -> None:
        """Create the run, or continue the run that the server has."""
        super().__init__(run)
        wandb = _wandb()
        self._offline = wandb.setup().settings.mode in ("offline", "dryrun")
        self._replaced = [*(run.folder / "wandb").glob(f"offline-run-*-{run.id}*")] if self._offline else []
        settings = wandb.Settings(
            silent=True, console="off", init_timeout=INIT_TIMEOUT_S, finish_timeout=FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
        )  # fmt: skip
        self._run = wandb.init(
            dir=str(run.folder), id=run.id, name=run.name, group=run.group, job_type=run.kind, config=dict(run.config),
            project=os.environ.get("WANDB_PROJECT") or re.sub(r"[/\\#?%:]", "-", run.project)[:128],
            resume=None if self._offline else "allow", reinit="create_new", settings=settings,
        )  # fmt: skip
        self.last_step = self._run.starting_step - 1 if self._run.resumed else -1
        self._logged: int | None = None  # the last step that was logged
        folder = relative_to_cwd(Path(self._run.settings.sync_dir))
        self.where = f"wandb sync {shlex.quote(str(folder))}" if self._offline else str(self._run.url)

    def log(self, points: Sequence[Point]) -> None:
        """Hand the metrics to wandb-core, with the times of the steps."""
        complete = self.run.kind != "sweep"  # `finish` adds the report to the point of a sweep
        for point in points:
            values = point.metrics | {"_timestamp": point.time_ms / 1000}
            self._run.log(values, step=point.step, commit=complete)
            self._logged = point.step

    def finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Send the summary and the files, the report of a sweep as a panel, and wait for the upload."""
        wandb = _wandb()
        self._run.summary.update(dict(summary))
        for file in files:
            self._run.save(glob.escape(str(file)), base_path=str(self.run.folder), policy="now")
            if file.name == "report.html" and self._logged is not None:
                self._run.log({"report": wandb.Html(str(file))}, step=self._logged, commit=True)
        self._run.finish(exit_code=_EXIT_CODES.get(status, 1))
        for folder in self._replaced:
            if folder != Path(self._run.settings.sync_dir):
                shutil.rmtree(folder)

    def close(self) -> None:
        """Let go of the run, so that it can be opened again."""
        self._run.finish(exit_code=1)


class TrackioTracker(Tracker):
    """A run in a trackio project: settings and summary in its config, the sweep as its group, files as an artifact."""

    title = "trackio"

    @classmethod
    def destination(cls, project: str) -> str:
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


class TensorBoardTracker(Tracker):
    """Event files in `tensorboard/` of the run folder: metrics, and settings as text and as hyperparameters."""

    title = "TensorBoard"

    def __init__(self, run: TrackedRun) -> None:
        """Begin a file that replaces the points of earlier files after the last step that the folder still has."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        super().__init__(run)
        if run.kind == "train":  # a resume has removed steps, and repeats them
            steps = [record["step"] for record in iterate_metrics(run.folder / "metrics.jsonl")]
            self.last_step = min(self.last_step, max(steps, default=-1))
        folder = run.folder / "tensorboard"
        self._writer: Any = SummaryWriter(str(folder), purge_step=self.last_step + 1)
        self.where = f"tensorboard --logdir {shlex.quote(str(relative_to_cwd(folder)))}"
        settings = flatten(run.config)
        known = {key: v if isinstance(v, bool | int | float | str) else str(v) for key, v in settings.items()}
        for summary in hparams(known, {f"{FIRST_SECTION}/accuracy": 0.0}):
            self._writer.file_writer.add_summary(summary)
        self._add_text("settings", "".join(f"    {key}: {value}\n" for key, value in settings.items()))

    def _add_text(self, name: str, text: str) -> None:
        self._writer.add_text(name, text, self.last_step + 1)

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.metrics.items():
                self._writer.add_scalar(name, value, point.step, walltime=point.time_ms / 1000)
            self.last_step = point.step
        self._writer.flush()

    def finish(self, status: str, summary: Mapping[str, Any], files: Sequence[Path]) -> int:
        """Write the summary and the report of a sweep as texts; other files stay in the run folder."""
        content = flatten({"status": status, **summary})
        self._add_text("summary", "".join(f"    {key}: {value}\n" for key, value in content.items()))
        reports = [file for file in files if file.name == "report.md"]
        for file in reports:
            self._add_text("report", file.read_text(encoding="utf-8"))
        self.close()
        return len(reports)

    def close(self) -> None:
        self._writer.close()
