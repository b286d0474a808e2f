"""maj@k and pass@k are exact: against all subsets of k, and where rounding or overflow would matter."""

from collections import Counter
from fractions import Fraction
from itertools import combinations
from math import comb
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.config.batch_and_sampling import EvaluationConfig
from bandpo_cli.evaluation.scores import maj_at_k, pass_at_k

Votes = list[str | None]


def verdict_of(votes: Votes, correct: list[float]) -> dict[str, Fraction]:
    """Return the mean correctness of each answer."""
    pairs, answers = [*zip(votes, correct, strict=True)], {*votes} - {None}
    return {vote: mean(Fraction(right) for value, right in pairs if value == vote) for vote in answers}


def by_enumeration(votes: Votes, correct: list[float], k: int) -> float:
    """Return maj@k by enumeration: the vote in every subset of k; the winners of a tie share it."""
    verdicts = verdict_of(votes, correct)
    results = []
    for pick in combinations(votes, k):
        counts = Counter(vote for vote in pick if vote is not None)
        winners = [vote for vote, count in counts.items() if count == max(counts.values())]
        results.append(mean(verdicts[vote] for vote in winners) if winners else Fraction(0))
    return float(mean(results))


@st.composite
def elections(draw: st.DrawFn, most: int) -> tuple[Votes, list[float]]:
    """Generate completions of which some abstain; most answers are graded consistently, some both ways."""
    votes = draw(st.lists(st.sampled_from([None, "a", "b", "c", "d"]), min_size=1, max_size=most))
    grades = {vote: draw(st.sampled_from([[0.0], [1.0], [0.0, 1.0]])) for vote in "abcd"} | {None: [0.0]}
    return votes, [draw(st.sampled_from(grades[vote])) for vote in votes]


@given(elections(most=7))
def test_maj_at_k_is_the_mean_over_all_subsets(election):
    votes, correct = election
    for k in range(1, len(votes) + 1):
        assert maj_at_k(votes, correct, k) == pytest.approx(by_enumeration(votes, correct, k), abs=1e-12)


@pytest.mark.parametrize(
    ("votes", "k"),
    [("aabbcc", 4), ("abcdefgh", 5), ("aaabbbcd__", 6), ("aaaabbbcccdd", 6), ("aaaaab", 6), ("____ab", 3)],
)
def test_ties_of_many_answers(votes, k):
    """With two to five answers tied for the lead, each wins with the same probability."""
    cast = [None if vote == "_" else vote for vote in votes]
    correct = [float(vote == "a") for vote in cast]
    assert maj_at_k(cast, correct, k) == pytest.approx(by_enumeration(cast, correct, k), abs=1e-13)


@given(elections(most=30), st.randoms(use_true_random=False), st.data())
def test_the_order_and_the_names_of_answers_do_not_matter(election, random, data):
    """Bit for bit: evaluations with the same counts must not differ by rounding."""
    votes, correct = election
    k = data.draw(st.integers(1, len(votes)))
    value = maj_at_k(votes, correct, k)
    pairs = list(zip(votes, correct, strict=True))
    random.shuffle(pairs)
    other = {None: None, "a": "9", "b": "1/2", "c": "x", "d": ""}
    assert maj_at_k([other[vote] for vote, _ in pairs], [right for _, right in pairs], k) == value


@pytest.mark.slow
@pytest.mark.parametrize("k", [7, 999])
def test_a_thousand_completions_are_exact_without_overflow(k):
    """Three equally frequent answers win with probability 1/3 each; if all are correct, so is the vote."""
    votes = [str(index % 3) for index in range(999)] + [None]
    thirds = [maj_at_k(votes, [float(vote == right) for vote in votes], k) for right in "012"]
    assert sum(thirds) == pytest.approx(maj_at_k(votes, [1.0] * 1000, k), abs=1e-11)
    assert thirds == pytest.approx([thirds[0]] * 3, abs=1e-12)
    assert sum(thirds) == pytest.approx(1.0, abs=1e-11)


def test_the_winner_of_distinct_answers_is_random():
    """300 answers, one of them correct: it wins if it is among the k, with probability 1/k. Nothing wins no votes."""
    assert maj_at_k([None, None], [1.0, 0.0], 2) == 0.0
    votes = [str(index) for index in range(300)]
    for k in (1, 2, 150, 300):
        assert maj_at_k(votes, [1.0] + [0.0] * 299, k) == pytest.approx(1 / 300, rel=1e-12)


@st.composite
def counts(draw: st.DrawFn, most: int) -> tuple[int, int, int]:
    n = draw(st.integers(1, most))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@given(counts(most=400))
def test_pass_at_k_equals_the_fraction_and_the_product_form(n_correct_k):
    n, correct, k = n_correct_k
    exact = 1 - Fraction(comb(n - correct, k), comb(n, k))
    product = 1.0 if n - correct < k else 1 - np.prod(1 - k / np.arange(n - correct + 1, n + 1))
    assert pass_at_k(n, correct, k) == pytest.approx(float(exact), abs=1e-15)
    assert pass_at_k(n, correct, k) == pytest.approx(product, abs=1e-12)


def test_pass_at_32_of_one_correct_in_32_is_1():
    """Resampling with replacement would give 0.64; the 32 completions contain the correct one."""
    assert pass_at_k(32, 1, 32) == 1.0
    assert pass_at_k(32, 1, 1) == pytest.approx(1 / 32)
    # C(5000, 2500) has 1,504 digits, beyond the range of a float.
    assert pass_at_k(5000, 1, 2500) == pytest.approx(0.5, abs=1e-15)


def test_evaluations_are_due_at_the_start_at_every_nth_step_and_at_the_end():
    config = EvaluationConfig(every=20)
    assert [step for step in range(51) if config.is_due(step, last_step=50)] == [0, 20, 40, 50]
    assert not any(EvaluationConfig(every=0).is_due(step, last_step=50) for step in range(51))
