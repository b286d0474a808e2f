"""The report of a sweep with tuned settings lists the candidates and says which were chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bandpo_cli.cli import app
from bandpo_cli.reports.sweep.tuning import TunedArm, Tuning, accuracy_by_learning_rate
from tests.reports.sweep_folders import write_plan, write_sweep

TUNING = Tuning(
    "pilot",
    "accuracy",
    [100, 101],
    [
        TunedArm("clip", "clip a", {"optim.lr": 2e-5}, [0.30, 0.32]),
        TunedArm("clip", "clip b", {"optim.lr": 5e-5}, [0.40, 0.41], chosen=True),
        TunedArm("clip", "clip c", {"optim.lr": 1e-4}, [0.35, 0.10]),
        TunedArm("kl", "kl a", {"optim.lr": 5e-5, "bounds.delta": 0.02}, [0.20, 0.21]),
        TunedArm("kl", "kl b", {"optim.lr": 1e-4, "bounds.delta": 0.02}, [0.50, 0.30], chosen=True),
        TunedArm("kl", "kl c", {"optim.lr": 1e-4, "bounds.delta": 0.05}, [0.10, 0.12]),
    ],
)


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """Return the folder of a sweep whose plan has `TUNING`."""
    folder = write_sweep(tmp_path / "tested", {"clip": {0: 0.5, 1: 0.6}, "kl": {0: 0.7, 1: 0.75}})
    runs = [
        {"name": f"{arm}-s{seed}", "arm": arm, "seed": seed, "group": arm}
        for arm in ("clip", "kl")
        for seed in (0, 1)
    ]
    write_plan(folder, {"name": "tested", "baseline": "clip", **TUNING.as_plan(), "runs": runs})
    return folder


def report_of(folder: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["report", str(folder), *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_tables_list_all_candidates(tuned: Path) -> None:
    report_of(tuned)
    rows = (tuned / "report" / "report.md").read_text(encoding="utf-8").splitlines()
    start = rows.index("## Tuned settings")
    assert "seeds 100, 101" in rows[start + 2]
    assert [row.split(" | ")[1:] for row in rows[start + 6 : start + 12]] == [
        ["optim.lr = 2e-5", "0.310", "0.300, 0.320", " |"],
        ["optim.lr = 5e-5", "0.405", "0.400, 0.410", "chosen |"],
        ["optim.lr = 1e-4", "0.225", "0.350, 0.100", " |"],
        ["optim.lr = 5e-5, bounds.delta = 0.02", "0.205", "0.200, 0.210", " |"],
        ["optim.lr = 1e-4, bounds.delta = 0.02", "0.400", "0.500, 0.300", "chosen |"],
        ["optim.lr = 1e-4, bounds.delta = 0.05", "0.110", "0.100, 0.120", " |"],
    ]
    page = (tuned / "report" / "report.html").read_text(encoding="utf-8")
    chosen = page.split('<tr class="significant">\n<td class="name">')[1:]
    assert [row.partition("<")[0] for row in chosen][-2:] == [
        "optim.lr = 5e-5",
        "optim.lr = 1e-4, bounds.delta = 0.02",
    ]


def test_a_number_at_an_end_of_the_values_tried_is_named(tuned: Path) -> None:
    """clip's rate lies between the others; of kl both numbers are at an end."""
    (note,) = TUNING.notes_on_range()
    assert "optim.lr = 1e-4 of kl, bounds.delta = 0.02 of kl." in note
    assert "clip" not in note
    assert f"note: {note}" in report_of(tuned).splitlines()
    assert replace(TUNING, arms=TUNING.arms[:3]).notes_on_range() == []


def test_a_single_value_is_no_end(tuned: Path) -> None:
    assert replace(TUNING, arms=[TUNING.arms[1]]).notes_on_range() == []


def test_the_plot_has_a_line_per_method_and_other_settings(tuned: Path) -> None:
    assert accuracy_by_learning_rate(TUNING) == {
        "clip": {2e-5: [0.30, 0.32], 5e-5: [0.40, 0.41], 1e-4: [0.35, 0.10]},
        "kl delta=0.02": {5e-5: [0.20, 0.21], 1e-4: [0.50, 0.30]},
        "kl delta=0.05": {1e-4: [0.10, 0.12]},
    }
    report_of(tuned)
    assert (tuned / "report" / "tuning_lr.png").is_file()
    assert "(tuning_lr.png)" in (tuned / "report" / "report.md").read_text(encoding="utf-8")


def test_the_json_has_the_tuning(tuned: Path) -> None:
    tuning = json.loads(report_of(tuned, "--format", "json"))["tuning"]
    assert (tuning["sweep"], tuning["metric"], tuning["seeds"]) == ("pilot", "accuracy", [100, 101])
    assert [arm["arm"] for arm in tuning["arms"] if arm["chosen"]] == ["clip b", "kl b"]


def test_a_sweep_without_tuning_has_none(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "plain", {"clip": {0: 0.5}, "kl": {0: 0.7}})
    assert json.loads(report_of(folder, "--format", "json"))["tuning"] is None
    assert "Tuned" not in (folder / "report" / "report.md").read_text(encoding="utf-8")
    assert not (folder / "report" / "tuning_lr.png").exists()
