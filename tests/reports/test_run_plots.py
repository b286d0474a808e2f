"""Plots of a run and of an evaluation show the values of the folder, and are skipped where there is no data."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from bandpo_cli.evaluation.scores import success_histogram
from bandpo_cli.reports import style
from bandpo_cli.reports.clip_map import ClipMapTokens, read_clip_map_tokens
from bandpo_cli.reports.run_plots import (
    plot_run,
    plot_success_histogram,
    probability_bins,
    run_subtitle,
    series,
    smooth,
)
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.storage.tables import TOKEN_COLUMNS

RECORD = {
    "train/accuracy": 0.3,
    "train/entropy": 0.5,
    "clip/active_fraction": 0.01,
    "clip/upper_fraction": 0.007,
    "clip/lower_fraction": 0.003,
    "clip/outside_fraction": 0.02,
    "clip/active_fraction/p_0_0.001": None,
    "clip/active_fraction/p_0.9_1": 0.01,
    "clip/token_share/p_0.9_1": 0.6,
    "eval/countdown/mean_at_16": 0.3,
    "eval/countdown/pass_at_16": 0.9,
    "eval/countdown/maj_at_16": 0.4,
}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path, "a")
    folder.write_config("bounds: {method: band, divergence: kl, delta: 0.05}\n")
    return folder


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Collect the figures that are saved, by file name."""
    saved: dict[str, Figure] = {}
    save = style.save
    monkeypatch.setattr(
        style, "save", lambda figure, path: saved.update({path.name: figure}) or save(figure, path)
    )
    return saved


def _tokens(run: RunFolder, step: int, **columns: list[float]) -> Path:
    table = {"old_logprob": [-3.0, -0.1], "ratio": [1.5, 0.9], "lower": [0.3, 0.8], "upper": [2.5, 1.1]}
    return run.write_tokens(
        step, {**table, "advantage": [1.0, -1.0], "gradient_weight": [1.0, 1.0], **columns}
    )


def _plotted(run: RunFolder) -> list[str]:
    paths = plot_run(run.path)
    assert all(path.parent == run.path / "plots" and imread(path).shape == (1000, 1600, 4) for path in paths)
    return [path.name for path in paths]


@pytest.mark.parametrize("steps", [1, 2, 200])
def test_all_plots_are_made_for_a_run_of_any_length(run, steps):
    for step in range(1, steps + 1):
        run.append_metrics({"step": step, **RECORD})
    _tokens(run, steps)
    assert _plotted(run) == ["accuracy.png", "entropy.png", "clip.png", "clip_map.png"]


def test_plots_without_data_are_skipped(run):
    assert _plotted(run) == []
    run.append_metrics({"step": 1})
    assert _plotted(run) == []
    run.append_metrics({"step": 2, "train/entropy": 0.4})
    assert _plotted(run) == ["entropy.png"]
    run.append_metrics({"step": 3, "train/entropy": float("nan"), "eval/countdown/mean_at_4": 0.2})
    assert _plotted(run) == ["accuracy.png", "entropy.png"]


def test_curves_show_the_values_of_the_records(run, figures):
    for step in (10, 20, 30):
        run.append_metrics({"step": step, **RECORD, "eval/countdown/mean_at_16": step / 100})
    plot_run(run.path)
    (axes,) = figures["accuracy.png"].axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == ["training, sampled answers", "countdown mean@16", "countdown pass@16"]
    assert list(lines["countdown mean@16"].get_xdata()) == [10, 20, 30]
    assert list(lines["countdown mean@16"].get_ydata()) == [0.1, 0.2, 0.3]
    left, right = figures["clip.png"].axes
    assert len(left.get_lines()) == 4
    assert [line.get_label() for line in right.get_lines()] == ["p 0.9 – 1"]


def test_clip_map_is_plotted_from_the_last_token_table(run, figures):
    _tokens(run, 5, ratio=[9.0, 9.0])
    _tokens(run, 100)
    plot_run(run.path)
    (axes,) = figures["clip_map.png"].axes
    labels = axes.get_legend_handles_labels()[1]
    assert "inside (100 %)" in labels
    assert "step 100" in figures["clip_map.png"].texts[1].get_text()


@pytest.mark.parametrize(
    "columns",
    [
        {"lower": [0.0, 0.0], "upper": [np.inf, np.inf]},  # no bounds
        {"ratio": [1.0, 1.0]},  # as in the first update of a batch
        {"ratio": [np.nan, 0.0]},  # not visible on log axes
        {"old_logprob": [-200.0, 0.0], "ratio": [1e30, 1e-30]},
        {name: [] for name in TOKEN_COLUMNS},
        {name: [-1.0 if name == "old_logprob" else 1.0] for name in TOKEN_COLUMNS},
    ],
)
def test_unusual_tokens_give_a_clip_map_or_none(run, columns):
    _tokens(run, 1, **columns)
    assert _plotted(run) in ([], ["clip_map.png"])


def test_active_depends_on_the_sign_of_the_advantage_and_outside_does_not():
    ratio = np.array([1.3, 1.3, 0.7, 0.7, 1.0, 1.3])
    advantage = np.array([1.0, -1.0, 1.0, -1.0, 1.0, 0.0])
    bounds = np.full(6, 0.8), np.full(6, 1.2)
    tokens = ClipMapTokens(np.full(6, 0.5), ratio, *bounds, advantage, np.full(6, np.nan))
    assert tokens.active.tolist() == [True, False, False, True, False, False]
    assert tokens.outside.tolist() == [True, True, True, True, False, True]


