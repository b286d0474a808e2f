"""Names of metrics at trackers: legal at MLflow, and sorted as its charts are.

MLflow allows letters, digits and a few signs, so `@` and brackets are replaced. All trackers get the same names.
"""

import math
import re
from collections.abc import Mapping

from bandpo_cli.metric_names import HELDOUT_ACCURACY, HELDOUT_REWARD, heldout_mean

MAX_NAME_CHARS = 250
"""MLflow's limit (mlflow/utils/validation.py)."""

FIRST_SECTION = "Main"
"""Section of MLflow's charts with copies of `FIRST_METRICS` and the means over the evaluation sets.

MLflow 3.17 makes a section of the charts whose names are equal up to the last `/`, and sorts sections and charts by
code point, in which capital letters are first. Only names decide: a rearrangement stays in the user's browser.
"""

FIRST_METRICS = {
    "train/accuracy": "accuracy",
    "train/reward": "reward",
    "train/entropy": "entropy",
    "clip/active_fraction": "clip_fraction",
}

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

    Copies of `FIRST_METRICS` and the means of held-out accuracy and reward over the evaluation sets are added under
    `FIRST_SECTION`.
    """
    named = {_sortable_name(key): value for key, value in record.items() if key != "step"}
    first = {name: record.get(key) for key, name in FIRST_METRICS.items()}
    if "time/step" in record:  # a step of training, and not `bandpo eval` of its checkpoint
        first["heldout_accuracy"] = heldout_mean(record, HELDOUT_ACCURACY)
        first["heldout_reward"] = heldout_mean(record, HELDOUT_REWARD)
    named |= {f"{FIRST_SECTION}/{name}": value for name, value in first.items()}
    return {
        mlflow_name(name): float(value)
        for name, value in named.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


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
