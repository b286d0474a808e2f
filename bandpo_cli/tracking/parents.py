"""Evaluations at MLflow: added to the run that made the model where MLflow has it, else as a run of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from bandpo_cli.tracking.link import send_lock
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
) -> Path:
    """Send metrics and files, and return the folder that is linked to the MLflow run that has them.

    MLflow keeps the values that were sent before: scoring an evaluation again adds new ones.

    Args:
        store: where to send.
        folder: folder of the evaluation.
        run_folder: folder of the run that made the model, None without one.
        step: step of the checkpoint; the metrics appear at this step of the run's curves, at 0 for None.
        metrics: values by name; those that are not finite are left out.
        params, tags: of the MLflow run, where the evaluation has one of its own.
        files: files in `folder`; in the run of `run_folder` they are stored under `evals/<evaluation>/`.

    Raises:
        Exception: any error of MLflow and the network.
    """
    with ExitStack() as stack:
        # Links are written under the lock of the sender. The folder of someone else's run is only read.
        for each in filter(None, (folder, run_folder)):
            if os.access(each, os.W_OK):
                stack.enter_context(send_lock(each))
        found = None if run_folder is None else MlflowMirror.find(store, run_folder)
        mirror = found or MlflowMirror.find(store, folder)
        if mirror is None:
            mirror = MlflowMirror.connect(store, folder, folder.name, flat_params(params), tags)
        mirror.send([MetricRecord.of(step or 0, metrics)])
        for file in files:
            mirror.send_file(folder, file, under=f"evals/{folder.name}" if found else "")
        if found is None:
            mirror.close("FINISHED")
        return folder if found is None or run_folder is None else run_folder
