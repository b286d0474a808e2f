"""Paired comparison of two evaluations: the difference of each metric over the shared problems, with its interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bandpo_cli.config.layers import flatten, read_layer
from bandpo_cli.errors import UserError, nearest, plural
from bandpo_cli.evaluation.scores import Interval
from bandpo_cli.evaluation.verdicts import MARGIN, Conclusion, check_margin, conclude
from bandpo_cli.paths import folders_containing, given_path, user_path
from bandpo_cli.storage.files import step_of
from bandpo_cli.storage.run_folder import RECORD_FILE, RunFolder, find_folder, find_run, is_run_folder
from bandpo_cli.storage.run_record import changes_evaluations, iterate_forks, read_record
from bandpo_cli.types import UNGRADED_VERDICTS

MEAN = "mean"
"""Name of mean@n in a comparison: its expectation does not depend on n, so n may differ between A and B."""

_COMPARED = ("pass_at_", "maj_at_", "answer_format", "truncation", "response_length")
"""Beginnings of the names of the compared metrics, besides `MEAN`."""

_ACCURACIES = (MEAN, "pass_at_", "maj_at_")
"""Beginnings of the names of the metrics in units of accuracy: more is better, and the margin applies to them."""

_SOURCES = ("task.name", "task.train", "task.heldout", "task.heldout_fraction", "task.revisions")
"""The settings that only choose the problems, which are compared by their ids."""


class MetricDifference(NamedTuple):
    """The mean of a metric in A and in B over the shared problems; `change` is B − A with its t-interval."""

    a: float
    b: float
    change: Interval
    conclusion: Conclusion


@dataclass(frozen=True)
class Comparison:
    """The comparison of one evaluation set in A and in B.

    A problem is compared by its share of correct completions, or by its mean reward if rewards are not just 0 and 1.
    """

    shared: int  # number of problems in both, and those only in A and only in B
    only_a: int
    only_b: int
    metrics: dict[str, MetricDifference]  # `reward` first, and only if rewards are not just 0 and 1
    wins: int  # problems with a higher value in B, and those with a lower and an equal one
    losses: int
    ties: int
    sign_test_p: float | None  # two-sided, of wins against losses; None where no problem differs
    changed_problems: list[tuple[str, float, float]]  # id, value in A, value in B; the largest change first
    questions: Mapping[str, str]  # the beginning of the question of each of these problems, by id

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "problems": {"shared": self.shared, "only_a": self.only_a, "only_b": self.only_b},
            "metrics": {
                name: {"a": a, "b": b, **change._asdict(), **asdict(conclusion)}
                for name, (a, b, change, conclusion) in self.metrics.items()
            },
            "wins": self.wins,
            "losses": self.losses,
            "ties": self.ties,
            "sign_test_p": self.sign_test_p,
            "moved": [
                {"problem": id_, "question": self.questions[id_], "a": a, "b": b}
                for id_, a, b in self.changed_problems
            ],
        }


@dataclass(frozen=True)
class ComparisonResult:
    """Two evaluations compared: the files of their records, their `differing_settings`, the comparison by set."""

    path_a: Path
    path_b: Path
    differences: Mapping[str, tuple[Any, Any]]
    sets: Mapping[str, Comparison]


def compare(a: str, b: str, runs_dir: Path | str = "runs", margin: float = MARGIN) -> ComparisonResult:
    """Compare two evaluations problem by problem: B − A, with paired 95% intervals and verdicts.

    Args:
        a: an evaluation's name in `runs_dir`, its folder or its eval.json; or RUN or RUN@STEP as evaluated in training.
        b: another one.
        margin: margin of equivalence, in units of accuracy.

    Raises UserError if there is no such evaluation, the two share no problem, or the margin is not between 0 and 1.
    """
    check_margin(margin)
    path_a, path_b = (_find_record(str(text), given_path(runs_dir)) for text in (a, b))
    records = _read_with_settings(path_a), _read_with_settings(path_b)
    return ComparisonResult(path_a, path_b, differing_settings(*records), compare_records(*records, margin))


def _find_record(text: str, runs_dir: Path) -> Path:
    """Return the record that `text` names: an evaluation, a JSON file, or RUN or RUN@STEP as evaluated in training."""
    folder = find_folder(text, runs_dir, RECORD_FILE)
    if folder is not None:
        return folder / RECORD_FILE
    if Path(text).suffix == ".json":
        return user_path(text)
    match = find_run(text, runs_dir)
    if match is None:
        names = {name for file in (RECORD_FILE, "config.yaml") for name in folders_containing(runs_dir, file)}
        where = f"{runs_dir}{nearest(text, sorted(names))}"
        raise UserError(f"no evaluation {text[:200]!r} in {where}; give its name or folder, or RUN@STEP")
    run, step = match
    records = {step_of(path): path for path in sorted((run.path / "evals").glob("step-*.json"))}
    steps = [number for number in records if number is not None]
    if not steps or step not in (None, *steps):
        evaluated = f"evaluated at: {', '.join(map(str, steps))}" if steps else "not evaluated in training"
        raise UserError(f"{text}: the run in {run.path} has no evaluation of that step; {evaluated}")
    return records[max(steps) if step is None else step]


def _read_with_settings(path: Path) -> dict[str, Any]:
    """Return a record. The record of an evaluation in training gets `config`, the settings of the run at that step."""
    record, run = read_record(path), path.absolute().parent.parent
    if "config" not in record and is_run_folder(run):
        record["config"] = flatten(read_layer(run / RunFolder.marker))
        for fork in iterate_forks(run):
            if (step_of(path) or 0) <= fork["step"]:
                record["config"] |= {key: old for key, (old, _) in fork.get("changed", {}).items()}
    return record


def differing_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that change completions or verdicts and differ, with their values in A and in B.

    They are `config` of the records. Of a scored file of completions only the grader is known.
    """
    files = [record["samples"] for record in (a, b) if record.get("samples")]
    if not (a.get("config") and b.get("config")) or (len(files) == 1 and not files[0].get("grader")):
        return {}
    values_a, values_b = (
        {"task.grader": file.get("grader")} if (file := record.get("samples")) else flatten(record["config"])
        for record in (a, b)
    )
    return {
        key: (values_a.get(key), values_b.get(key))
        for key in (["task.grader"] if files else {**values_a, **values_b})
        if (key == "seed" or changes_evaluations(key)) and key not in _SOURCES
        if values_a.get(key) != values_b.get(key)
    }


