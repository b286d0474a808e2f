"""Sweeps with tuned settings: the best variant of each group, with other seeds."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest

from bandpo_cli.config.layers import read_assignments, resolve
from bandpo_cli.errors import ConfigError
from bandpo_cli.reports.tuned_settings import read_tuning
from bandpo_cli.storage.sweep_folder import SweepFolder
from bandpo_cli.sweeps import sweep_plan
from bandpo_cli.sweeps.sweep_plan import SweepConfig, plan_from_config, plan_sweep
from tests.reports.sweep_folders import write_plan, write_run

FINALS = {
    ("clip", "clip lr=1e-05", ("bounds.method=clip", "optim.lr=1e-5")): {100: 0.30, 101: 0.32},
    ("clip", "clip lr=0.0001", ("bounds.method=clip", "optim.lr=1e-4")): {100: 0.40, 101: 0.21},
    ("kl", "kl 0.02 lr=1e-05", ("bounds.delta=0.02", "optim.lr=1e-5")): {100: 0.10, 101: 0.20},
    ("kl", "kl 0.1 lr=1e-05", ("bounds.delta=0.1", "optim.lr=1e-5")): {100: 0.50, 101: 0.40},
}
"""Final accuracy by seed of each variant. clip 1e-4 has the best single run and the lower mean."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder of the finished sweep `tuning`."""
    folder = tmp_path_factory.mktemp("runs") / "tuning"
    (folder / "plans").mkdir(parents=True)
    runs = []
    for (group, variant, settings), by_seed in FINALS.items():
        for seed, final in by_seed.items():
            name = f"{variant.replace(' ', '-')}-s{seed}"
            write_run(folder / name, settings, seed, {0: 0.2, 2: 0.9 - final, 4: final})
            shutil.copy(folder / name / "config.yaml", folder / "plans" / f"{name}.yaml")
            runs.append({"name": name, "variant": variant, "seed": seed, "group": group})
    write_plan(folder, {"name": "tuning", "runs": runs})
    return folder


@pytest.fixture
def runs_dir(finished, tmp_path):
    """Return a folder with a copy of `tuning`."""
    shutil.copytree(finished, tmp_path / "tuning")
    return tmp_path


def set_status(runs_dir: Path, run: str, status: str | None, **summary: str) -> None:
    """Give a run another summary; None for a run without one."""
    path = runs_dir / "tuning" / run / "summary.json"
    path.unlink()
    if status is not None:
        path.write_text(json.dumps({"status": status, "error": "it failed", "steps": 4} | summary))


def settings_of(runs_dir: Path, config: SweepConfig) -> Mapping[str, tuple[float, float | None]]:
    """Return learning rate and radius of each variant."""
    runs = plan_from_config(config, [], runs_dir).runs
    return {run.variant: (of.optim.lr, getattr(of.bounds, "delta", None)) for run, of in runs.items()}


def test_each_group_has_the_settings_with_the_best_mean_and_new_seeds(runs_dir):
    options = {"tuned_on": "tuning", "seeds": "0,1,2", "baseline": "clip"}
    request = plan_sweep(None, {}, [], options, [{"steps": 7}], runs_dir)
    names = [f"{variant}-s{seed}" for seed in (0, 1, 2) for variant in ("clip", "kl")]
    assert [run.name for run in request.runs] == names
    for run, config in request.runs.items():
        best = "bounds.method=clip" if run.variant == "clip" else "bounds.delta=0.1"
        expected = [f"seed={run.seed}", "steps=7", best, "optim.lr=1e-5"]
        assert config == resolve([read_assignments(expected)])
    assert [kind for kind, _ in request.notes()] == ["tuned:", "tuned:"]
    note = "kl: bounds.delta = 0.1; accuracy 0.450 over 2 seeds, the best of 2 variants"
    assert request.notes()[1][1] == note


def test_the_plan_on_disk_says_how_the_settings_were_chosen(runs_dir):
    request = plan_from_config(SweepConfig(tuned_on="tuning"), [], runs_dir)
    folder = SweepFolder.create(runs_dir, "tested", request.runs, request.baseline, request.about)
    assert [run.variant for run in SweepFolder.open(runs_dir, "tested").runs] == ["clip", "kl"]
    tuning = read_tuning(folder)
    assert tuning == request.tuning
    assert (tuning.sweep, tuning.metric, tuning.seeds) == ("tuning", "accuracy", [100, 101])
    assert [item.variant for item in tuning.variants if item.chosen] == ["clip lr=1e-05", "kl 0.1 lr=1e-05"]
    finals = {variant: list(values.values()) for (_, variant, _), values in FINALS.items()}
    assert {variant.variant: variant.values for variant in tuning.variants} == finals
    assert [variant.settings for variant in tuning.variants[:2]] == [{"optim.lr": 1e-5}, {"optim.lr": 1e-4}]
    assert read_tuning(SweepFolder.read(runs_dir / "tuning")) is None


