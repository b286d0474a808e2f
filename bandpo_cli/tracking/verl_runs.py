"""MLflow runs of verl: which run a job wrote, and its metrics by the names of this package.

verl 0.9.1 logs with `utils/tracking.py`; MLflow has its names with `_at_` for @. docs/metrics.md compares the metrics.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from bandpo_cli.errors import RunError, UserError, redact_credentials
from bandpo_cli.tracking.mirror import mlflow_client
from bandpo_cli.tracking.store import short_error

NAMES = {
    "critic/score/mean": "train/reward",
    "response_length/mean": "train/response_length",
    "actor/pg_clipfrac": "clip/active_fraction",
    "actor/band_upper_fraction": "clip/upper_fraction",
    "actor/band_lower_fraction": "clip/lower_fraction",
    "actor/band_outside_fraction": "clip/outside_fraction",
    "actor/grad_norm": "optim/grad_norm",
    "actor/lr": "optim/lr",
    "timing_s/step": "time/step",
    "timing_s/gen": "time/sample",
    "timing_s/update_actor": "time/update",
    "timing_s/testing": "time/eval",
    "timing_s/save_checkpoint": "time/checkpoint",
}
"""Names here of verl's metrics that mean the same; the clipped shares are means over micro-batches there."""

TOKEN_MEANS = {"actor/entropy": "train/entropy", "actor/kl_loss": "kl/ref"}
"""Metrics that verl aggregates like the loss: the same only where that is the mean over tokens."""

_EVALUATION = re.compile(r"val-core/(.+)/acc/mean_at_(\d+)")


@dataclass(frozen=True)
class VerlRun:
    """An MLflow run of verl.

    Attributes:
        run_id: its id.
        status: its status at MLflow: FINISHED, FAILED, KILLED or RUNNING.
        start_ms: its start, milliseconds since 1970.
        records: the metrics per step, by the names of this package, with `step` and ascending.
        left_out: names of metrics of the policy and of evaluations that have no counterpart here.
    """

    run_id: str
    status: str
    start_ms: int
    records: list[dict[str, float]]
    left_out: tuple[str, ...]


def own_name(name: str, aggregation: str) -> str | None:
    """Return the name here of a metric of verl at MLflow; None for one that means something else or is unknown.

    Args:
        name: the metric at MLflow.
        aggregation: `objective.aggregation` of the run.
    """
    evaluation = _EVALUATION.fullmatch(name)
    if evaluation is not None:
        return f"eval/{evaluation[1]}/mean_at_{evaluation[2]}"
    if name in TOKEN_MEANS:
        return TOKEN_MEANS[name] if aggregation == "token-mean" else None
    return NAMES.get(name)


def read_verl_run(uri: str, experiment: str, name: str, run_id: str | None, aggregation: str) -> VerlRun:
    """Read the run of a job from MLflow.

    Args:
        uri: MLflow server or store.
        experiment: verl's `trainer.project_name`.
        name: verl's `trainer.experiment_name`, the name of the run; of several runs, the last one is read.
        run_id: the run, in place of experiment and name; None to look it up.
        aggregation: `objective.aggregation` of the run.

    Raises:
        UserError: there is no such experiment or run, or it has no metrics.
        RunError: MLflow cannot be reached, or answers with an error.
    """
    client = mlflow_client(uri)
    try:
        run = client.get_run(run_id) if run_id else _find_run(client, experiment, name)
        return _read_run(client, run, uri, aggregation)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever MLflow and the network raise ends as one line
        is_missing = getattr(error, "error_code", "") in (
            "RESOURCE_DOES_NOT_EXIST",
            "INVALID_PARAMETER_VALUE",
        )
        kind = UserError if is_missing else RunError
        raise kind(f"MLflow at {redact_credentials(uri)}: {short_error(error)}") from None


def _read_run(client: Any, run: Any, uri: str, aggregation: str) -> VerlRun:
    """Return a run with the metrics of its steps; other arguments and UserError as for `read_verl_run`."""
    records: dict[int, dict[str, float]] = {}
    left_out = []
    for key in sorted(run.data.metrics):
        own = own_name(key, aggregation)
        if own is None:
            if key.startswith(("actor/", "val-core/")):
                left_out.append(key)
            continue
        for value in client.get_metric_history(run.info.run_id, key):
            if math.isfinite(value.value):
                records.setdefault(value.step, {"step": value.step})[own] = value.value
    if not records:
        where = redact_credentials(uri)
        raise UserError(f"MLflow run {run.info.run_id} at {where}: it has no metrics of verl")
    return VerlRun(
        run.info.run_id,
        run.info.status,
        run.info.start_time,
        [records[step] for step in sorted(records)],
        tuple(left_out),
    )


def _find_run(client: Any, experiment: str, name: str) -> Any:
    """Return the last run of a name.

    Raises:
        UserError: there is no such experiment, or no such run in it.
    """
    found = client.get_experiment_by_name(experiment)
    if found is None:
        raise UserError(f"MLflow has no experiment '{experiment}'; give the store with --tracking-uri")
    runs = client.search_runs([found.experiment_id], order_by=["attributes.start_time DESC"])
    named = [run for run in runs if run.info.run_name == name]
    if not named:
        names = ", ".join(sorted({str(run.info.run_name) for run in runs})) or "none"
        raise UserError(
            f"experiment '{experiment}' has no run '{name}' (its runs: {names:.300}); name one with --run ID"
        )
    return named[0]