def compare_records(
    a: Mapping[str, Any], b: Mapping[str, Any], margin: float = MARGIN
) -> dict[str, Comparison]:
    """Compare the evaluation sets that two records (`eval.json`) share.

    The intervals are Student's t-intervals over problems of the differences, so that the difficulty of a problem, which
    affects both evaluations, cancels. Bootstrap intervals (BCa) are too narrow here where few problems differ: in
    simulations of 30 problems their coverage was 84% to 91%, and that of these intervals 95% to 97%.
    """
    sets_a, sets_b = a["sets"], b["sets"]
    labels = [label for label in sets_a if label in sets_b]
    if not labels:
        in_a, in_b = (", ".join(sets) or "no sets" for sets in (sets_a, sets_b))
        raise UserError(f"nothing to compare: A has {in_a}, B has {in_b}")
    return {label: _compare_sets(label, a, b, margin) for label in labels}


def _compare_sets(
    label: str, record_a: Mapping[str, Any], record_b: Mapping[str, Any], margin: float
) -> Comparison:
    a, b = _by_problem(record_a, label, "A"), _by_problem(record_b, label, "B")
    ids = [id_ for id_ in a if id_ in b]
    if not ids:
        differing = ", ".join(differing_settings(record_a, record_b)) or "no other setting"
        raise UserError(
            f"nothing to compare: A and B share no problem of '{label}'; A has {plural(len(a), 'problem')}, B "
            f"{len(b):,}; apart from the data, they differ in {differing}"
        )
    shared = [name for name in a[ids[0]] if name in b[ids[0]]]
    names = [*(name for name in shared if name == "reward"), MEAN]
    names += [name for name in shared if name.startswith(_COMPARED)]
    try:
        pairs = {name: [[float(rows[id_][name]) for id_ in ids] for rows in (a, b)] for name in names}
    except (KeyError, TypeError, ValueError):
        defect = "lacks a metric or has one that is no number; try bandpo eval --resume NAME"
        raise UserError(f"a problem of '{label}' {defect}") from None
    if pairs.get("reward") == pairs[MEAN]:
        del pairs["reward"]
    decisive = pairs.get("reward", pairs[MEAN])
    changed = [(id_, x, y) for id_, x, y in zip(ids, *decisive, strict=True) if x != y]
    wins = sum(y > x for _, x, y in changed)
    metrics = {name: _difference(name, x, y, margin) for name, (x, y) in pairs.items()}
    counts = len(ids), len(a) - len(ids), len(b) - len(ids)
    losses, ties = len(changed) - wins, len(ids) - len(changed)
    changed.sort(key=lambda change: -abs(change[2] - change[1]))
    from scipy.stats import binomtest

    # Problems that do not differ do not count.
    p = float(binomtest(wins, len(changed)).pvalue) if changed else None
    texts = record_b["sets"][label].get("questions", {})
    questions = {id_: str(texts.get(id_, "")) for id_, *_ in changed}
    return Comparison(*counts, metrics, wins, losses, ties, p, changed, questions)


def _difference(name: str, a: Sequence[float], b: Sequence[float], margin: float) -> MetricDifference:
    """Return the difference of a metric from its values by problem, with the interval and the verdict of the t-test."""
    from bandpo_cli.reports.compare_variants import paired_test

    changes = np.subtract(b, a)
    test, accuracy = paired_test(changes), name.startswith(_ACCURACIES)
    assert test is not None
    words = ("better", "worse") if accuracy or name == "reward" else ("higher", "lower")
    conclusion = conclude(changes, test.p, margin if accuracy else None, words=words, unit="problem")
    low, high = (math.nan if end is None else end for end in (test.change.low, test.change.high))
    change = Interval(test.change.mean, low, high)
    return MetricDifference(float(np.mean(a)), float(np.mean(b)), change, conclusion)


def _by_problem(record: Mapping[str, Any], label: str, which: str) -> dict[str, dict[str, Any]]:
    """Return the metrics of a set by problem id and name, not yet checked, mean@n under `MEAN`."""
    scores = record["sets"][label]
    if "by_problem" not in scores:
        raise UserError(f"{which} has no metrics by problem of '{label}'; finish the evaluation first")
    if (verdicts := scores.get("verdicts")) and UNGRADED_VERDICTS.issuperset(verdicts):
        graded = f"no answer of '{label}' in {which} was graded"
        raise UserError(f"nothing to compare: {graded}: {', '.join(verdicts)}")
    return {
        id_: {MEAN if name.startswith("mean_at_") else name: value for name, value in row.items()}
        for id_, row in scores["by_problem"].items()
    }
