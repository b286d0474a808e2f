"""pass@k against enumeration, exact fractions and the product form; best@k against its values by hand."""

from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.config.batch_and_sampling import EvaluationConfig
from bandpo_cli.evaluation.scores import pass_at_k


@pytest.mark.parametrize("n", [1, 3, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(n: int) -> None:
    for correct in range(n + 1):
        outcomes = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            picks = [any(pick) for pick in combinations(outcomes, k)]
            assert pass_at_k(n, correct, k) == pytest.approx(sum(picks) / len(picks))


@st.composite
def counts(draw: st.DrawFn, most: int) -> tuple[int, int, int]:
    n = draw(st.integers(1, most))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@given(counts(most=400))
def test_pass_at_k_equals_the_fraction_and_the_product_form(n_correct_k: tuple[int, int, int]) -> None:
    n, correct, k = n_correct_k
    exact = 1 - Fraction(comb(n - correct, k), comb(n, k))
    product = 1.0 if n - correct < k else 1 - np.prod(1 - k / np.arange(n - correct + 1, n + 1))
    assert pass_at_k(n, correct, k) == pytest.approx(float(exact), abs=1e-15)
    assert pass_at_k(n, correct, k) == pytest.approx(product, abs=1e-12)


def test_pass_at_32_of_one_correct_in_32_is_1() -> None:
    """Resampling with replacement would give 0.64; the 32 completions contain the correct one."""
    assert pass_at_k(32, 1, 32) == 1.0
    assert pass_at_k(32, 1, 1) == pytest.approx(1 / 32)
    # C(5000, 2500) has 1,504 digits, beyond the range of a float.
    assert pass_at_k(5000, 1, 2500) == pytest.approx(0.5, abs=1e-15)


def test_evaluations_are_due_at_the_start_at_every_nth_step_and_at_the_end() -> None:
    config = EvaluationConfig(every=20)
    assert [step for step in range(51) if config.is_due(step, last_step=50)] == [0, 20, 40, 50]
    assert not any(EvaluationConfig(every=0).is_due(step, last_step=50) for step in range(51))
