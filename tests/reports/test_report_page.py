"""Files of a report: plots are embedded and linked, names are escaped, tables scroll inside the page."""

import base64
import re

import pytest

from bandpo_cli.reports.run_variants import Selection, VariantRun, select_runs
from bandpo_cli.reports.write_report import write_report
from tests.reports.pages import Page
from tests.reports.sweep_folders import CLIP, report_of, report_on, write_run, write_sweep, write_variant

PLOTS = ["accuracy.png", "entropy.png", "accuracy_entropy.png", "clip_by_probability.png"]


@pytest.mark.slow
def test_page_and_markdown_have_the_plots_and_need_no_network(tmp_path):
    sweep = write_sweep(tmp_path / "s", {"clip": {0: 0.4, 1: 0.42}, "kl 0.02": {0: 0.5, 1: 0.53}})
    report = report_of(sweep)
    text = report.files["report.html"].read_text()
    page = Page(text)
    assert not {"script", "link"} & set(page.names)
    assert "@import" not in text
    assert "url(" not in text
    plots = [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in page.sources]
    assert plots == [(sweep / "report" / name).read_bytes() for name in PLOTS]
    for sentence in (report.title, report.finding, *report.notes):
        assert sentence in page.text
    markdown = report.files["report.md"].read_text()
    assert re.findall(r"!\[[^]]+\]\(([^)]+)\)", markdown) == PLOTS
    assert {path.name for path in (sweep / "report").iterdir()} == {
        *PLOTS, "leaderboard.csv", "report.html", "report.json", "report.md"
    }  # fmt: skip
    for content in (markdown, text):
        others = re.sub(r"[Hh]eld-out accuracy|entropy at [\d.]+% accuracy", "", content)
        assert not re.search("accuracy(?!_entropy|\\.png|_)", others)
    assert report.as_json()["variants"][0]["name"] == "kl 0.02"


@pytest.mark.usefixtures("without_plots")
def test_names_are_escaped_in_html_and_markdown(tmp_path):
    variant = "<script>alert(1)</script> | *a* $x$ [b](c)"
    folder = write_run(tmp_path / "a", CLIP)
    report = write_report(Selection("<b>t</b> & $", None, [VariantRun(variant, 0, folder)]), tmp_path / "out")
    page = Page(report.files["report.html"].read_text())
    assert not {"script", "b"} & set(page.names)
    assert variant in page.text
    lines = report.files["report.md"].read_text().splitlines()
    row = next(line for line in lines if line.startswith("| \\<script>"))
    head = next(line for line in lines if line.startswith("| variant"))
    assert len(re.findall(r"(?<!\\)\|", row)) == head.count("|")


@pytest.mark.usefixtures("without_plots")
def test_the_last_page_of_tokens_of_each_run_is_linked(tmp_path):
    folders = [write_run(tmp_path / name, CLIP, seed) for seed, name in enumerate(("a=b", "c"))]
    runs = [VariantRun("clip", seed, folder) for seed, folder in enumerate(folders)]
    (runs[0].folder / "view").mkdir()
    for name in ("step-000020.html", "step-000040.html", "step-000020_parts"):
        (runs[0].folder / "view" / name).touch()
    page = Page(report_on(runs, tmp_path).files["report.html"].read_text())
    assert page.sources == ["../a%3Db/view/step-000040.html"]
    assert "clip, seed 0" in page.text


def test_runs_with_accuracy_only_give_a_report(tmp_path, figures):
    names = ("train/entropy", "clip/active_fraction", "time/step", "clip/active_fraction/p_0.1_0.5")
    nothing = dict.fromkeys([*names, "clip/active_fraction/p_0.9_1"])
    finals = {0: {4: 0.3}, 1: {4: 1.3}}
    runs = [write_variant(tmp_path, "clip", CLIP, seed, accuracy=finals[seed], **nothing) for seed in finals]
    report = report_on(runs, tmp_path)
    assert [figure.key for figure in report.metrics] == ["accuracy", "pass_at_16"]
    assert list(figures) == ["accuracy.png"]


def test_tables_scroll_inside_the_page_and_settings_are_rows(tmp_path, without_plots):
    """The variants differ in many settings; there are two sets and an excluded run."""
    folder = tmp_path / "runs"
    for variant in range(3):
        numbers = (f"bounds.delta={0.01 * (variant + 1)}", f"task.max_number={9 - variant}")
        settings, accuracy = (*numbers, f"model.path={'x/' * 50}{variant}"), {0: 0.1, 4: 0.2 + 0.1 * variant}
        write_run(folder / f"{variant}", settings, 0, accuracy, sets=("a-long-name", "math500"))
    write_run(folder / "failed", settings, 7, status="FAILED")
    selection = select_runs([folder], folder)
    report = write_report(Selection("a title", selection.runs[0].variant, selection.runs), tmp_path / "out")
    text = report.files["report.html"].read_text(encoding="utf-8")
    assert len(re.findall("<table>", text)) == 4
    assert len(re.findall(r'<div class="scroll"[^>]*>\s*<table>', text)) == 4
    assert re.search(r"\.scroll \{ overflow-x: auto;", text)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    table = text[text.index("<h2>Settings in which") :]
    head, *rows = re.findall("<tr>.*?</tr>", table, re.DOTALL)
    assert head.count("<th") == 4
    texts = [re.findall(">([^<]*)</td>", row.replace("<wbr>", "")) for row in rows]
    cells = {key: values for key, *values in texts}
    assert cells["task.max_number"] == ["7", "8", "9"]  # the most accurate variant first
    assert cells["bounds.delta"] == ["0.03", "0.02", "0.01"]
    assert "checkpoint.every" not in cells
