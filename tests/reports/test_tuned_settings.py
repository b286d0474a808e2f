"""Reports list the candidates of tuned settings, and plot accuracies by learning rate, a line per other settings."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from bandpo_cli.cli.report import print_report
from bandpo_cli.errors import UserError
from bandpo_cli.reports.run_tables import read_runs
from bandpo_cli.reports.run_variants import select_runs
from bandpo_cli.reports.tuned_settings import TunedVariant, Tuning, by_learning_rate, read_tuning
from tests.conftest import output_of
from tests.reports.sweep_folders import CLIP, KL, report_of, report_on, write_plan, write_sweep, write_variant

CANDIDATES = [
    TunedVariant("clip", "clip a", {"optim.lr": 2e-5}, [0.30, 0.32]),
    TunedVariant("clip", "clip b", {"optim.lr": 5e-5}, [0.40, 0.41], chosen=True),
    TunedVariant("clip", "clip c", {"optim.lr": 1e-4}, [0.35, 0.10]),
    TunedVariant("kl", "kl a", {"optim.lr": 5e-5, "bounds.delta": 0.02}, [0.20, 0.21]),
    TunedVariant("kl", "kl b", {"optim.lr": 1e-4, "bounds.delta": 0.02}, [0.50, 0.30], chosen=True),
    TunedVariant("kl", "kl c", {"optim.lr": 1e-4, "bounds.delta": 0.05}, [0.10, 0.12]),
]
TUNING = Tuning("pilot", "accuracy", [100, 101], CANDIDATES)
RATES = ("1e-5", "1e-4")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return the report of a sweep whose plan has `TUNING`."""
    finals = {"clip": {0: 0.5, 1: 0.6}, "kl": {0: 0.7, 1: 0.75}}
    folder = write_sweep(tmp_path_factory.mktemp("runs") / "tested", finals)
    plan = yaml.safe_load((folder / "sweep.yaml").read_text())
    write_plan(folder, {**plan, "tuning": asdict(TUNING)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
        return report_of(folder)


def test_the_tables_list_all_candidates(report):
    rows = report.files["report.md"].read_text(encoding="utf-8").splitlines()
    start = rows.index("## Tuned settings")
    assert "seeds 100, 101" in rows[start + 2]
    assert [row.partition(" | ")[2] for row in rows[start + 6 : start + 11]] == [
        "optim.lr = 2e-5 | 0.310 | 0.300, 0.320 |  |",
        "optim.lr = 5e-5 | 0.405 | 0.400, 0.410 | chosen |",
        "optim.lr = 1e-4 | 0.225 | 0.350, 0.100 |  |",
        "optim.lr = 5e-5, bounds.delta = 0.02 | 0.205 | 0.200, 0.210 |  |",
        "optim.lr = 1e-4, bounds.delta = 0.02 | 0.400 | 0.500, 0.300 | chosen |",
    ]
    page = report.files["report.html"].read_text(encoding="utf-8")
    *_, clip, kl = page.split('<tr class="significant">\n<td class="name">')
    assert clip.startswith("optim.lr = 5e-5<")
    assert kl.startswith("optim.lr = 1e-4, bounds.delta = 0.02<")


def test_a_number_at_an_end_of_the_values_tried_is_named(report):
    """clip's rate lies between the others; of kl both numbers are at an end."""
    (note,) = TUNING.notes_on_range()
    assert "optim.lr = 1e-4 of kl, bounds.delta = 0.02 of kl." in note
    assert "clip" not in note
    assert note in report.notes
    assert replace(TUNING, variants=TUNING.variants[:3]).notes_on_range() == []
    assert replace(TUNING, variants=[TUNING.variants[1]]).notes_on_range() == []  # a single value is no end


def test_the_terminal_names_the_chosen_settings(report):
    lines = output_of(print_report, report, width=150).splitlines()
    clip, kl = (line for line in lines if line.startswith("tuned:"))
    assert clip == "tuned: clip: optim.lr = 5e-5; accuracy 0.405 over 2 seeds, the best of 3 variants"
    assert kl.startswith("tuned: kl: optim.lr = 1e-4, bounds.delta = 0.02; accuracy 0.400 over 2 seeds")


def test_the_plot_has_a_line_per_method_and_other_settings(report):
    assert TUNING.by_learning_rate() == {
        "clip": {2e-5: [0.30, 0.32], 5e-5: [0.40, 0.41], 1e-4: [0.35, 0.10]},
        "kl delta=0.02": {5e-5: [0.20, 0.21], 1e-4: [0.50, 0.30]},
        "kl delta=0.05": {1e-4: [0.10, 0.12]},
    }
    assert report.files["tuning_lr.png"].is_file()
    assert "(tuning_lr.png)" in report.files["report.md"].read_text(encoding="utf-8")
    assert json.loads(json.dumps(report.as_json()))["tuning"] == json.loads(json.dumps(asdict(TUNING)))


def test_a_damaged_tuning_is_refused(tmp_path):
    folder = write_sweep(tmp_path / "plain", {"clip": {0: 0.5}})
    plan = yaml.safe_load((folder / "sweep.yaml").read_text())
    assert read_tuning(select_runs([folder], tmp_path).sweep) is None
    write_plan(folder, {**plan, "tuning": {**asdict(TUNING), "metric": "speed"}})
    message = r"sweep\.yaml: tuning\.metric = 'speed': Input should be 'accuracy', 'reward' or"
    with pytest.raises(UserError, match=message):
        read_tuning(select_runs([folder], tmp_path).sweep)


def _run(folder, variant, *settings, seed=0, final=0.4):
    return write_variant(folder, variant, settings, seed, accuracy={0: 0.2, 4: final})


def _lines(runs):
    return by_learning_rate(read_runs(runs).average(["countdown"]).runs, "accuracy")


@pytest.fixture
def grid(tmp_path):
    """Return a folder with clip and kl at two learning rates, two seeds each, and kl at one with another schedule."""
    folder = tmp_path / "grid"
    for method, settings, shift in (("clip", CLIP, 0.0), ("kl", KL, 0.2)):
        for rate, final in (("1e-4", 0.5), ("1e-5", 0.3)):
            for seed in (0, 1):
                end, lr = final + shift + seed / 100, f"optim.lr={rate}"
                _run(folder, f"{method} {rate}", *settings, lr, seed=seed, final=end)
    _run(folder, "other", *KL, "optim.lr=1e-5", "optim.schedule=linear", final=0.9)
    return folder


def test_runs_with_equal_other_settings_are_a_line_in_all_forms_of_the_report(grid, tmp_path, figures):
    selection = select_runs([grid], grid)
    assert _lines(selection.runs) == {
        "clip schedule=constant": {1e-5: [0.3, 0.31], 1e-4: [0.5, 0.51]},
        "kl 0.05 schedule=constant": {1e-5: [0.5, 0.51], 1e-4: [0.7, 0.71]},
        "kl 0.05 schedule=linear": {1e-5: [0.9]},
    }
    report = report_on(selection.runs, tmp_path)
    assert report.files["accuracy_lr.png"] == tmp_path / "out" / "accuracy_lr.png"
    caption, markdown = "Held-out accuracy against learning rate", report.files["report.md"].read_text()
    assert f"![{caption}](accuracy_lr.png)" in markdown
    assert f'alt="{caption}"' in report.files["report.html"].read_text()
    assert "Tuned" not in markdown


@pytest.mark.parametrize(
    ("variants", "line"),
    [
        (("clip lr=1e-5", "clip lr=0.0001"), "clip"),
        (("a optim.lr=1e-5 updates=8", "a optim.lr=1e-4 updates=8"), "a updates=8"),
        (("lr=1e-5", "lr=1e-4"), "clip"),  # nothing else in the name: the method
        (("slow", "fast"), "clip"),
        (("slow clear=1 lr=1e-5", "slow clear=1"), "slow clear=1"),
    ],
)
def test_a_line_has_the_name_of_its_variants_without_the_learning_rate(tmp_path, variants, line):
    rates = zip(variants, RATES, strict=True)
    runs = [_run(tmp_path, variant, *CLIP, f"optim.lr={rate}") for variant, rate in rates]
    assert _lines(runs) == {line: {1e-5: [0.4], 1e-4: [0.4]}}


def test_lines_of_the_same_name_are_numbered_and_a_run_without_a_numeric_learning_rate_is_in_none(tmp_path):
    runs = [
        _run(tmp_path, f"{updates}-{rate}", *CLIP, f"optim.lr={rate}", f"optim.updates={updates}")
        for updates in (4, 8)
        for rate in RATES
    ]
    assert list(_lines(runs)) == ["clip", "clip #2"]
    path = runs[1].folder / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.0001", "lr: fast"))
    assert _lines(runs) == {"4-1e-5": {1e-5: [0.4]}, "clip": {1e-5: [0.4], 1e-4: [0.4]}}