def test_clip_map_tokens_have_probabilities(run):
    tokens = read_clip_map_tokens(_tokens(run, 1, old_logprob=[np.log(0.25), 0.0]))
    assert tokens is not None
    np.testing.assert_allclose(tokens.prob, [0.25, 1.0], rtol=1e-6)


def test_smooth_is_a_centred_mean_with_a_shorter_window_at_the_ends():
    values = [float(value) for value in np.random.default_rng(0).normal(size=100)]
    means, width = smooth(values)
    assert width == 7
    assert means == pytest.approx([np.mean(values[max(at - 3, 0) : at + 4]) for at in range(100)])
    assert smooth([5.0]) == ([5.0], 1)
    assert smooth([2.0] * 3000) == (pytest.approx([2.0] * 3000), 51)


def test_series_skips_steps_without_a_value():
    assert series([{"step": 1, "a": 2}, {"step": 2, "a": None}, {"step": 3}], "a") == ([1], [2.0])


def test_probability_bins_are_sorted_by_probability():
    names = ["clip/active_fraction/p_0.9_1", "clip/active_fraction", "clip/active_fraction/p_0_0.001"]
    assert [text for _, text in probability_bins(names)] == ["p 0 – 0.001", "p 0.9 – 1"]


def test_subtitle_of_a_run_has_its_method(run):
    assert run_subtitle(run.path) == "a · band, kl, δ 0.05"
    run.write_config("bounds: {method: band, divergence: kl, delta: 0.2, delta_end: 0.02}\n")
    assert run_subtitle(run.path) == "a · band, kl, δ 0.2, to δ 0.02"
    run.write_config("bounds: {method: clip-higher, eps_low: 0.2, eps_high: 0.28}\n")
    assert run_subtitle(run.path) == "a · clip-higher, ε₋ 0.2, ε₊ 0.28"
    for broken in ("", "bounds: 3\n", "bounds: {}\n", "a: [\n", "just text\n"):
        run.write_config(broken)
        assert run_subtitle(run.path) == "a"


def test_plots_import_neither_torch_nor_pyplot(run):
    run.append_metrics({"step": 1, **RECORD})
    code = (
        "import sys; from pathlib import Path; from bandpo_cli.reports.run_plots import plot_run\n"
        "assert plot_run(Path(sys.argv[1]))\n"
        "print([m for m in ('torch', 'matplotlib.pyplot', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def _write_evaluation(folder: Path, sets: dict[str, list[float]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        label: {
            "problems": len(shares),
            "by_problem": {
                str(index): {"mean_at_8": share, "pass_at_4": 1.0} for index, share in enumerate(shares)
            },
        }
        for label, shares in sets.items()
    }
    (folder / "eval.json").write_text(json.dumps({"sets": content}))
    return folder


def test_bins_of_the_success_histogram_agree_with_fractions() -> None:
    """Compare all c of n up to 64 with exact arithmetic: 3 of 10 is in 0.3 – 0.4 though 0.3 is not exact in binary."""
    for n in range(1, 65):
        for c in range(n + 1):
            (name,) = [name for name, count in success_histogram([c / n]) if count]
            if c in (0, n):
                assert name == ("never" if c == 0 else "always")
            else:
                low = int(Fraction(c, n) * 10)
                assert name == f"{low / 10:.1f} – {(low + 1) / 10:.1f}"


def test_bars_of_the_success_histogram_are_the_counts(tmp_path: Path, figures: dict[str, Figure]) -> None:
    shares = [0, 0, 0.125, 0.3, 0.5, 1, 1, 1]
    plot_success_histogram(_write_evaluation(tmp_path / "e", {"one": shares}))
    axes = figures["success.png"].axes[0]
    heights = [bar.get_height() for bar in axes.containers[0]]
    assert heights == [count / len(shares) for _, count in success_histogram(shares)]
    assert heights == pytest.approx([2 / 8, 0, 1 / 8, 0, 1 / 8, 0, 1 / 8, 0, 0, 0, 0, 3 / 8])
    labels = [text.get_text() for text in axes.get_xticklabels()]
    assert (labels[0], labels[4], labels[-1]) == ("never", "0.3–0.4", "always")


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("short", ["countdown"]),
        ("x" * 200, ["a" * 60, "b" * 60, "c" * 60]),
        ("nine", [f"a-problem-set-of-some-kind-{index}" for index in range(9)]),
    ],
)
def test_texts_of_the_success_histogram_fit(
    tmp_path: Path, figures: dict[str, Figure], name: str, labels: list[str]
) -> None:
    """All texts lie within the figure, and the legend covers neither the title nor the bars."""
    path = plot_success_histogram(
        _write_evaluation(tmp_path / name, {label: [0, 0.5, 1] for label in labels})
    )
    assert imread(path).shape[:2] == (1000, 1600)
    figure = figures["success.png"]
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    renderer = figure.canvas.get_renderer()
    for text in figure.texts:
        box = text.get_window_extent(renderer)
        assert 0 <= box.x0 < box.x1 <= width
        assert 0 <= box.y0 < box.y1 <= height
    legend = figure.axes[0].get_legend()
    assert (legend is None) == (len(labels) == 1)
    if legend:
        box = legend.get_window_extent(renderer)
        assert 0 <= box.x0 < box.x1 <= width
        assert box.y1 <= min(text.get_window_extent(renderer).y0 for text in figure.texts)
        assert box.y0 >= figure.axes[0].get_window_extent(renderer).y1 - 2
        assert len(legend.get_texts()) == min(len(labels), 6)
    if len(labels) > 6:
        assert "the first 6 of 9 sets" in figure.texts[1].get_text()
