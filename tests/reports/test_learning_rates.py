"""Runs are grouped into lines of equal settings apart from the learning rate, and the report has their plot."""

from __future__ import annotations

import pytest
import yaml

from bandpo_cli.reports.sweep import select_runs, write_report
from bandpo_cli.reports.sweep.arms import group_by_arm
from bandpo_cli.reports.sweep.runs import read_arm_run
from bandpo_cli.reports.sweep.selection import ArmRun
from bandpo_cli.reports.sweep.tuning import accuracy_by_learning_rate
from tests.reports.sweep_folders import CLIP, KL, write_run


def _lines(runs):
    return accuracy_by_learning_rate(group_by_arm(map(read_arm_run, runs)), ["countdown"])


@pytest.fixture
def grid(tmp_path):
    """Return a folder with clip and kl at two learning rates, two seeds each, and kl at one with another schedule."""
    folder = tmp_path / "grid"
    for method, settings, shift in (("clip", CLIP, 0.0), ("kl", KL, 0.2)):
        for rate, final in (("1e-4", 0.5), ("1e-5", 0.3)):
            for seed in (0, 1):
                write_run(
                    folder / f"{method}-{rate}-{seed}",
                    (*settings, f"optim.lr={rate}"),
                    seed,
                    {0: 0.2, 4: final + shift + seed / 100},
                )
    write_run(folder / "other", (*KL, "optim.lr=1e-5", "optim.schedule=linear"), 0, {0: 0.2, 4: 0.9})
    return folder


def test_runs_with_equal_other_settings_are_a_line(grid):
    assert _lines(select_runs([grid], grid).runs) == {
        "clip schedule=constant": {1e-5: [0.3, 0.31], 1e-4: [0.5, 0.51]},
        "kl 0.05 schedule=constant": {1e-5: [0.5, 0.51], 1e-4: [0.7, 0.71]},
        "kl 0.05 schedule=linear": {1e-5: [0.9]},
    }


@pytest.mark.parametrize(
    ("arms", "line"),
    [
        (("clip lr=1e-5", "clip lr=0.0001"), "clip"),
        (("a optim.lr=1e-5 updates=8", "a optim.lr=1e-4 updates=8"), "a updates=8"),
        (("lr=1e-5", "lr=1e-4"), "clip"),  # nothing else in the name: the method
        (("slow", "fast"), "clip"),
        (("slow clear=1 lr=1e-5", "slow clear=1"), "slow clear=1"),
    ],
)
def test_a_line_has_the_name_of_its_arms_without_the_learning_rate(tmp_path, arms, line):
    runs = [
        ArmRun(arm, 0, write_run(tmp_path / f"{index}", (*CLIP, f"optim.lr={rate}")))
        for index, (arm, rate) in enumerate(zip(arms, ("1e-5", "1e-4"), strict=True))
    ]
    assert _lines(runs) == {line: {1e-5: [0.4], 1e-4: [0.4]}}


def test_lines_of_the_same_name_are_numbered(tmp_path):
    runs = []
    for updates in (4, 8):
        for rate in ("1e-5", "1e-4"):
            folder = write_run(
                tmp_path / f"{updates}-{rate}", (*CLIP, f"optim.lr={rate}", f"optim.updates={updates}")
            )
            runs.append(ArmRun(f"{updates}-{rate}", 0, folder))
    assert list(_lines(runs)) == ["clip", "clip #2"]


def test_arms_that_differ_in_more_than_the_learning_rate_are_two_lines(tmp_path):
    runs = [
        ArmRun("a", 0, write_run(tmp_path / "a", (*CLIP, "optim.lr=1e-5"))),
        ArmRun("b", 0, write_run(tmp_path / "b", (*CLIP, "optim.lr=1e-4", "optim.updates=8"))),
    ]
    assert _lines(runs) == {"a": {1e-5: [0.4]}, "b": {1e-4: [0.4]}}


def test_a_run_without_a_numeric_learning_rate_is_in_no_line(tmp_path):
    runs = [
        ArmRun(rate, 0, write_run(tmp_path / rate, (*CLIP, f"optim.lr={rate}")))
        for rate in ("1e-5", "1e-4", "1e-3")
    ]
    path = tmp_path / "1e-3" / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["optim"]["lr"] = "fast"
    path.write_text(yaml.safe_dump(config))
    assert _lines(runs) == {"clip": {1e-5: [0.4], 1e-4: [0.4]}}


def test_all_forms_of_the_report_have_the_plot(grid, tmp_path):
    selection = select_runs([grid], grid)
    report = write_report(selection.runs, "t", None, tmp_path / "out")
    assert (tmp_path / "out" / "accuracy_lr.png").is_file()
    assert report.files["accuracy_lr.png"] == tmp_path / "out" / "accuracy_lr.png"
    caption = "Held-out accuracy against learning rate"
    assert f"![{caption}](accuracy_lr.png)" in report.files["report.md"].read_text()
    assert f'alt="{caption}"' in report.files["report.html"].read_text()
