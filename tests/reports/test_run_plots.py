"""Plots of a run and of an evaluation show the values of the folder, and are skipped where there is no data."""

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from bandpo_cli.errors import UserError
from bandpo_cli.evaluation.scores import success_histogram
from bandpo_cli.metric_names import probability_bins
from bandpo_cli.reports.run_plots import plot_run, plot_success_histogram, run_subtitle, series, smooth
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.tables import TOKEN_COLUMNS

Figures = dict[str, Figure]
RECORD = {
    "train/accuracy": 0.3, "train/entropy": 0.5,
    "clip/active_fraction": 0.01, "clip/upper_fraction": 0.007, "clip/lower_fraction": 0.003,
    "clip/outside_fraction": 0.02, "clip/active_fraction/p_0_0.001": None, "clip/active_fraction/p_0.9_1": 0.01,
    "clip/token_share/p_0.9_1": 0.6,
    "eval/countdown/mean_at_16": 0.3, "eval/countdown/pass_at_16": 0.9, "eval/countdown/maj_at_16": 0.4,
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path, "a")
    folder.write_config("bounds: {method: band, divergence: kl, delta: 0.05}\n")
    return folder


def _tokens(run: RunFolder, step: int, **columns: Sequence[float]) -> Path:
    table = {"old_logprob": [-3.0, -0.1], "ratio": [1.5, 0.9], "lower": [0.3, 0.8], "upper": [2.5, 1.1]}
    table |= {"advantage": [1.0, -1.0], "gradient_weight": [1.0, 1.0]}
    return run.write_tokens(step, table | columns)


def _plotted(run: RunFolder) -> list[str]:
    return [path.name for path in plot_run(run.path)]


def test_plots_without_data_are_skipped(run, figures):
    run.append_metrics({"step": 1})
    assert _plotted(run) == []
    run.append_metrics({"step": 2, "train/entropy": 0.4})
    assert _plotted(run) == ["entropy.png"]
    run.append_metrics({"step": 3, "train/entropy": float("nan"), "eval/countdown/mean_at_4": 0.2})
    assert _plotted(run) == ["accuracy.png", "entropy.png"]


def _write_interval(run: RunFolder, step: int, low: float | None, high: float | None) -> None:
    scores = {"metrics": {"mean_at_16": {"value": 0.3, "low": low, "high": high}}}
    run.write_eval(step, {"step": step, "sets": {"countdown": scores}})


