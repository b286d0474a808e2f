"""MLflow run of a sweep: the parent under which MLflow shows the sweep's runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bandpo_cli.storage.environment import describe_environment, redact_credentials
from bandpo_cli.sweeps.folder import PLAN_FILE, SweepFolder
from bandpo_cli.tracking.names import flat_params, run_tags
from bandpo_cli.tracking.store import Store, short_error

if TYPE_CHECKING:
    from bandpo_cli.tracking.mirror import MlflowMirror

log = logging.getLogger("bandpo_cli")


@dataclass
class SweepRunAtMlflow:
    """The MLflow run of a sweep that is executed.

    Attributes:
        run_id: the parent of the sweep's runs; None without MLflow, or where MLflow did not accept it.
        leaderboard: metrics of the arms, sent at the end.
    """

    run_id: str | None
    leaderboard: Mapping[str, float] = field(default_factory=dict)


@contextmanager
def sweep_mlflow_run(folder: SweepFolder, store: Store | None) -> Iterator[SweepRunAtMlflow]:
    """Open the sweep's MLflow run, and close it with the status and the leaderboard that the body set."""
    mirror = None if store is None else _connect(folder, store)
    parent = SweepRunAtMlflow(None if mirror is None else mirror.run_id)
    status = "FAILED"
    try:
        yield parent
        status = "FINISHED" if all(folder.is_finished(run.name) for run in folder.runs) else "FAILED"
    except (KeyboardInterrupt, SystemExit):
        status = "KILLED"
        raise
    finally:
        if mirror is not None:
            _close(mirror, folder, status, parent.leaderboard)


def _connect(folder: SweepFolder, store: Store) -> MlflowMirror | None:
    from bandpo_cli.tracking.mirror import MlflowMirror

    params = {
        "arms": sorted({run.arm for run in folder.runs}),
        "runs": len(folder.runs),
        "baseline": folder.baseline,
    }
    try:
        mirror = MlflowMirror.connect(
            store, folder.path, folder.name, flat_params(params), run_tags(describe_environment())
        )
        mirror.reopen()
        return mirror
    except Exception as error:  # noqa: BLE001 - whatever MLflow raises, the runs continue without it
        log.warning(
            "MLflow at %s did not accept the sweep (%s); its runs are not grouped there",
            redact_credentials(store.uri),
            short_error(error),
        )
        return None


def _close(mirror: MlflowMirror, folder: SweepFolder, status: str, leaderboard: Mapping[str, float]) -> None:
    from bandpo_cli.tracking.mirror import MetricRecord

    finished = sum(folder.is_finished(run.name) for run in folder.runs)
    try:
        mirror.close(status)  # first: a file that cannot be stored must not leave the run as RUNNING forever
        # The number of finished runs as the step: a resume adds runs, and its leaderboard does not replace this one.
        mirror.send([MetricRecord.of(finished, leaderboard)])
        for file in [folder.path / PLAN_FILE, *sorted((folder.path / "report").glob("*"))]:
            mirror.send_file(folder.path, file)
    except Exception as error:  # noqa: BLE001 - as above
        log.warning("MLflow did not accept the sweep's end (%s)", short_error(error))
