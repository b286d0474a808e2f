"""`bandpo report`: output, location of the files, and error messages."""

import json
from functools import partial

import pytest

from tests.cli.eval_command import bandpo, usage_error
from tests.reports.sweep_folders import CLIP, KL, write_run, write_sweep

FINALS = {"clip": {0: 0.40, 1: 0.42, 2: 0.41}, "kl 0.02": {0: 0.50, 1: 0.53, 2: 0.52}}


@pytest.fixture
def report(monkeypatch, tmp_path):
    """Return a function that runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return partial(bandpo, "report", cwd=tmp_path)


def test_the_report_of_a_sweep_is_written_to_its_folder(report, tmp_path):
    write_sweep(tmp_path / "runs" / "deltas", FINALS)
    code, out, err = report("deltas")
    assert (code, err) == (0, "")
    assert "Against clip, final held-out accuracy is better for kl 0.02" in out
    rows = [line.split() for line in out.splitlines()]
    kl = rows.index(["±0.038", "±0.019", "±0.015", "±0.038", "1.25–1.25"])
    clip = rows.index(["baseline", "±0.025", "±0.012", "±0.025", "1.25–1.25"])
    assert rows[kl - 1] == ["kl", "0.02", "3", "0.517", "0.358", "0.300", "0.323", "0.817", "2.00%", "1.25"]
    assert rows[clip - 1][:4] == ["clip", "3", "0.410", "0.305"]
    assert kl < clip
    for name in ("report.html", "report.md", "report.json", "leaderboard.csv", "accuracy.png"):
        assert (tmp_path / "runs" / "deltas" / "report" / name).is_file()
        assert name in out


def test_standard_output_is_json_only(report, tmp_path):
    write_sweep(tmp_path / "runs" / "deltas", FINALS)
    code, out, err = report("runs/deltas", "--format", "json", "--out", "there")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert [variant["name"] for variant in found["variants"]] == ["kl 0.02", "clip"]
    assert found["variants"][1]["metrics"]["accuracy"]["mean"] == pytest.approx(0.41)
    assert found["files"]["report.html"] == "there/report.html"
    assert json.loads((tmp_path / "there" / "report.json").read_text()) == found
    assert (tmp_path / "there" / "report.html").is_file()
    assert not (tmp_path / "runs" / "deltas" / "report").exists()


def test_the_report_of_single_runs_is_written_to_the_current_folder(report, tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"a{seed}", CLIP, seed, {4: 0.3 + 0.1 * seed})
        write_run(tmp_path / "runs" / f"b{seed}", KL, seed, {4: 0.4 + 0.2 * seed})
    code, out, _ = report("runs/a0", "runs/a1", "b0", "b1", "--baseline", "clip")
    assert code == 0
    assert "Against clip, final held-out accuracy is undecided for kl 0.05" in out
    assert (tmp_path / "report" / "report.html").is_file()
    assert report("runs/a0", "runs/a1", "runs/b0", "runs/b1")[0] == 0
    parts = ["report has a report of other runs", "--out DIR"]
    usage_error("report", "runs/a0", "b0", cwd=tmp_path, parts=parts)
    code, out, _ = report("runs", "--by", "bounds.method, optim.lr", "--out", "x")
    assert code == 0
    assert "band lr=5e-5" in out


def test_excluded_runs_are_listed(report, tmp_path):
    write_run(tmp_path / "runs" / "a", CLIP)
    write_run(tmp_path / "runs" / "b", CLIP, 1, status="FAILED")
    (tmp_path / "runs" / "c").mkdir()
    (tmp_path / "runs" / "c" / "config.yaml").write_text("[")
    _, out, _ = report("runs")
    arguments = " ".join(out.split())
    assert "excluded: b: clip, seed 1: failed at step 4 of 4: NonFiniteError: the loss is nan" in arguments
    assert "excluded: c: config.yaml, line " in arguments


def test_nothing_is_truncated_in_80_columns(report, tmp_path):
    name = "Qwen2.5-0.5B-Instruct kl 0.05 sampling.temperature=0.7"
    write_sweep(tmp_path / "s", {"clip": FINALS["clip"], name: FINALS["kl 0.02"]})
    _, out, _ = report("s", COLUMNS="80")
    assert "…" not in out
    assert "±0.038" in out
