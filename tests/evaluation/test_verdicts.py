"""Verdicts agree with published examples, with statsmodels and with simulations of known truth."""

import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from statsmodels.stats.power import TTestPower

from bandpo_cli.errors import ConfigError
from bandpo_cli.evaluation.verdicts import check_margin, conclude, observations, smallest_effect

SLEEP = np.array([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])
"""Student (1908), hours of sleep gained by one drug over the other: t(9) = 4.062, p = 0.0028."""


def sample(mean: float, spread: float, n: int) -> NDArray[np.float64]:
    """Return n differences with exactly this mean and standard deviation."""
    values = np.random.default_rng(n).standard_normal(n)
    return mean + spread * (values - values.mean()) / values.std(ddof=1)


def p_of(changes: NDArray[np.float64]) -> float:
    return float(stats.ttest_1samp(changes, 0.0).pvalue)


def test_two_one_sided_tests_of_published_data():
    """The example of TOSTpaired.raw (Lakens 2017): means 5.83 and 5.75 of 65 pairs, r = 0.745, bounds ±0.34."""
    spread = math.sqrt(1.17**2 + 1.30**2 - 2 * 0.745 * 1.17 * 1.30)
    published = conclude(sample(5.83 - 5.75, spread, 65), 1.0, 0.34)
    assert published.p_equivalent == pytest.approx(0.0108, abs=1e-4)  # t(64) = −2.355
    # The sleep data with bounds ±0.5 (vignette of TOSTER): t = −4.062 + 0.5/0.389 = −2.777.
    assert conclude(SLEEP, 1.0, 0.5).p_equivalent == pytest.approx(stats.t.sf(-2.777, 9), abs=1e-4)
    assert conclude(SLEEP, p_of(SLEEP), 0.5).verdict == "better"


def test_equivalence_is_the_90_percent_interval_within_the_margin():
    rng = np.random.default_rng(3)
    seen = set()
    for _ in range(200):
        changes = rng.normal(0.005, 0.01, 4)
        low, high = stats.ttest_1samp(changes, 0.0).confidence_interval(0.9)
        inside = bool(low > -0.02 and high < 0.02)
        assert (conclude(changes, 1.0, 0.02).p_equivalent <= 0.05) == inside
        seen.add(inside)
    assert seen == {True, False}


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_sample_sizes_of_paired_t_tests(effect, pairs):
    """Cohen's small, medium and large effect at 5% and 80% power, as G*Power gives them."""
    assert observations(effect) == pairs
    assert smallest_effect(pairs) <= effect < smallest_effect(pairs - 1)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 30, 1000])
@pytest.mark.parametrize(("alpha", "power", "sides"), [(0.05, 0.8, 2), (0.0125, 0.8, 2), (0.05, 0.9, 1)])
def test_the_smallest_effect_has_the_power_by_statsmodels(n, alpha, power, sides):
    effect = smallest_effect(n, alpha, power, sides)
    computed = TTestPower().power(effect, n, alpha, alternative="two-sided" if sides == 2 else "larger")
    assert math.isfinite(effect)
    assert computed == pytest.approx(power, abs=1e-5) or (n == 2 and math.isnan(computed))


@pytest.mark.parametrize(
    ("mean", "spread", "n", "text"),
    [
        (0.05, 0.01, 5, "better"),
        (-0.05, 0.01, 5, "worse"),
        (0.01, 0.002, 5, "better by less than 0.02"),
        (-0.01, 0.002, 5, "worse by less than 0.02"),
        (0.0, 0.01, 5, "equivalent within ±0.02"),
        (0.0, 0.03, 5, "undecided: 16 more seeds"),  # of 21: effect ⅔ takes 20 two-sided, 21 one-sided at 90%
        (0.03, 0.04, 5, "undecided: 31 more seeds"),  # of 36: effect ½ takes 34 two-sided, 36 one-sided
        (0.012, 0.02, 12, "undecided: 12 more seeds"),  # 11 are enough for 0 or 0.02: 0.012 needs 24
    ],
)
def test_the_verdict_by_mean_and_spread(mean, spread, n, text):
    """A significant difference comes before equivalence, and says both."""
    changes = sample(mean, spread, n)
    conclusion = conclude(changes, p_of(changes))
    assert conclusion.verdict == text
    assert conclusion.detectable == pytest.approx(spread * smallest_effect(n))
    assert (conclusion.further is None) == (not text.startswith("undecided"))


def test_more_comparisons_detect_less_and_need_more_seeds():
    changes = sample(0.0, 0.04, 5)
    one, five = (conclude(changes, 1.0, family=family) for family in (1, 5))
    assert five.detectable == pytest.approx(0.04 * smallest_effect(5, 0.01))
    assert (five.detectable or 0) > (one.detectable or 0)
    assert (five.further or 0) > (one.further or 0)


def test_there_are_no_numbers_without_a_test():
    for changes, unit, text in (
        (np.array([0.1]), "seed", "one seed: no test"),
        (np.array([0.1]), "problem", "one problem: no test"),
        (np.array([0.1, 0.1]), "seed", "the same difference in every seed: no interval"),
        (np.array([0.0, 0.0]), "seed", "equal in every seed"),
    ):
        no_numbers = dict.fromkeys(("detectable", "p_equivalent", "further"))
        assert asdict(conclude(changes, None, unit=unit)) == {"verdict": text} | no_numbers
    found = conclude(sample(0.0, 0.1, 5), 1.0, None, words=("higher", "lower"))
    assert (found.verdict, found.p_equivalent, found.further) == ("undecided", None, None)
    assert conclude(sample(-0.3, 0.1, 5), 0.001, None, words=("higher", "lower")).verdict == "lower"


@pytest.mark.parametrize("margin", [0.0, -0.1, 1.0, math.nan, math.inf])
def test_a_margin_is_between_0_and_1(margin):
    with pytest.raises(ConfigError, match=r"--margin .*: a difference of accuracies above 0 and below 1, as"):
        check_margin(margin)


@pytest.mark.slow
def test_commands_without_verdicts_do_not_import_statsmodels():
    modules = "cli.report, bandpo_cli.cli.bounds, bandpo_cli.training.loop, bandpo_cli.sweeps.power"
    code = f"import sys, bandpo_cli.{modules}; sys.exit('statsmodels' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_error_rates_by_simulation(monkeypatch):
    """The rates of benchmarks/verdicts.py for 5 seeds and 128 problems, within three standard errors."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from verdicts import simulate_problems, simulate_seeds

    rng, count = np.random.default_rng(0), 100
    seeds = simulate_seeds("normal", 5, count, rng)
    problems = simulate_problems((0.5, 0.5), 128, 8, count, rng)
    error = 3 * math.sqrt(0.05 * 0.95 / count)
    for rates in (seeds, problems):
        assert abs(rates["difference"] - 0.95) < error
        assert max(rates["false better/worse"], rates["false equivalent"]) < 0.05 + error
        assert abs(rates["power"] - 0.8) < 3 * math.sqrt(0.8 * 0.2 / count)
    assert seeds["of five"] < 0.05 + error
    assert seeds["decided, 0"] > 0.7