def test_curves_show_the_values_of_the_records_and_the_intervals(run, figures):
    for step in (10, 20, 30, 40):
        run.append_metrics({"step": step, **RECORD, "eval/countdown/mean_at_16": step / 100})
    for step, ends in {10: (None, None), 20: (0.1, 0.5), 30: (0.2, 0.6), 50: (0.8, 0.9)}.items():
        _write_interval(run, step, *ends)
    plot_run(run.path)
    (axes,) = figures["accuracy.png"].axes
    training, mean, passes = axes.get_lines()
    assert (training.get_label(), mean.get_label()) == ("training accuracy", "held-out countdown mean@16")
    assert passes.get_label() == "held-out countdown pass@16"
    assert mean.get_xydata().tolist() == [[10, 0.1], [20, 0.2], [30, 0.3], [40, 0.4]]
    band, handle = axes.collections
    corners = {(float(x), float(y)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(20, 0.1), (20, 0.5), (30, 0.2), (30, 0.6)}  # the run has no line of step 50
    assert handle.get_label() == "mean: 95% interval over problems"
    assert handle.get_label() in [text.get_text() for text in axes.get_legend().get_texts()]
    left, right = figures["clip.png"].axes
    assert len(left.get_lines()) == 4
    assert [line.get_label() for line in right.get_lines()] == ["p 0.9 – 1"]


def test_rewards_other_than_0_and_1_have_a_plot_before_the_accuracy(run, figures):
    for step in (10, 20):
        scores = {"eval/countdown/mean_at_16": 0.0, "eval/countdown/reward": -step / 100}
        run.append_metrics({"step": step, "train/accuracy": 0.0, "train/reward": step / 50, **scores})
        values = {"metrics": {"reward": {"value": -step / 100, "low": -0.5, "high": 0.1}}}
        run.write_eval(step, {"step": step, "sets": {"countdown": values}})
    assert _plotted(run) == ["reward.png", "accuracy.png"]
    (axes,) = figures["reward.png"].axes
    training, heldout = axes.get_lines()
    assert (training.get_label(), heldout.get_label()) == ("training reward", "held-out countdown")
    assert training.get_xydata().ravel() == pytest.approx([10, 0.2, 20, 0.4])
    assert heldout.get_xydata().tolist() == [[10, -0.1], [20, -0.2]]
    assert [item.get_label() for item in axes.collections][-1] == "95% interval over problems"


@pytest.mark.parametrize(("ends", "segments"), [((0.1, 0.5), 1), ((None, None), 0)])
def test_interval_of_a_single_evaluation_is_a_line_and_there_may_be_none(run, figures, ends, segments):
    run.append_metrics({"step": 10, "eval/countdown/mean_at_16": 0.3})
    _write_interval(run, 10, *ends)
    plot_run(run.path)
    lines = figures["accuracy.png"].axes[0].collections[:1]
    plotted = [segment.tolist() for line in lines for segment in line.get_segments()]
    assert plotted == [[[10.0, ends[0]], [10.0, ends[1]]]] * segments


def test_damaged_record_of_an_evaluation_is_named(run):
    run.append_metrics({"step": 10, **RECORD})
    (run.path / "evals").mkdir()
    for content in ("{", "3", "{}", '{"sets": {"a": {}}}', '{"sets": {"a": {"metrics": {"b": 1}}}}'):
        (run.path / "evals" / "step-000010.json").write_text(content)
        with pytest.raises(UserError, match=r"step-000010\.json"):
            plot_run(run.path)


def _clip_map_labels(run: RunFolder, figures: Figures) -> list[str]:
    plot_run(run.path)
    return figures["clip_map.png"].axes[0].get_legend_handles_labels()[1]


def test_clip_map_is_plotted_from_the_last_token_table(run, figures):
    _tokens(run, 5, ratio=[9.0, 9.0])
    _tokens(run, 100)
    assert "inside (100 %)" in _clip_map_labels(run, figures)
    assert "step 100" in figures["clip_map.png"].texts[1].get_text()


def test_clipped_depends_on_the_sign_of_the_advantage_and_outside_does_not(run, figures):
    bounds = {"old_logprob": [-1.0] * 8, "lower": [0.8] * 8, "upper": [1.2] * 8, "gradient_weight": [1.0] * 8}
    ratios = [1.3, 1.3, 0.7, 0.7, 0.7, 1.0, 1.0, 1.3]
    _tokens(run, 1, **bounds, ratio=ratios, advantage=[1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0, 0.0])
    expected = ["inside (25 %)", "outside, not clipped (50 %)", "clipped (25 %)"]
    assert sorted(_clip_map_labels(run, figures)) == sorted(["allowed interval", "limit 1/p", *expected])


def test_clip_map_of_a_method_without_bounds_marks_the_tokens_without_gradient(run, figures):
    """There is no inside and outside; a token with an advantage of 0 has no gradient by any method."""
    columns = {name: [0.0] * 4 for name in TOKEN_COLUMNS}
    columns |= {"upper": [np.inf] * 4, "ratio": [0.5, 1.0, 1.5, 9.0], "advantage": [1.0, -1.0, 1.0, 0.0]}
    _tokens(run, 1, **columns | {"gradient_weight": [0.2, 0.0, 1.0, 0.0]})
    labels = ["limit 1/p", "not clipped (75 %)", "clipped (25 %)"]
    assert _clip_map_labels(run, figures) == labels


@pytest.mark.parametrize(
    ("columns", "plots"),
    [
        ({"lower": [0.0, 0.0], "upper": [np.inf, np.inf]}, 1),  # no bounds
        ({"ratio": [np.nan, 0.0]}, 0),  # not visible on log axes
        ({"old_logprob": [-200.0, 0.0], "ratio": [1e30, 1e-30]}, 1),
        ({name: [] for name in TOKEN_COLUMNS}, 0),
        # As in a first update.
        ({name: [-1.0 if name == "old_logprob" else 1.0] for name in TOKEN_COLUMNS}, 1),
    ],
)
def test_unusual_tokens_give_a_clip_map_or_none(run, figures, columns, plots):
    _tokens(run, 1, **columns)
    assert _plotted(run) == ["clip_map.png"] * plots
    for figure in figures.values():
        figure.canvas.draw()


def test_smooth_is_a_centred_mean_with_a_shorter_window_at_the_ends():
    values = [float(value) for value in np.random.default_rng(0).normal(size=100)]
    means, width = smooth(values)
    assert width == 7
    assert means == pytest.approx([np.mean(values[max(at - 3, 0) : at + 4]) for at in range(100)])
    assert smooth([5.0]) == ([5.0], 1)
    assert smooth([2.0] * 3000) == (pytest.approx([2.0] * 3000), 51)


def test_series_skips_steps_without_a_value_and_bins_are_sorted_by_probability():
    assert series([{"step": 1, "a": 2}, {"step": 2, "a": None}, {"step": 3}], "a") == {1: 2.0}
    names = ["clip/active_fraction/p_0.9_1", "clip/active_fraction", "clip/active_fraction/p_0_0.001"]
    assert [text for _, text in probability_bins(names)] == ["0 – 0.001", "0.9 – 1"]


@pytest.mark.parametrize(
    ("config", "subtitle"),
    [
        (
            "bounds: {method: band, divergence: kl, delta: 0.2, delta_end: 0.1}",
            "a · band, kl, δ 0.2, to δ 0.1",
        ),
        ("bounds: {method: clip-higher, eps_low: 0.2, eps_high: 0.28}", "a · clip-higher, ε₋ 0.2, ε₊ 0.28"),
        *((broken, "a") for broken in ("", "bounds: 3\n", "bounds: {}\n", "a: [\n")),
    ],
)
def test_subtitle_of_a_run_has_its_method(run, config, subtitle):
    run.write_config(config)
    assert run_subtitle(run.path) == subtitle


def test_bins_of_shares_agree_with_fractions():
    """Compare all c of some n with exact arithmetic: 3 of 10 is in 0.3 – 0.4 though 0.3 is not exact in binary."""
    for n in (1, 3, 7, 10, 30, 50, 64):
        for c in range(n + 1):
            (name,) = [name for name, count in success_histogram([c / n], None) if count]
            if c in (0, n):
                assert name == ("never" if c == 0 else "always")
            else:
                low = int(Fraction(c, n) * 10)
                assert name == f"{low / 10:.1f} – {(low + 1) / 10:.1f}"


def _success_plot(
    folder: Path, figures: Figures, sets: Mapping[str, Sequence[float]], sizes: Sequence[Sequence[int]]
) -> Figure:
    """Return the plot of an evaluation; `sizes`: fewest and most completions per problem of each set."""
    content = {}
    for size, (label, shares) in zip(sizes, sets.items(), strict=True):
        problems = {str(index): {"mean_at_8": share} for index, share in enumerate(shares)}
        content[label] = {"problems": len(shares), "completions_per_problem": size, "by_problem": problems}
    (folder / "eval.json").write_text(json.dumps({"sets": content}))
    plot_success_histogram(folder)
    return figures["success.png"]


@pytest.mark.parametrize(
    ("sets", "sizes", "x_label", "names", "heights"),
    [
        ({"one": [0, 0, 0.25, 0.5, 1, 1, 1, 1]}, [[4, 4]], "number of correct completions, of 4",
         ["never", "1", "2", "3", "always"], [2 / 8, 1 / 8, 1 / 8, 0, 4 / 8]),
        # Sets with other numbers of completions share bins of shares.
        ({"one": [0, 0.3], "two": [0.5, 1]}, [[8, 8], [4, 6]], "share of correct completions",
         ["never", *(f"{tenth / 10:.1f}–{(tenth + 1) / 10:.1f}" for tenth in range(10)), "always"],
         [0.5, 0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0]),
        ({"one": [0, 0, 1]}, [[1, 1]], "completion", ["wrong", "correct"], [2 / 3, 1 / 3]),
    ],
)  # fmt: skip
def test_bars_of_the_success_histogram_are_counts(tmp_path, figures, sets, sizes, x_label, names, heights):
    axes = _success_plot(tmp_path, figures, sets, sizes).axes[0]
    assert x_label in axes.get_xlabel()
    assert [text.get_text() for text in axes.get_xticklabels()] == names
    assert [bar.get_height() for bar in axes.containers[0]] == pytest.approx(heights)


def test_of_many_sets_the_first_are_plotted(tmp_path, figures):
    sets = {f"a-problem-set-of-some-kind-{index}": [0.0, 0.5, 1.0] for index in range(9)}
    figure = _success_plot(tmp_path, figures, sets, [[8, 8]] * 9)
    assert len(figure.axes[0].get_legend().get_texts()) == 6
    assert "the first 6 of 9 sets" in figure.texts[1].get_text()
