"""pass@k against an enumeration of every way to pick k of n."""

from __future__ import annotations

from itertools import combinations

import pytest

from bandpo_cli.config.run import EvaluationConfig
from bandpo_cli.evaluation.evaluate import due
from bandpo_cli.evaluation.metrics import legacy_best_at_k, pass_at_k


@pytest.mark.parametrize("n", [1, 3, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(n: int) -> None:
    for correct in range(n + 1):
        outcomes = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            picks = [any(pick) for pick in combinations(outcomes, k)]
            assert pass_at_k(n, correct, k) == pytest.approx(sum(picks) / len(picks))


def test_one_right_of_32_is_no_0_64() -> None:
    """Resampling with replacement would give 0.64 for pass@32; all 32 drawn hold the right one for certain."""
    assert pass_at_k(32, 1, 32) == 1.0
    assert pass_at_k(32, 1, 1) == pytest.approx(1 / 32)
    assert legacy_best_at_k(32, 1, 32) == pytest.approx(0.638, abs=1e-3)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_impossible_questions_are_refused(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, correct, k)


def test_evaluations_fall_at_the_start_the_cadence_and_the_end() -> None:
    config = EvaluationConfig(every=20)
    assert [step for step in range(51) if due(config, step, last_step=50)] == [0, 20, 40, 50]
    assert not any(due(EvaluationConfig(every=0), step, last_step=50) for step in range(51))
