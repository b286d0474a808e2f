"""Bootstrap intervals: reproducible, equal to known intervals in special cases, and with the stated coverage."""

from __future__ import annotations

import json
import math
import tracemalloc

import numpy as np
import pytest
from scipy.special import betaln
from scipy.stats import norm, t

from bandpo_cli.evaluation import scores
from bandpo_cli.evaluation.scores import LEVEL, mean_intervals
from bandpo_cli.storage.files import replace_nonfinite

FEW = [[0, 1], [0, 0, 1], [1, 1, 1, 0], [0] * 29 + [1], [0] * 127 + [1]]
"""Few problems, and a single success."""
UNITS = np.array([[1], [1], [0.1], [5000], [-3]])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [*FEW, *np.random.default_rng(1).beta(0.3, 1.5, (5, 40)) * UNITS], ids=len)
def test_the_value_is_the_mean_and_the_ends_are_within_the_values(values):
    value, low, high = mean_intervals([values])[0]
    assert value == pytest.approx(np.mean(values))
    assert min(values) <= low < value < high <= max(values)


def test_intervals_depend_only_on_values_and_seed():
    values_FP = np.random.default_rng(2).random((3, 25))
    assert mean_intervals(values_FP) == mean_intervals(values_FP)
    assert mean_intervals(values_FP, seed=1) != mean_intervals(values_FP)
    alone = mean_intervals(values_FP[1:2])[0]
    assert mean_intervals(values_FP)[1] == alone, "the interval must not depend on the other metrics"


@pytest.mark.parametrize("problems", [24, 200])
def test_symmetric_values_have_the_widened_percentile_and_the_t_interval(problems):
    """There bias and acceleration are zero; the widening is that of Student's t."""
    half = np.abs(np.random.default_rng(3).standard_normal(problems // 2))
    values = np.concatenate([10 - half, 10 + half])
    interval = mean_intervals([values])[0]

    rng = np.random.default_rng(77)
    resampled = values[rng.integers(0, problems, (40_000, problems))].mean(axis=1)
    standard_error = values.std(ddof=1) / math.sqrt(problems)
    widened = t.ppf(0.975, problems - 1) / norm.ppf(0.975) * math.sqrt(problems / (problems - 1))
    percentiles = 10 + (np.quantile(resampled, [0.025, 0.975]) - 10) * widened
    for expected in (tuple(percentiles), t.interval(LEVEL, problems - 1, 10, standard_error)):
        assert interval[1:] == pytest.approx(expected, abs=0.1 * standard_error)


@pytest.mark.parametrize(("unit", "shift"), [(0.1, 0.0), (1 / 3, 0.3), (0.7, 0.3), (512.3, 0.0)])
def test_intervals_scale_and_shift_with_the_values(unit, shift):
    """With multiples of 1/n many resamples equal the sample's mean up to rounding, and BCa counts these."""
    rng = np.random.default_rng(5)
    for problems in (6, 31, 38):
        values = rng.permutation(np.arange(problems) % 5 < 2).astype(float)
        plain, scaled = mean_intervals([values])[0], mean_intervals([shift + unit * values])[0]
        assert scaled == pytest.approx([shift + unit * item for item in plain])


def test_negated_values_have_the_negated_interval_and_skewed_ones_the_longer_end_at_the_tail():
    values = np.random.default_rng(4).exponential(size=60)
    value, low, high = mean_intervals([values])[0]
    assert mean_intervals([-values])[0] == pytest.approx([-value, -high, -low])
    assert high - value > 1.15 * (value - low)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [[0.4], [0.0, 0.0, 0.0], [0.7] * 30, [1.0, 1 - 2**-53, 1.0]])
def test_constant_values_have_no_interval(values):
    """Next to a metric with an interval, and without a warning; values that differ only by rounding are constant."""
    interval, varied = mean_intervals([values, np.arange(len(values))])
    assert math.isnan(varied.low) == (len(values) == 1)
    assert interval.value == pytest.approx(values[0])
    assert all(map(math.isnan, interval[1:]))
    assert json.dumps(replace_nonfinite(interval._asdict())).endswith('"low": null, "high": null}')


def test_memory_is_bounded_for_a_large_set(monkeypatch):
    """The jackknife of 1,000 problems and 6 metrics at once would take 48 MB, all resamples at once 96 MB."""
    monkeypatch.setattr(scores, "_BATCH_VALUES", 400_000)
    values_FP = np.random.default_rng(7).random((6, 1000))
    tracemalloc.start()
    mean_intervals(values_FP, resamples=2000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6


@pytest.mark.slow
@pytest.mark.parametrize(("a", "b", "n"), [(0.5, 0.5, 16), (0.3, 1.5, 8)])
def test_the_coverage_is_95_percent(a, b, n):
    """1,000 simulated evaluations of 30 problems: within 2 points, plus a standard error of the simulation."""
    rng, simulations = np.random.default_rng(8), 1000
    p = rng.beta(a, b, (simulations, 30))
    # Lengths: log-normal, harder problems e times as long; E[exp(1−p)] by the series of E[(1−p)^i] / i!.
    length = rng.lognormal(6 + (1 - p), 0.7, (n, *p.shape)).mean(axis=0)
    moments = sum(math.exp(betaln(a, b + i) - betaln(a, b)) / math.factorial(i) for i in range(20))
    simulated = [(rng.binomial(n, p) / n, a / (a + b)), (length, math.exp(6 + 0.7**2 / 2) * moments)]
    for values, truth in simulated:
        # Each simulated evaluation is one metric: sharing resamples is fast and does not change any interval.
        intervals = mean_intervals(values, resamples=1000)
        share = sum(low <= truth <= high for _, low, high in intervals) / simulations
        assert abs(share - LEVEL) <= 0.02 + 0.007
