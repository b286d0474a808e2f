"""MLflow run of a sweep: the parent under which MLflow shows the sweep's runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bandpo_cli.errors import redact_credentials
from bandpo_cli.storage.environment import describe_environment
from bandpo_cli.sweeps.folder import PLAN_FILE, SweepFolder
from bandpo_cli.tracking.link import run_url
from bandpo_cli.tracking.names import flat_params, run_tags
from bandpo_cli.tracking.store import Store, is_server, short_error

if TYPE_CHECKING:
    from bandpo_cli.reports.comparison.variants import Report
    from bandpo_cli.tracking.mirror import MlflowMirror

log = logging.getLogger("bandpo_cli")

NOTE_HEADING = (
    "Means over seeds and 95% intervals of the finished runs; more in the artifact `report/report.html`."
)
"""The first line of the description of a sweep's MLflow run; a description with another one is the user's."""


def leaderboard_metrics(report: Report) -> dict[str, float]:
    """Return the means of the leaderboard as metrics: `sweep/<variant>/<column of leaderboard.csv>`."""
    return {
        f"sweep/{arm.name}/{key}": estimate.mean
        for arm in report.arms
        for key, estimate in arm.figures.items()
    }


@contextmanager
def sweep_mlflow_run(
    folder: SweepFolder, store: Store | None, report: Callable[[], Report | None]
) -> Iterator[str | None]:
    """Open the sweep's MLflow run, and close it with its status and the leaderboard of the report.

    Args:
        report: returns, at the end, the report over the sweep's runs.

    Yields:
        The parent of the sweep's runs; None without MLflow, or where MLflow did not accept it.
    """
    mirror = None if store is None else _connect(folder, store)
    status = "FAILED"
    try:
        yield None if mirror is None else mirror.run_id
        status = "FINISHED" if all(folder.is_finished(run.name) for run in folder.runs) else "FAILED"
    except (KeyboardInterrupt, SystemExit):
        status = "KILLED"
        raise
    finally:
        if mirror is not None:
            _close(mirror, folder, status, report())


def _connect(folder: SweepFolder, store: Store) -> MlflowMirror | None:
    from bandpo_cli.tracking.mirror import MlflowMirror

    params = {
        "arms": sorted({run.arm for run in folder.runs}),
        "runs": len(folder.runs),
        "baseline": folder.baseline,
    }
    try:
        mirror = MlflowMirror.connect(store, folder.path, run_tags(describe_environment()))
        mirror.send_params(flat_params(params))
        mirror.reopen()
        if is_server(store.uri):
            log.info("MLflow: %s", run_url(folder.path, store))
        return mirror
    except Exception as error:  # noqa: BLE001 - whatever MLflow raises, the runs continue without it
        log.warning(
            "MLflow at %s did not accept the sweep (%s); its runs are not grouped there",
            redact_credentials(store.uri),
            short_error(error),
        )
        return None


def _close(mirror: MlflowMirror, folder: SweepFolder, status: str, report: Report | None) -> None:
    from bandpo_cli.reports.comparison.tables import render

    try:
        mirror.close(status)  # first: a file that cannot be stored must not leave the run as RUNNING forever
        if report is not None:
            # At step 0 MLflow shows a metric as a bar and not as a curve of one point. A resume sends values again; of
            # several at the same step MLflow shows the latest.
            mirror.send([{"step": 0, **leaderboard_metrics(report)}], {}, again=True)
            mirror.describe(f"{NOTE_HEADING}\n\n{render('leaderboard.md', report)}", NOTE_HEADING)
        for file in [folder.path / PLAN_FILE, *sorted((folder.path / "report").glob("*"))]:
            mirror.send_file(folder.path, file)
    except Exception as error:  # noqa: BLE001 - as above
        log.warning("MLflow did not accept the sweep's end (%s)", short_error(error))
