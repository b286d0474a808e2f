"""The HTML page of a report fits windows of a laptop and of a phone, measured in a browser where there is one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.reports.sweep import select_runs, write_report
from tests.reports.sweep_folders import write_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1280, 390)

MEASURE = """
<script>
const found = [];
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument, root = page.documentElement;
  const tables = [...page.querySelectorAll("table")].map((table) => ({
    heading: table.closest("section").querySelector("h2").textContent,
    width: table.getBoundingClientRect().width,
    box: table.parentElement.getBoundingClientRect().right,
    scrolls: getComputedStyle(table.parentElement).overflowX,
    first: table.querySelector(".name").getBoundingClientRect().width,
  }));
  found.push({window: root.clientWidth, page: root.scrollWidth, tables});
}
document.body.textContent = JSON.stringify(found);
</script>
"""


def _measure(page: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """Return the widths of the page and of its tables in windows of `WIDTHS`, in CSS pixels."""
    source = html.escape(page.read_text(encoding="utf-8"), quote=True)
    frames = "".join(
        f'<iframe style="width:{width}px;border:0" srcdoc="{source}"></iframe>' for width in WIDTHS
    )
    # The script runs once the frames are loaded: the load event of the outer page waits for them.
    script = MEASURE.replace("<script>", "<script>onload = () => {").replace("</script>", "}</script>")
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(f"<!doctype html><body>{frames}{script}", encoding="utf-8")
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1400,900", "--dump-dom", wrapper.as_uri(),
        ],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    match = re.search(r"<body>(\[.*\])</body>", done.stdout, re.DOTALL)
    assert match is not None, done.stdout[-2000:]
    found: list[dict[str, Any]] = json.loads(html.unescape(match[1]))
    return found


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the page of a report with arms that differ in many settings, two sets and an excluded run."""
    monkeypatch.setattr("bandpo_cli.reports.sweep.write.plot_all", lambda *_: {})
    folder = tmp_path / "runs"
    path = "a-folder-with-a-long-name/" * 4
    for arm in range(5):
        settings = (
            f"bounds.delta={0.01 * (arm + 1)}", f"optim.lr={1e-4 * (arm + 1)}", f"optim.eps={1e-8 * (arm + 1)}",
            f"optim.weight_decay={arm / 100}", f"sampling.temperature={1 + arm / 10}", f"sampling.max_tokens={8 + arm}",
            f"reward.correct={1 + arm / 10}", f"model.path={path}{arm}", f"task.max_number={9 - arm}",
            f"evaluation.temperature={1 - arm / 10}",
        )  # fmt: skip
        for seed in (0, 1):
            write_run(
                folder / f"{arm}-{seed}",
                settings,
                seed,
                {0: 0.1, 4: 0.2 + 0.1 * arm + 0.01 * seed},
                sets=("a-problem-set-with-a-name", "math500"),
            )
    write_run(folder / "failed", (*settings, "seed=7"), 7, status="FAILED")
    selection = select_runs([folder], folder)
    report = write_report(selection.runs, "a title", selection.runs[0].arm, tmp_path / "out", selection.notes)
    return report.files["report.html"]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_page_has_no_horizontal_scroll_at_any_width(page: Path, tmp_path: Path) -> None:
    for width, found in zip(WIDTHS, _measure(page, tmp_path), strict=True):
        assert width - 20 <= found["window"] <= width  # a scroll bar at the right takes up to 20 pixels
        assert found["page"] == found["window"]
        headings = [table["heading"].split(" from ")[0] for table in found["tables"]]
        assert headings == [
            "Leaderboard",
            "Differences",
            "Excluded runs",
            "Settings in which the arms differ",
        ]
        for table in found["tables"]:
            assert table["scrolls"] == "auto"
            assert table["box"] <= found["window"]
            assert table["first"] < width / 2  # the first column stays in place while the table scrolls
        if width > 1000:
            settings = found["tables"][-1]
            assert settings["width"] <= settings["box"]  # no scrolling at all on a laptop


def test_each_table_scrolls_inside_itself_and_the_page_fits_the_window(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(re.findall("<table>", text)) == 4
    assert len(re.findall(r'<div class="scroll"[^>]*>\s*<table>', text)) == 4
    assert re.search(r"\.scroll \{ overflow-x: auto;", text)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text


def test_settings_are_rows_and_arms_are_columns(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    table = text[text.index("<h2>Settings in which") :]
    head, *rows = re.findall("<tr>.*?</tr>", table, re.DOTALL)
    assert head.count("<th") == 6
    cells = {
        key: values
        for key, *values in (re.findall(">([^<]*)</td>", row.replace("<wbr>", "")) for row in rows)
    }
    assert cells["task.max_number"] == ["5", "6", "7", "8", "9"]  # the most accurate arm first
    assert cells["bounds.delta"] == ["0.05", "0.04", "0.03", "0.02", "0.01"]
    assert "checkpoint.every" not in cells
