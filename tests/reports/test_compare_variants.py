"""Statistics of a report agree with scipy and with cases computed by hand; there is no interval without variance."""

import math
from dataclasses import astuple

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from bandpo_cli.evaluation.verdicts import holm
from bandpo_cli.reports.compare_variants import estimate, interval_band, paired_test

VALUES = [0.474, 0.470, 0.481, 0.466]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_interval_is_the_t_interval(n):
    low, high = stats.t.interval(0.95, n - 1, np.mean(VALUES[:n]), stats.sem(VALUES[:n]))
    assert astuple(estimate(VALUES[:n])) == pytest.approx((n, np.mean(VALUES[:n]), low, high))
    # mean 0.5, standard error 0.1, t(1, 97.5%) = 12.7062
    assert estimate([0.4, 0.6]).low == pytest.approx(0.5 - 1.27062, abs=1e-5)


@pytest.mark.parametrize("values", [[0.3], [0.3, 0.3, 0.3], [0.1 + 0.2, 0.3, 0.3], [0.0, 0.0]])
def test_one_value_and_equal_values_have_no_interval(values):
    found = estimate(values)
    assert found.mean == pytest.approx(values[0])
    assert (found.low, found.high) == (None, None)
    assert estimate([]) is None


def test_intervals_stay_within_the_limits_of_the_metric():
    assert estimate([0.02, 0.03, 0.1], (0, 1)).low == 0
    assert estimate([0.9, 0.99], (0, 1)).high == 1
    wide, free = estimate([0.4, 0.6], (0, 1)), estimate([0.4, 0.6])
    assert (wide.mean, wide.low, wide.high) == (free.mean, 0, 1)
    inside = [0.474, 0.470, 0.481]
    assert estimate(inside, (0, 1)) == estimate(inside)
    assert estimate([0.1, 2.0], (0, math.inf)).low == 0
    assert estimate([0.1, 2.0], (0, math.inf)).high == estimate([0.1, 2.0]).high
    found, free = paired_test([0.9, 0.1], (0, 1)), paired_test([0.9, 0.1])
    assert (found.change.low, found.change.high) == (-1, 1)
    assert free.change.low < -1 < 1 < free.change.high
    assert (found.p, found.change.mean) == (free.p, free.change.mean)


def test_paired_test_uses_common_seeds_and_agrees_with_scipy():
    a = pd.Series([0.50, 0.47, 0.52, 0.49, 0.99], [0, 1, 2, 3, 9])
    b = pd.Series([0.45, 0.48, 0.46, 0.48, 0.01], [0, 1, 2, 3, 7])
    expected = stats.ttest_rel(a.iloc[:4], b.iloc[:4])
    interval = expected.confidence_interval(0.95)
    change = (4, (a - b).mean(), interval.low, interval.high)
    found = paired_test(a - b)
    assert astuple(found.change) == pytest.approx(change)
    assert (found.p, found.higher, found.lower) == (pytest.approx(expected.pvalue), 3, 1)


def test_no_p_value_without_a_test():
    assert paired_test([math.nan]) is None
    one = paired_test([0.1])
    assert (one.p, one.change.low, one.higher) == (None, None, 1)
    equal = paired_test([0.5 - 0.4, 0.6 - 0.5])
    assert (equal.p, equal.change.low, equal.higher, equal.lower) == (None, None, 2, 0)


@pytest.mark.parametrize("p_values", [[0.04, 0.01, 0.03, 0.005, 0.04, 0.9], [0.5, 0.0, 0.6, 0.01, 1.0]])
def test_holm_agrees_with_statsmodels(p_values):
    assert holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1].tolist(), rel=1e-12)
    assert holm([]) == []


def test_band_is_the_interval_of_three_runs_the_range_of_two_and_none_of_one():
    values = np.array([[0.1, 0.5], [0.3, 0.4], [0.2, 0.9]])
    for step, ends in enumerate(zip(*interval_band(values), strict=True)):
        assert ends == pytest.approx(astuple(estimate(values[:, step]))[2:])
    low, high = interval_band(values[:2])
    assert (low.tolist(), high.tolist()) == ([0.1, 0.4], [0.3, 0.5])
    assert interval_band(values[:1]) is None
