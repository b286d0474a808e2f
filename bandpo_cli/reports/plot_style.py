"""Common style of all plots: axes, colours for colour-blind readers, line styles of variants, legends.

pyplot is not used, so importing this module and plotting change no global state of matplotlib.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from bandpo_cli.metric_names import STEP, Axis
from bandpo_cli.storage.files import write_atomically

TEXT_COLOR, MUTED_COLOR, GRID_COLOR = "#1f2430", "#667085", "#e6e8ec"
BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7"
"""Okabe and Ito's palette (Color Universal Design, 2008)."""

CYCLE = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)
LINE_COLORS = (*CYCLE, "#7f4f24", TEXT_COLOR)
"""Colours of lines, in plots with more lines than `CYCLE` has colours."""

DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.4, 1.2)), (0, (6, 1.5, 1.5, 1.5)))

HEIGHT, HEADER = 6.25, 0.875
"""Inches: height of a figure, whose width is 10, and of its title and subtitle."""

LARGE_DOT: dict[str, Any] = {"marker": "o", "markersize": 11, "markeredgecolor": "white", "zorder": 4}
"""Arguments of `Axes.plot` for a dot that stands out from the dots of a line."""

LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 10.5, "labelcolor": TEXT_COLOR}
"""Arguments of every legend."""

PLAIN_NUMBERS = FuncFormatter(lambda value, _: f"{value:g}")  # on logarithmic axes: 0.01, no power of ten

_MAX_NAME_CHARS = 30

LineStyles = Mapping[str, Mapping[str, Any]]
"""The line of each variant in all plots of a report, as arguments of `Axes.plot`; its `label` is the legend text."""


def new_figure(
    title: str, subtitle: str, panels: int = 1, height: float = HEIGHT
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `panels` axes side by side, without pyplot: 1600 pixels wide, 160 per inch of `height`."""
    figure = Figure(figsize=(10, height), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1, panels, left=0.095, right=0.975, bottom=0.11, top=0.80, wspace=0.27)
    figure.text(0.03, 1 - 0.344 / height, title, size=16, weight="bold", color=TEXT_COLOR)
    figure.text(0.03, 1 - 0.638 / height, subtitle, size=11, color=MUTED_COLOR)
    return figure, [clean_axes(figure.add_subplot(grid[0, index])) for index in range(panels)]


def clean_axes(axes: Axes) -> Axes:
    """Remove the box and the tick marks from `axes`, and put a light grid behind the data."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED_COLOR)
    axes.grid(axis="y", color=GRID_COLOR, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=MUTED_COLOR, labelsize=10.5, length=0, pad=6)
    return axes


def label(axes: Axes, x: str, y: str, percent: bool = False) -> None:
    """Set the labels of both axes, which include the unit; `percent` formats shares on the y axis as percentages."""
    axes.set_xlabel(x, size=11.5, color=TEXT_COLOR, labelpad=8)
    axes.set_ylabel(y, size=11.5, color=TEXT_COLOR, labelpad=8)
    if percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.4g} %"))


def legend(axes: Axes, columns: int, **options: Any) -> Legend:
    """Put the legend above the axes, where it covers no data; `options` are further arguments of `Axes.legend`."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "borderaxespad": 0.1}
    sizes: dict[str, Any] = {"ncols": columns, "handlelength": 1.6, "columnspacing": 1.4}
    legend: Legend = axes.legend(**place, **sizes, **LEGEND, **options)
    return legend


def fit_legends(figure: Figure, panels: Sequence[Axes]) -> None:
    """Put the legends of all panels above them, in as many columns as fit, and shrink the panels to make room."""
    lefts = [axes.get_window_extent().x0 for axes in panels]
    height = 0.0
    for axes, left, end in zip(panels, lefts, [*lefts[1:], figure.bbox.width], strict=True):
        for columns in range(len(axes.get_legend_handles_labels()[0]), 0, -1):
            extent = legend(axes, columns).get_window_extent()
            if extent.width <= end - left or columns == 1:
                height = max(height, extent.height / figure.bbox.height)
                break
    top = min(0.80, 1 - 0.72 / figure.get_figheight() - height)
    for axes in panels:
        box = axes.get_position()
        axes.set_position((box.x0, box.y0, box.width, top - box.y0))


def amount_axis(axes: Axes, axis: Axis, amounts: Sequence[float]) -> None:
    """Set the limits of the x axis to the steps, or to what runs have taken; a single value is in the middle.

    Steps have integer ticks; large numbers have the prefixes k, M, G, T, P of the SI.
    """
    low, high = min(amounts), max(amounts)
    pad = 0.02 * (high - low) if high > low else 1.0
    axes.set_xlim(low - pad, high + pad)
    if low == high:
        axes.set_xticks([low])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=axis == STEP, steps=[1, 2, 5, 10]))
    if axis.name in ("tokens", "flops"):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def save(figure: Figure, path: Path) -> Path:
    """Write `figure` to `path` in the format of its suffix (png, pdf, svg), atomically; return the path."""
    return write_atomically(path, lambda temporary: figure.savefig(temporary, format=path.suffix[1:]))


def variant_styles(names: Sequence[str], baseline: str | None) -> LineStyles:
    """Return the line of each variant: each colour once, then the colours with other dashes; the baseline is grey."""
    styles = {}
    for index, name in enumerate(name for name in names if name != baseline):
        dash = DASHES[(index + index // len(LINE_COLORS)) % len(DASHES)]
        line = {"color": LINE_COLORS[index % len(LINE_COLORS)], "linestyle": dash, "linewidth": 2.2}
        styles[name] = {**line, "label": legend_name(name)}
    if baseline is not None:
        grey = {"color": MUTED_COLOR, "linestyle": "-", "linewidth": 2.8}
        styles[baseline] = {**grey, "label": f"{legend_name(baseline)} (baseline)"}
    return styles


def side_legend(
    figure: Figure, axes: Axes, final_values: Mapping[str, float], styles: LineStyles, shading: str = ""
) -> None:
    """Put a legend right of the axes and shrink the axes to fit.

    Args:
        final_values: last value of each variant, by which the legend is sorted, the largest first.
        styles: the line of each variant.
        shading: meaning of the shaded areas, the last entry of the legend; "" where there are none.
    """
    names = sorted(final_values, key=lambda name: -final_values[name])
    handles: list[Line2D | Patch] = [Line2D([], [], **styles[name]) for name in names]
    if shading:
        handles.append(Patch(facecolor=MUTED_COLOR, alpha=0.25, linewidth=0, label=shading))
    top = 1 - HEADER / HEIGHT
    place: dict[str, Any] = {"loc": "upper right", "bbox_to_anchor": (0.985, top + 0.02)}
    texts = [str(handle.get_label()) for handle in handles]
    legend = figure.legend(handles, texts, handlelength=2.4, labelspacing=0.75, **place, **LEGEND)
    width = legend.get_window_extent().width / figure.bbox.width
    box = axes.get_position()
    axes.set_position((box.x0, box.y0, 0.985 - width - 0.02 - box.x0, top - box.y0))


def legend_name(name: str) -> str:
    """Return a name as legend text: escaped, and without its middle if it is long, since names differ at their ends."""
    if len(name) > _MAX_NAME_CHARS:
        half = (_MAX_NAME_CHARS - 1) // 2
        name = f"{name[:half]}…{name[-half:]}"
    return escape_mathtext(name)


def escape_mathtext(text: str) -> str:
    """Return `text` on one line with dollar signs escaped, which matplotlib would read as mathematics."""
    return " ".join(text.split()).replace("$", r"\$")
