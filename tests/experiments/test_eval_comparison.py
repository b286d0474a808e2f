"""Comparison of two evaluations: metrics are paired by problem, and damaged records give one error line."""

import json
import math
import re
from typing import Any

import pytest
from scipy import stats

from bandpo_cli.errors import UserError
from bandpo_cli.experiments.eval_comparison import compare_records, differing_settings
from bandpo_cli.storage.files import replace_nonfinite


def record(**sets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {"sets": {label: {"by_problem": by_problem} for label, by_problem in sets.items()}}


A = record(
    math={
        "p": {"mean_at_4": 0.25, "pass_at_4": 1.0, "response_length": 100.0, "timeout_rate": 0.0},
        "q": {"mean_at_4": 0.5, "pass_at_4": 1.0, "response_length": 200.0, "timeout_rate": 0.0},
        "r": {"mean_at_4": 0.0, "pass_at_4": 0.0, "response_length": 300.0, "timeout_rate": 0.0},
        "only a": {"mean_at_4": 1.0, "pass_at_4": 1.0, "response_length": 9.0, "timeout_rate": 0.0},
    }
)
B = record(
    math={
        "only b": {"mean_at_8": 1.0, "pass_at_8": 1.0, "response_length": 9.0, "pass_at_4": 1.0},
        "another": {"mean_at_8": 1.0, "pass_at_8": 1.0, "response_length": 9.0, "pass_at_4": 1.0},
        "r": {"mean_at_8": 0.75, "pass_at_8": 1.0, "response_length": 150.0, "pass_at_4": 1.0},
        "q": {"mean_at_8": 0.375, "pass_at_8": 1.0, "response_length": 250.0, "pass_at_4": 0.9},
        "p": {"mean_at_8": 0.25, "pass_at_8": 1.0, "response_length": 50.0, "pass_at_4": 0.8},
    }
)


def test_a_comparison_by_hand():
    """n = 4 against n = 8: the means are compared, pass@8 is only in one, and timeouts are not compared."""
    comparison = compare_records(A, B)["math"]
    assert (comparison.shared, comparison.only_a, comparison.only_b) == (3, 1, 2)
    assert set(comparison.metrics) == {"mean", "pass_at_4", "response_length"}
    *means, change, conclusion = comparison.metrics["mean"]
    assert means == pytest.approx([0.75 / 3, 1.375 / 3])
    test = stats.ttest_rel([0.75, 0.375, 0.25], [0.0, 0.5, 0.25])
    assert change == pytest.approx((0.625 / 3, *test.confidence_interval(0.95)))
    assert re.fullmatch(r"undecided: [\d,]+ more problems", conclusion.verdict)
    *lengths, change, conclusion = comparison.metrics["response_length"]
    assert [*lengths, change.value] == pytest.approx([200, 150, -50])
    assert (conclusion.verdict, conclusion.p_equivalent, conclusion.further) == ("undecided", None, None)
    assert comparison.metrics["pass_at_4"][2].value == pytest.approx((1.0 - 0.1 - 0.2) / 3)
    assert (comparison.wins, comparison.losses, comparison.ties) == (1, 1, 1)
    assert comparison.changed_problems == [("r", 0.0, 0.75), ("q", 0.5, 0.375)]


def test_an_evaluation_without_grades_is_not_compared():
    ungraded = {"sets": {"math": B["sets"]["math"] | {"verdicts": {"not-applicable": 20, "timeout": 4}}}}
    with pytest.raises(UserError, match="no answer of 'math' in B was graded: not-applicable, timeout"):
        compare_records(A, ungraded)


@pytest.mark.parametrize(
    ("ups", "downs", "p"), [(0, 0, None), (1, 0, 1), (5, 0, 2 / 32), (1, 7, 2 * (1 + 8) / 256), (3, 3, 1)]
)
def test_the_sign_test_by_hand(ups, downs, p):
    changes = [0.25] * ups + [-0.5] * downs + [0.0] * 4
    a = record(s={str(i): {"mean_at_4": 0.5} for i, _ in enumerate(changes)})
    b = record(s={str(i): {"mean_at_4": 0.5 + change} for i, change in enumerate(changes)})
    comparison = compare_records(a, b)["s"]
    assert (comparison.wins, comparison.losses, comparison.ties) == (ups, downs, 4)
    assert comparison.sign_test_p == (None if p is None else pytest.approx(p))
    assert comparison.as_json()["sign_test_p"] == comparison.sign_test_p


@pytest.mark.parametrize(("rewards", "metrics"), [((0.25, 0.5), ["reward", "mean"]), ((0.0, 0.0), ["mean"])])
def test_rewards_other_than_0_and_1_decide(rewards, metrics):
    a, b = (
        record(s={str(i): {"mean_at_4": 0.0, "reward": value} for i, value in enumerate(values)})
        for values in (rewards, (max(rewards), max(rewards)))
    )
    (compared,) = compare_records(a, b).values()
    assert list(compared.metrics) == metrics
    assert (compared.wins, compared.losses, compared.ties) == ((1, 0, 1) if len(metrics) > 1 else (0, 0, 2))


def test_a_comparison_with_itself_has_no_changes():
    comparison = compare_records(A, A)["math"]
    assert (comparison.wins, comparison.losses, comparison.ties, comparison.changed_problems) == (0, 0, 4, [])
    for _, _, change, _ in comparison.metrics.values():
        assert change.value == 0
        assert math.isnan(change.low)
    plain = json.loads(json.dumps(replace_nonfinite(comparison.as_json()), allow_nan=False))
    none = dict.fromkeys(("low", "high", "detectable", "p_equivalent", "further"))
    verdict = "equal in every problem"
    assert plain["metrics"]["mean"] == {"a": 0.4375, "b": 0.4375, "value": 0.0, "verdict": verdict, **none}
    assert plain["problems"] == {"shared": 4, "only_a": 0, "only_b": 0}


def test_only_shared_sets_problems_and_metrics_are_read():
    assert list(compare_records({"sets": {**A["sets"], "other": None}}, B)) == ["math"]
    row = {"mean_at_2": 0.5, "unknown": None, "maj_at_2": None}
    a = record(s={"p": row, "only a": {"mean_at_2": None}})
    b = record(s={"p": {"mean_at_2": 1, "unknown": None}})
    comparison = compare_records(a, b)["s"]
    assert (list(comparison.metrics), comparison.metrics["mean"][1], comparison.shared) == (["mean"], 1.0, 1)


SETTINGS: dict[str, Any] = {
    "seed": 0,
    "task": {"name": "data", "template": "{question}", "train": [{"path": "a.jsonl"}]},
    "sampling": {"max_tokens": 8, "prompts": 4},
}


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({}, {}),
        ({"seed": 1}, {"seed": (0, 1)}),
        ({"sampling": {"max_tokens": 9, "prompts": 5}}, {"sampling.max_tokens": (8, 9)}),
        ({"task": {"name": "gsm8k", "template": "boxed"}}, {"task.template": ("{question}", "boxed")}),
        ({"model": {"path": "x", "prompts": "raw"}}, {"model.prompts": (None, "raw")}),
        (
            {"model": {"chat_template_kwargs": {"think": True}}},
            {"model.chat_template_kwargs.think": (None, True)},
        ),
        ({"sampling": {"max_tokens": 8, "max_lag": 2, "stop": ["."]}}, {"sampling.stop": (None, ["."])}),
    ],
)
def test_settings_that_change_completions_are_compared(changes, differences):
    """Not those of training, and not the data, whose problems have ids; of scored files the grader is known."""
    a, b = {"config": SETTINGS}, {"config": {**SETTINGS, **changes}}
    assert differing_settings(a, b) == differences
    file, other = ({**b, "samples": {"path": "a.parquet", "grader": grader}} for grader in (None, "math"))
    assert differing_settings(a, file) == differing_settings(file, file) == differing_settings(a, {}) == {}
    assert differing_settings(a, other) == differing_settings(file, other) == {"task.grader": (None, "math")}


