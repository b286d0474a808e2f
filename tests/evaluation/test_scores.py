"""Every metric of an evaluation by hand, and one error line for completions that cannot be scored."""

import math
from typing import Any

import pytest

from bandpo_cli.errors import ConfigError
from bandpo_cli.evaluation.scores import mean_intervals, metric_record, score
from bandpo_cli.storage.tables import EvalRow


def row(problem: str, answer: str | None, verdict: str, **other: Any) -> EvalRow:
    columns = {"reward": None, "length": 10, "finish_reason": "stop", **other}
    return EvalRow(
        task="set", problem_id=problem, question="?", prompt="?", reference="18", grader="math", extra="{}", text="",
        answer=answer,
        accuracy=float(verdict == "correct"), verdict=verdict, logprob_sum=None, **columns,
    )  # fmt: skip


ROWS = [
    row("p", "18", "correct", length=10),
    row("p", "18", "correct", length=20),
    row("p", "7", "wrong", length=30),
    row("p", None, "malformed", length=100, finish_reason="length"),
    row("q", "3", "wrong", length=5),
    row("q", "3", "timeout", length=5),
    row("q", "18", "correct", length=5),
    row("q", "4", "grader-error", length=25),
]

BY_HAND = {
    "mean_at_4": (2 / 4, 1 / 4),
    "pass_at_1": (1 / 2, 1 / 4),
    "pass_at_2": (1 - 1 / 6, 1 - 3 / 6),  # pairs without a right one: 1 and C(3, 2) of 6
    # p: of the 6 pairs {18,18}, 2 × {18,none} are right, 2 × {18,7} by halves, {7,none} is wrong.
    # q: {3,3}, 2 × {3,4} are wrong; 2 × {3,18} and {18,4} are right by halves.
    "maj_at_2": ((1 + 2 + 2 / 2) / 6, (3 / 2) / 6),
    "maj_at_1": (2 / 4, 1 / 4),
    "answer_format_rate": (3 / 4, 1.0),
    "truncation_rate": (1 / 4, 0.0),
    "response_length": (40.0, 10.0),
    "timeout_rate": (0.0, 1 / 4),
    "grader_error_rate": (0.0, 1 / 4),
    "not_applicable_rate": (0.0, 0.0),
}


@pytest.mark.parametrize("order", [range(8), (6, 0, 5, 3, 1, 7, 2, 4)])
def test_every_metric(order):
    """There is no best@k without a request."""
    scores = score("set", [ROWS[index] for index in order], (1, 2))
    assert set(scores.metrics) == set(BY_HAND)
    for name, (p, q) in BY_HAND.items():
        assert (scores.by_problem["p"][name], scores.by_problem["q"][name]) == pytest.approx((p, q)), name
        assert scores.metrics[name] == pytest.approx(mean_intervals([[p, q]])[0], nan_ok=True), name
        assert scores.metrics[name].value == pytest.approx((p + q) / 2), name
    assert (scores.fewest, scores.most, scores.completions) == (4, 4, 8)
    assert scores.verdicts == {"correct": 3, "wrong": 2, "malformed": 1, "timeout": 1, "grader-error": 1}


def test_uneven_numbers_of_completions():
    """Problems have equal weight for any number of completions; the name mean_at_n shows that n differs."""
    scores = score("set", [*ROWS, row("q", "18", "correct", length=60)], (2,))
    assert scores.metrics["mean_at_n"].value == pytest.approx((2 / 4 + 2 / 5) / 2)
    assert scores.metrics["pass_at_2"].value == pytest.approx((1 - 1 / 6 + 1 - 3 / 10) / 2)
    assert scores.metrics["response_length"].value == pytest.approx((40 + 20) / 2)
    assert not any(name.startswith("mean_at_") for name in set(scores.metrics) - {"mean_at_n"})
    record = scores.as_json()
    assert (record["problems"], record["completions"], record["completions_per_problem"]) == (2, 9, [4, 5])
    assert record["metrics"]["mean_at_n"].keys() == {"value", "low", "high"}
    assert record["by_problem"]["q"]["mean_at_n"] == 0.4


def test_an_answer_with_different_grades_counts_by_their_mean():
    rows = [row("p", "18", "correct"), row("p", "18", "timeout"), row("p", "5", "wrong")]
    assert score("set", rows, (3,)).metrics["maj_at_3"].value == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("column", "left_out"), [("length", "response_length"), ("finish_reason", "truncation_rate")]
)
def test_metrics_of_unknown_columns_are_left_out(column, left_out):
    """Even if a single completion lacks the value: the mean over the others would be another quantity."""
    rows = [*ROWS[:-1], row("q", "4", "grader-error", **{column: None})]
    scores = score("set", rows, (1, 2))
    assert set(scores.metrics) == set(BY_HAND) - {left_out}
    assert all(set(values) == set(scores.metrics) for values in scores.by_problem.values())


def test_completions_that_cannot_be_scored_are_refused():
    with pytest.raises(ConfigError, match=r"--k 5.*p of 'gsm8k' has 4.*at most 4"):
        score("gsm8k", [*ROWS, row("q", "18", "correct")], (2, 5))
    with pytest.raises(ConfigError, match="'gsm8k' has no completions"):
        score("gsm8k", [], (2, 5))


def test_names_in_metrics_jsonl():
    scores = {"aime-2024": score("aime-2024", ROWS, (2,)), "b": score("b", ROWS[:4], ())}
    found = metric_record(scores, with_intervals=True)
    assert found["eval/aime-2024/mean_at_4"] == pytest.approx(3 / 8)
    interval = scores["aime-2024"].metrics["mean_at_4"]
    assert found["eval/aime-2024/mean_at_4_low"] == interval.low < found["eval/aime-2024/mean_at_4"]
    assert found["eval/aime-2024/mean_at_4_high"] == interval.high > found["eval/aime-2024/mean_at_4"]
    assert math.isnan(found["eval/b/mean_at_4_low"])  # a single problem
    assert next(iter(scores["b"].metrics)) == "mean_at_4"  # without any k
    plain = metric_record(scores)
    assert set(found) == set(plain) | {f"{name}_{end}" for name in plain for end in ("low", "high")}
    names = {name.removeprefix("eval/aime-2024/") for name in plain if "aime" in name}
    assert names == set(BY_HAND) - {"pass_at_1", "maj_at_1"}


def test_the_mean_reward_counts_an_answer_without_a_reward_as_0():
    timeout = row("p", None, "timeout")
    rows = [row("p", None, "wrong", reward=0.5), timeout, row("q", None, "wrong", reward=-1.0)]
    scores = score("set", rows, ())
    assert {id_: values["reward"] for id_, values in scores.by_problem.items()} == {"p": 0.25, "q": -1.0}
    assert scores.metrics["reward"] == mean_intervals([[0.25, -1.0]])[0]
    assert scores.nonbinary_rewards
    binary = [row("p", None, "correct", reward=1.0), timeout, row("q", None, "wrong", reward=0.0)]
    assert not score("set", binary, ()).nonbinary_rewards
    ungraded = score("set", [row("p", None, "not-applicable"), row("q", None, "timeout")], ())
    assert "reward" not in ungraded.metrics
    assert (ungraded.graded, ungraded.nonbinary_rewards) == (False, False)
