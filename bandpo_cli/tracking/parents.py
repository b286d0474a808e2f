"""An evaluation at MLflow: with the run that made the model where that is known there, else as a run of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bandpo_cli.tracking.mirror import MetricRecord, MlflowMirror
from bandpo_cli.tracking.names import flat_params
from bandpo_cli.tracking.store import Store


def send_evaluation(
    store: Store,
    folder: Path,
    run_folder: Path | None,
    step: int | None,
    metrics: Mapping[str, float],
    params: Mapping[str, object],
    tags: Mapping[str, str],
    files: Sequence[Path],
) -> str:
    """Send metrics and files, and return the name of the MLflow run that has them.

    An evaluation that is sent again, because it was scored again, adds to what was sent before.

    Args:
        folder: the evaluation's.
        run_folder: that of the run which made the model, if one did.
        step: the checkpoint's; the metrics stand there in the run's curves.
        files: files in `folder`; in another run they lie under `evals/<the evaluation's name>/`.

    Raises:
        Exception: whatever MLflow and the network raise.
    """
    found = None if run_folder is None else MlflowMirror.find(store, run_folder)
    mirror = found or MlflowMirror.find(store, folder)
    if mirror is None:
        mirror = MlflowMirror.connect(store, folder, folder.name, flat_params(params), tags)
    mirror.send([MetricRecord.of(step or 0, metrics)])
    for file in files:
        mirror.send_file(folder, file, under=f"evals/{folder.name}" if found else "")
    if found is None:
        mirror.close("FINISHED")
    return folder.name if found is None or run_folder is None else run_folder.name
