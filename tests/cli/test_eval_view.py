"""Console view of evaluations: the histogram of problems and the counts and sign test of a comparison."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from bandpo_cli.cli.eval_view import histogram, print_comparison, ungraded_line
from bandpo_cli.evaluation.scores import Scores, score
from bandpo_cli.experiments.eval_comparison import ComparisonResult, compare_records
from tests.evaluation.test_scores import row


def _printed(ups: int, downs: int, ties: int) -> str:
    """Return the printed comparison of two evaluations with that many problems up, down and equal."""
    changes = [0.25] * ups + [-0.5] * downs + [0.0] * ties
    a, b = (
        {"sets": {"s": {"by_problem": {str(i): {"mean_at_4": value} for i, value in enumerate(values)}}}}
        for values in ([0.5] * len(changes), [0.5 + change for change in changes])
    )
    out = io.StringIO()
    result = ComparisonResult(Path("a"), Path("b"), compare_records(a, b))
    print_comparison(Console(file=out, width=200), result, 0, "table")
    return out.getvalue()


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ((4, 1, 3), "problems that differ: 5, p = 0.375; with fewer than 6 it cannot be below 0.05"),
        ((7, 1, 0), "problems that differ: 8, p = 0.070; with so few, the 95% interval is approximate"),
        ((30, 2, 9), "problems that differ: 32, p < 0.001\n"),
    ],
)
def test_a_comparison_counts_problems_and_tests_signs(counts: tuple[int, int, int], line: str) -> None:
    up, down, same = counts
    text = _printed(*counts)
    assert f"higher in B on {up} problems, lower on {down}, the same on {same}" in text
    assert f"exact sign test, {line}" in text


def test_a_comparison_without_differences_has_no_test() -> None:
    text = _printed(0, 0, 4)
    assert "higher in B on 0 problems, lower on 0, the same on 4" in text
    assert "sign test" not in text


def test_answers_without_a_verdict_are_counted_with_the_accuracy_they_could_add() -> None:
    """Problems of 2 and 4 completions have equal weights: (0 + 1/2)/2 of them correct, at most (1/2 + 3/4)/2."""
    verdicts = {"p": ["wrong", "timeout"], "q": ["correct", "correct", "grader-error", "wrong"], "r": []}

    def lines(of: str) -> str:
        rows = [row(name, None, verdict) for name in of for verdict in verdicts[name]]
        return ungraded_line(score("set", rows, (1,)))

    assert lines("pq") == (
        "2 of 6 answers were not graded (1 grader-error, 1 timeout) and count as not correct; with all of them "
        "correct, mean@n would be 0.625 instead of 0.250"
    )
    verdicts["r"] = ["wrong", "malformed"]
    assert lines("r") == ""


@pytest.mark.parametrize(
    ("fewest", "most", "shares", "title", "lines"),
    [
        (4, 4, [0.0, 0.25, 0.25, 1.0], "number of correct completions, of 4",
         {"never": "1", "1": "2", "2": "·", "3": "·", "always": "1"}),
        (1, 1, [0.0, 1.0, 1.0], "result of the only completion", {"wrong": "1", "correct": "2"}),
        (2, 5, [0.2, 0.5], "share of correct completions", None),
    ],
)  # fmt: skip
def test_the_histogram_of_problems(
    fewest: int, most: int, shares: list[float], title: str, lines: dict[str, str] | None
) -> None:
    by_problem = {str(i): {f"mean_at_{fewest}": share} for i, share in enumerate(shares)}
    first, *others = (line.plain for line in histogram(Scores(fewest, most, {}, by_problem, {})))
    assert first == f"problems by {title}"
    assert (
        len(others) == 12
        if lines is None
        else {line.split()[0]: line.split()[-1] for line in others} == lines
    )