def test_records_without_a_shared_problem_name_the_settings_that_differ():
    a = record(s={"p": GOOD["p"]}) | {"config": SETTINGS}
    b = record(s={"x": GOOD["p"], "y": GOOD["q"]}) | {"config": {**SETTINGS, "seed": 1}}
    with pytest.raises(UserError, match=r"A has 1 problem, B 2; apart from the data, they differ in seed$"):
        compare_records(a, b)


@pytest.mark.parametrize(
    ("metric", "shift", "noise", "verdict"),
    [
        ("mean_at_4", 0.1, 0.01, "better"),
        ("mean_at_4", -0.1, 0.01, "worse"),
        ("pass_at_4", 0.01, 0.01, "better by less than 0.02"),
        ("mean_at_4", 0.0, 0.01, "equivalent within ±0.02"),
        ("maj_at_4", 0.0, 0.1, "undecided: 199 more problems"),  # 225 ≈ (1.645 + 1.282)² · 0.102² / 0.02²
        ("answer_format_rate", -0.1, 0.01, "lower"),
        ("answer_format_rate", 0.0, 0.01, "undecided"),
    ],
)
def test_verdicts(metric, shift, noise, verdict):
    """Differences of 26 problems: `shift` ± `noise`. The margin applies to metrics in units of accuracy only."""
    rows = [{str(i): {"mean_at_4": 0.5, metric: 0.5} for i in range(26)} for _ in "ab"]
    for i in range(26):
        rows[1][str(i)][metric] += shift + (noise if i % 2 else -noise)
    compared = compare_records(*(record(s=by_problem) for by_problem in rows))["s"]
    name = "mean" if metric == "mean_at_4" else metric
    assert compared.metrics[name].conclusion.verdict == verdict


GOOD = {"p": {"mean_at_2": 0.5, "pass_at_2": 1.0}, "q": {"mean_at_2": 0.0, "pass_at_2": 0.0}}


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        ({"sets": {}}, "nothing to compare: A has no sets, B has s"),
        (record(other=GOOD), "nothing to compare: A has other, B has s"),
        (record(s={"x": GOOD["p"]}), "share no problem of 's'"),
        (record(s={}), "share no problem of 's'"),
        ({"sets": {"s": {"problems": 2}}}, "A has no metrics by problem of 's'"),
        (record(s={"p": {"pass_at_2": 1.0}, "q": GOOD["q"]}), "a problem of 's' lacks a metric or has one that is no"),
        (record(s={"p": {**GOOD["p"], "mean_at_2": None}, "q": GOOD["q"]}), "a problem of 's' lacks a metric"),
    ],
)  # fmt: skip
def test_damaged_records_give_one_error_line(damaged, words):
    for pair, expected in (((damaged, record(s=GOOD)), words), ((record(s=GOOD), damaged), "")):
        with pytest.raises(UserError) as error:
            compare_records(*pair)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 300
        assert expected in str(error.value)
