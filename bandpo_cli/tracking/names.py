"""Metrics, params and tags of a run in the form that MLflow accepts."""

from __future__ import annotations

import getpass
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from bandpo_cli.config.layers import flatten
from bandpo_cli.errors import redact_credentials

MAX_NAME_CHARS = 250
MAX_PARAM_CHARS = 6000
MAX_TAG_CHARS = 5000
MAX_PARAMS_PER_BATCH = 100
MAX_METRICS_PER_BATCH = 1000
"""MLflow's limits (mlflow/utils/validation.py); for tags the smaller limit of servers before 2.9."""

FIRST_SECTION = "Main"
"""Section of MLflow's charts with copies of `FIRST_METRICS`.

MLflow 3.17 makes a section of the charts whose names are equal up to the last `/`, and sorts sections and charts by
code point, in which capital letters are first. Only names decide: a rearrangement stays in the user's browser.
"""

FIRST_METRICS = ("train/accuracy", "train/entropy", "train/reward")

_BIN = re.compile(r"(?:clip|gradient)/(.+)/p_([0-9.]+)_([0-9.]+)")

_WORDS = {"@": "_at_", "<": "_lt_", ">": "_gt_", "=": "_eq_", "%": "_pct_", "+": "_plus_"}


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

    Copies of `FIRST_METRICS` are added under `FIRST_SECTION`.
    """
    finite = {
        key: float(value)
        for key, value in record.items()
        if key != "step"
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }
    copies = {
        f"{FIRST_SECTION}/{key.rpartition('/')[2]}": finite[key] for key in FIRST_METRICS if key in finite
    }
    return {mlflow_name(_sortable_name(key)): value for key, value in finite.items()} | copies


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


def flat_params(config: Mapping[str, object]) -> dict[str, str]:
    """Return `config` as `a.b.c` → text: strings unchanged, anything else as JSON, at most 6000 characters.

    Passwords in addresses are redacted.
    """
    return {
        mlflow_name(key): redact_credentials(
            value if isinstance(value, str) else json.dumps(value, default=str)
        )[:MAX_PARAM_CHARS]
        for key, value in flatten(config, keep_empty=True).items()
    }


def run_tags(env: Mapping[str, Any], parent: str | None = None) -> dict[str, str]:
    """Return the tags of a run from its `env.json`: MLflow's own (source, user, commit) and the package versions.

    Args:
        env: content of `env.json`.
        parent: id of the MLflow run that MLflow shows the run under.
    """
    tags = {
        "mlflow.source.name": str(env.get("command", "bandpo")),
        "mlflow.source.type": "LOCAL",
        "mlflow.user": _user(),
    }
    if parent is not None:
        tags["mlflow.parentRunId"] = parent
    git = env.get("git")
    if git:
        tags |= {"mlflow.source.git.commit": git["commit"], "git.dirty": json.dumps(git["dirty"])}
    tags |= {f"version.{package}": version for package, version in env.get("versions", {}).items()}
    return {key: value[:MAX_TAG_CHARS] for key, value in tags.items()}


def _user() -> str:
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):  # a container may have no entry for the user
        return "unknown"