def test_the_area_can_decide(runs_dir):
    """In between, the accuracy is 0.9 minus the final one, so that the order of the areas is the opposite."""
    config = SweepConfig(tuned_on="tuning", tuned_by="area")
    assert settings_of(runs_dir, config) == {"clip": (1e-4, None), "kl": (1e-5, 0.02)}


@pytest.mark.parametrize(("reason", "best"), [("stop.tokens = 350: ...", 1e-5), ("stop.steps", 1e-4)])
def test_a_run_that_has_reached_a_budget_can_be_chosen(runs_dir, reason, best):
    set_status(runs_dir, "clip-lr=1e-05-s100", "FINISHED", stopped_by=reason)
    assert settings_of(runs_dir, SweepConfig(tuned_on="tuning"))["clip"] == (best, None)


def test_settings_that_forks_have_chosen_are_those_of_forks(runs_dir, monkeypatch):
    plan, point = runs_dir / "tuning" / "sweep.yaml", mock.Mock(text="/a@2")
    plan.write_text(f"{plan.read_text()}fork: /a@2\n")
    monkeypatch.setattr(sweep_plan, "fork_point", lambda text, runs_dir: {"/a@2": point}[text])
    request = plan_from_config(SweepConfig(tuned_on="tuning"), [], runs_dir)
    assert (request.about["fork"], point.changes_to.call_count) == ("/a@2", len(request.runs))


@pytest.mark.parametrize("stopped", [False, True])
def test_an_arm_with_a_failed_or_stopped_run_is_not_chosen(runs_dir, stopped):
    set_status(runs_dir, "clip-lr=1e-05-s100", "KILLED" if stopped else "FAILED")
    if stopped:
        SweepFolder.open(runs_dir, "tuning").record_stopped("clip-lr=1e-05-s100", "far behind")
    assert settings_of(runs_dir, SweepConfig(tuned_on="tuning"))["clip"] == (1e-4, None)
    for variant in ("0.02", "0.1"):
        set_status(runs_dir, f"kl-{variant}-lr=1e-05-s100", "FAILED")
    with pytest.raises(ConfigError, match="no variant of kl has finished with every seed"):
        settings_of(runs_dir, SweepConfig(tuned_on="tuning"))


@pytest.mark.parametrize(
    ("run", "status", "config", "message"),
    [
        ("clip-lr=1e-05-s100", None, {}, r"1 of the 8 runs of tuning are not finished \(clip-lr=1e-05-s100\); finish "
         r"them first: bandpo sweep --resume tuning"),
        ("clip-lr=1e-05-s100", "KILLED", {}, "1 of the 8 runs of tuning are not finished"),
        (None, None, {"seeds": (0, 101)}, "seed 101 chose the settings in tuning; give seeds other than 100, 101"),
        (None, None, {"tuned_on": "tunning"}, "no sweep 'tunning'.*did you mean 'tuning'"),
        (None, None, {"baseline": "clipp"}, "baseline = 'clipp': no variant of that name.*clip, kl"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line(runs_dir, run, status, config, message):
    if run is not None:
        set_status(runs_dir, run, status)
    with pytest.raises(ConfigError, match=message):
        plan_from_config(SweepConfig(**{"tuned_on": "tuning", **config}), [], runs_dir)


def test_axes_beside_a_tuning_sweep_are_refused(runs_dir):
    with pytest.raises(ConfigError, match="axes: the variants are those of tuned_on = tuning; remove one"):
        plan_sweep(None, {"optim.lr": "1e-5"}, [], {"tuned_on": "tuning"}, [], runs_dir)
    chosen = "optim.lr = 1e-4: tuning has chosen 1e-5 for clip; remove it from the flags, --config, --set and `fixed`"
    own = {"optim": {"lr": 1e-4}}
    for fixed, layers in ((own, []), ({}, [own])):
        with pytest.raises(ConfigError, match=chosen):
            plan_from_config(SweepConfig(tuned_on="tuning", fixed=fixed), layers, runs_dir)
