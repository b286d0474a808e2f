"""Plots of a report: means and bands of the runs, distinct line styles, and names that are no mathematics."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Patch

from bandpo_cli.reports import plot_style as style
from bandpo_cli.reports.compare_variants import estimate
from bandpo_cli.reports.plot_style import legend_name, variant_styles
from bandpo_cli.reports.report_plots import MAX_VARIANTS_PLOTTED, SHARE, common_curves, plot_by_learning_rate
from bandpo_cli.reports.run_variants import Selection
from bandpo_cli.reports.write_report import write_report
from tests.reports.sweep_folders import report_of, write_sweep, write_variant

BANDS = "95% interval over seeds\nrange of two seeds\nnone for one seed"
FINALS = {"clip": {0: 0.40, 1: 0.42, 2: 0.44}, "kl 0.02": {0: 0.5, 1: 0.6}, "kl 0.03": {0: 0.39}}


def _style(line):
    return line.get_color(), line.get_linestyle(), line.get_linewidth()


def _texts(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def _lines(figure):
    """Return the lines of the variants by their name in the legend, matched by colour, dash and width."""
    (axes,), (legend,) = figure.axes, figure.legends
    lines = {_style(line): line for line in reversed(axes.get_lines())}
    handles = zip(legend.get_texts(), legend.legend_handles, strict=True)
    # A patch is the shading.
    return {text.get_text(): lines[_style(of)] for text, of in handles if not isinstance(of, Patch)}


def test_lines_are_means_and_the_legend_describes_the_bands(tmp_path, figures):
    report_of(write_sweep(tmp_path / "s", FINALS))
    figure = figures["accuracy.png"]
    lines = _lines(figure)
    assert list(lines) == ["kl 0.02", "clip (baseline)", "kl 0.03"]  # sorted by final value
    assert list(lines["clip (baseline)"].get_ydata()) == pytest.approx([0.2, 0.42])
    assert list(lines["kl 0.02"].get_ydata()) == pytest.approx([0.2, 0.55])
    assert lines["clip (baseline)"].get_color() == style.MUTED_COLOR
    bands = [collection.get_paths()[0].vertices for collection in figure.axes[0].collections]
    ends = sorted((float(v[v[:, 0] == 4][:, 1].min()), float(v[v[:, 0] == 4][:, 1].max())) for v in bands)
    interval = estimate(list(FINALS["clip"].values()))
    assert ends == [pytest.approx((interval.low, interval.high)), pytest.approx((0.5, 0.6))]
    low, high = figure.axes[0].get_ylim()
    assert 0 <= low < min(0.2, interval.low)
    assert max(0.6, interval.high) < high < 1, "the axes show the bands in full"
    assert figure.texts[1].get_text() == "s"
    assert _texts(figure)[-1] == BANDS
    (axes,) = figures["clip_by_probability.png"].axes
    cells = np.array([text.get_text() for text in axes.texts]).reshape(3, 2)
    assert cells.tolist() == [["10%", "0%"]] * 3
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["0.1 – 0.5\n20% of all", "0.9 – 1\n80% of all"]
    (axes,) = figures["accuracy_entropy.png"].axes
    assert list(axes.get_lines()[-1].get_ydata()) == [0.39, 0.39]  # the best value of kl 0.03, the lowest
    assert [text.get_text() for text in axes.texts] == ["entropies compared at 39%"]
    low, high = axes.get_ylim()
    assert low < 0.39 < high


@pytest.mark.parametrize(
    ("finals", "shading"),
    [([0.4], []), ([0.4, 0.42], ["range of two seeds"]), ([0.4, 0.42, 0.45], ["95% interval over seeds"])],
)
def test_the_legend_says_what_the_shading_is(tmp_path, figures, finals, shading):
    report_of(write_sweep(tmp_path / "s", {"clip": dict(enumerate(finals))}))
    for name in ("accuracy.png", "entropy.png"):
        figure = figures[name]
        assert _texts(figure)[1:] == shading
        assert bool(figure.axes[0].collections) == bool(shading)
        assert ("no interval" in figure.texts[1].get_text()) == (not shading)
    assert not figures["accuracy_entropy.png"].axes[0].texts  # one variant: no common level


def test_curves_cover_the_common_steps():
    runs = {("both", 0): {0: 0.1, 20: 0.2, 40: 0.3}, ("both", 1): {0: 0.3, 10: 0.5, 20: 0.6}}
    runs |= {("none", 0): {0: 0.1}, ("none", 1): {1: 0.1}}
    values = pd.concat(map(pd.Series, runs.values()), keys=runs, names=["variant", "seed", "step"])
    curves = common_curves(values, ["both", "none"])
    assert list(curves) == ["both"]
    steps, values_RS = curves["both"]
    assert steps.tolist() == [0, 20]
    assert values_RS.tolist() == [[0.1, 0.2], [0.3, 0.6]]


def test_accuracy_is_plotted_against_the_entropy_of_its_policy_and_names_are_plain(tmp_path, figures):
    run = write_variant(tmp_path, r"$\frac{$ and $x$", accuracy={0: 0.2, 2: 0.3, 4: 0.4})
    report = write_report(Selection("cost $1 $2", None, [run]), tmp_path / "out")
    (axes,) = figures["accuracy_entropy.png"].axes
    # The entropy 0.5 − 0.05·step is recorded before the update of the step; none is recorded after the last one.
    assert list(axes.get_lines()[0].get_xdata()) == pytest.approx([0.45, 0.35, 0.30])
    assert list(axes.get_lines()[0].get_ydata()) == pytest.approx([0.2, 0.3, 0.4])
    assert len([name for name in report.files if name.endswith(".png")]) == 4
    (legend,) = figures["accuracy.png"].legends
    texts = [legend.get_texts()[0], figures["accuracy.png"].texts[1]]
    assert not any(text._preprocess_math(text.get_text())[1] is True for text in texts)


LINES = {"clip": {1e-4: [0.30, 0.34, 0.35], 1e-5: [0.1, 0.20, 0.21], 1e-3: [0.2, 0.1]}}
LINES["kl 0.05"] = {1e-5: [0.25], 1e-3: [0.5]}


def test_accuracy_against_learning_rate_has_means_intervals_and_the_best_rate():
    figure = plot_by_learning_rate(LINES, "title", "tuning", "held-out accuracy, mean@16", SHARE)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1e-5", "1e-4", "1e-3"]
    assert list(_lines(figure)) == ["kl 0.05", "clip"]  # the highest best mean first
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]
    best = [line.get_xydata().tolist() for line in axes.get_lines() if line.get_markersize() > 8]
    assert best == [[[1e-4, pytest.approx(0.33)]], [[1e-3, 0.5]]]
    interval = estimate(LINES["clip"][1e-4])
    for expected in (
        ([1e-5, 1e-4, 1e-3], pytest.approx([0.17, 0.33, 0.15])),
        ([1e-5, 1e-3], [0.25, 0.5]),
        ([1e-4, 1e-4], pytest.approx([interval.low, interval.high])),
        ([1e-3, 1e-3], [0.1, 0.2]),  # the range of two seeds
    ):
        assert expected in lines
    low, high = axes.get_ylim()
    assert low <= estimate(LINES["clip"][1e-5]).low
    assert interval.high < high
    assert _texts(figure)[-1] == BANDS


def test_accuracy_against_learning_rate_shows_the_most_accurate_of_many_lines():
    names = [f"kl 0.05 schedule=linear updates={index:02d}" for index in range(20)]
    lines = {name: {1e-5: [0.0], 1e-4: [index / 100]} for index, name in enumerate(names)}
    figure = plot_by_learning_rate(lines, "t", "s", "held-out accuracy, mean@16", SHARE)
    assert list(_lines(figure)) == [legend_name(name) for name in list(lines)[:-13:-1]]
    assert "the 12 best of 20 methods" in figure.texts[1].get_text()
    for one_rate_each in ({}, {"clip": {1e-4: [0.1, 0.2]}, "kl": {1e-5: [0.2]}}):
        assert plot_by_learning_rate(one_rate_each, "t", "s", "y", SHARE) is None


def test_every_variant_has_its_own_line_style():
    names = [f"variant {index}" for index in range(MAX_VARIANTS_PLOTTED)]
    styles = variant_styles(names, "variant 3")
    assert len({(line["color"], str(line["linestyle"])) for line in styles.values()}) == MAX_VARIANTS_PLOTTED
    assert styles["variant 3"]["color"] == style.MUTED_COLOR
    assert variant_styles(names, None)["variant 0"]["color"] != style.MUTED_COLOR
    long = legend_name("kl 0.05 optim.betas=0.9,0.999 variant=7")
    assert (len(long) <= 30, long.startswith("kl 0.05"), long.endswith("variant=7")) == (True,) * 3


@pytest.mark.slow
def test_of_many_variants_the_most_accurate_and_the_baseline_are_plotted(tmp_path, figures):
    finals = {f"kl 0.05 learning_rate=1e-4 variant={n:02d}": {0: 0.4 + n / 100} for n in range(13)}
    report = report_of(write_sweep(tmp_path / "s", {"clip": {0: 0.3}} | finals))
    note = "The plots show the 12 variants with the highest held-out accuracy, and the baseline."
    assert report.notes[-1] == note
    texts = _texts(figures["accuracy.png"])
    assert len(texts) == MAX_VARIANTS_PLOTTED + 1  # one seed per variant: no shading
    assert "clip (baseline)" in texts
