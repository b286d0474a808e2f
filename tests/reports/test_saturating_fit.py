"""Saturating fits: curves with known parameters, short curves, and an independent least-squares fit."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.optimize import curve_fit

from bandpo_cli.errors import UserError
from bandpo_cli.metric_names import AXES
from bandpo_cli.reports.saturating_fit import MAX_WIDTH, MIN_EVALUATIONS, fit_caption, fit_curve, fit_variants
from tests.reports.sweep_folders import report_on, write_variant

STEPS = np.arange(0, 210, 10.0)


def saturating_curve(compute, initial, a, b, c_mid):
    return initial + (a - initial) / (1 + (c_mid / compute) ** b)


def runs_of(midpoint, seeds=4, asymptote=0.6, noise=0.004):
    """Return the accuracies of runs at STEPS, with R0 = 0.25 and B = 1.7."""
    rng = np.random.default_rng(0)
    curve = np.r_[0.25, saturating_curve(STEPS[1:], 0.25, asymptote, 1.7, midpoint)]
    return curve + noise * rng.standard_normal((seeds, len(curve)))


def test_known_parameters_of_a_curve_that_has_bent():
    fit = fit_curve("clip", STEPS, runs_of(40.0))
    assert (fit.unidentified, fit.seeds, fit.evaluations) == ("", 4, 19)
    for fitted, true in ((fit.asymptote, 0.6), (fit.exponent, 1.7), (fit.midpoint, 40.0)):
        assert fitted.low <= true <= fitted.high
        assert fitted.low <= fitted.value <= fitted.high
        assert fitted.value == pytest.approx(true, rel=0.1)
    assert fit.asymptote.high - fit.asymptote.low <= MAX_WIDTH
    assert [float(cell.split()[0]) for cell in fit.cells[2:5]] == pytest.approx([0.6, 1.7, 40.0], rel=0.1)


def test_the_values_are_those_of_an_independent_fit():
    accuracies = runs_of(40.0)
    fit, mean = fit_curve("clip", STEPS, accuracies), accuracies.mean(axis=0)

    def curve(steps, *parameters):
        return saturating_curve(steps, mean[0], *parameters)

    expected, _ = curve_fit(curve, STEPS[2:], mean[2:], p0=(0.5, 1.0, 50.0), bounds=(0, (1, 6, 1e3)))
    assert [fit.asymptote.value, fit.exponent.value, fit.midpoint.value] == pytest.approx(expected, rel=1e-3)
    first, _ = curve_fit(curve, STEPS[2:14], mean[2:14], p0=(0.5, 1.0, 50.0), bounds=(0, (1, 6, 1e3)))
    errors, naive = curve(STEPS[14:], *first) - mean[14:], mean[13] - mean[14:]
    assert fit.holdout["final"] == pytest.approx(errors[-1], abs=1e-4)
    assert fit.holdout["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-2)
    assert fit.holdout["naive_final"] == pytest.approx(naive[-1])
    assert fit.holdout["naive_rmse"] == pytest.approx(np.sqrt(np.mean(naive**2)))


def test_the_interval_is_the_t_interval_over_seeds_that_differ_only_in_the_asymptote():
    asymptotes, rng = np.array([0.60, 0.62, 0.61, 0.59, 0.63]), np.random.default_rng(0)
    curves = [np.r_[0.25, saturating_curve(STEPS[1:], 0.25, a, 1.7, 40.0)] for a in asymptotes]
    noise = 0.0002 * rng.standard_normal((5, len(STEPS)))
    fit = fit_curve("clip", STEPS, np.array(curves) + noise)
    expected = 2 * stats.t.ppf(0.975, 4) * stats.sem(asymptotes)
    assert fit.asymptote.value == pytest.approx(0.61, abs=0.001)
    assert fit.asymptote.high - fit.asymptote.low == pytest.approx(expected, rel=0.1)
    assert abs(fit.asymptote.high + fit.asymptote.low - 2 * 0.61) < 0.01  # nearly symmetric


def test_a_parameter_without_an_end_within_the_range_has_no_interval():
    """The rise is over before the first evaluation of the fit."""
    fit = fit_curve("clip", STEPS, runs_of(4.0))
    assert fit.asymptote.value == pytest.approx(0.6, abs=0.01)
    assert np.isnan([fit.exponent.low, fit.exponent.high, fit.midpoint.low, fit.midpoint.high]).all()


@pytest.mark.parametrize("midpoint", [200.0, 600.0])
def test_a_curve_that_has_not_bent_has_no_asymptote(midpoint):
    fit = fit_curve("clip", STEPS, runs_of(midpoint))
    assert fit.unidentified.startswith("any A from 0.")
    assert (fit.asymptote.value, fit.exponent, fit.midpoint) == (None, None, None)
    assert fit.asymptote.low <= 0.6 <= fit.asymptote.high
    assert fit.curve
    assert abs(fit.holdout["final"]) < 0.03


def test_other_curves_have_no_asymptote():
    collapse = 0.25 + 1.2 * (STEPS / 200) * (1 - 0.8 * STEPS / 200)
    noise = 0.003 * np.random.default_rng(0).standard_normal((5, len(STEPS)))
    assert fit_curve("clip", STEPS, collapse + noise).unidentified == "the accuracies do not follow the curve"
    flat = fit_curve("clip", STEPS, 0.25 + noise)
    assert flat.asymptote.value is None
    assert flat.asymptote.high == 1.0


@pytest.mark.parametrize("accuracies", [runs_of(40.0, seeds=1), runs_of(40.0, noise=0.0)])
def test_without_differences_between_seeds_there_is_no_interval(accuracies):
    fit = fit_curve("clip", STEPS, accuracies)
    assert (fit.asymptote, fit.exponent, fit.midpoint) == (None, None, None)
    assert "no interval" in fit.unidentified
    assert fit.curve


def test_compute_is_counted_from_the_first_evaluation():
    fit, later = (fit_curve("clip", start + STEPS, runs_of(40.0)) for start in (0.0, 1000.0))
    assert (later.asymptote, later.midpoint, later.holdout) == (fit.asymptote, fit.midpoint, fit.holdout)
    assert later.curve[0][0] == fit.curve[0][0] + 1000


def test_too_few_evaluations_are_one_line(tmp_path):
    def write(every):
        runs = []
        for (variant, interval), seed in product({"clip": every, "none": 25}.items(), (0, 1)):
            at = {step: 0.2 + 0.02 * step + 0.01 * seed for step in range(0, 26, interval)}
            settings, place = [f"bounds.method={variant}"], tmp_path / f"{every}"
            runs.append(write_variant(place, variant, settings, seed, accuracy=at, steps=25))
        return runs

    message = "clip has 5 evaluations after the first tenth, and the fit needs 9; evaluate more often"
    with pytest.raises(UserError, match=message):
        report_on(write(5), tmp_path, fit=True)
    assert not (tmp_path / "out").exists()
    report = report_on(write(1), tmp_path, fit=True)
    enough, few = report.fits
    assert (enough.variant, enough.evaluations, bool(enough.curve)) == ("clip", 23, True)
    assert few.unidentified == f"1 evaluation after the first tenth, and the fit needs {MIN_EVALUATIONS}"
    assert (few.holdout, few.curve) == ({}, ())
    for name in ("report.md", "report.html"):
        text = report.files[name].read_text()
        assert "not identified: 1 evaluation after the first tenth" in text
    assert "accuracy_fit.png" in report.files


def test_compute_is_the_mean_over_the_seeds_of_what_the_axis_names():
    accuracies = runs_of(40.0)
    index = pd.MultiIndex.from_product([["clip"], range(4), STEPS], names=["variant", "seed", "step"])
    accuracy = pd.Series(accuracies.ravel(), index)
    tokens = np.outer([900.0, 1000.0, 1000.0, 1100.0], STEPS)
    by_step = fit_curve("clip", STEPS, accuracies)
    (by_tokens,) = fit_variants(accuracy, pd.Series(tokens.ravel(), index), ["clip"])
    assert by_tokens.midpoint.value == pytest.approx(1000 * by_step.midpoint.value)
    assert by_tokens.asymptote.value == pytest.approx(by_step.asymptote.value)
    assert by_tokens.observed[-1][0] == 200_000
    assert "compute C, in sampled tokens, was fitted" in fit_caption(AXES["tokens"])
