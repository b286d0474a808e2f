"""Sweeps with tuned settings: the best variant of each group, with other seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from bandpo_cli.config.layers import read_assignments, resolve, to_yaml
from bandpo_cli.config.sweep import SweepConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.experiments.sweep_request import plan_sweep, request_from_config
from bandpo_cli.reports.comparison.tuning import read_tuning
from bandpo_cli.sweeps.folder import SweepFolder
from tests.reports.sweep_folders import write_plan, write_run

FINALS = {
    ("clip", "clip lr=1e-05", ("bounds.method=clip", "optim.lr=1e-5")): {100: 0.30, 101: 0.32},
    ("clip", "clip lr=0.0001", ("bounds.method=clip", "optim.lr=1e-4")): {100: 0.40, 101: 0.21},
    ("kl", "kl 0.02 lr=1e-05", ("bounds.delta=0.02", "optim.lr=1e-5")): {100: 0.10, 101: 0.20},
    ("kl", "kl 0.1 lr=1e-05", ("bounds.delta=0.1", "optim.lr=1e-5")): {100: 0.50, 101: 0.40},
}
"""Final accuracy by seed of each variant (group, variant, settings). clip 1e-4 has the best single run and the
lower mean."""


def write_tuning(runs_dir: Path, **status: str | None) -> None:
    """Write the finished sweep `tuning`; `status` has that of the first run of a group in place of FINISHED."""
    folder = runs_dir / "tuning"
    (folder / "plans").mkdir(parents=True)
    runs = []
    for (group, arm, settings), by_seed in FINALS.items():
        for seed, final in by_seed.items():
            name = f"{arm.replace(' ', '-')}-s{seed}"
            given = status.get(group, "FINISHED") if seed == 100 and "1e-05" in arm else "FINISHED"
            write_run(folder / name, settings, seed, {0: 0.2, 2: 0.9 - final, 4: final}, status=given)
            layer = read_assignments([f"seed={seed}", "steps=4", *settings])
            (folder / "plans" / f"{name}.yaml").write_text(to_yaml(resolve([layer])), encoding="utf-8")
            runs.append({"name": name, "arm": arm, "seed": seed, "group": group})
    write_plan(folder, {"name": "tuning", "runs": runs})


def settings_of(runs_dir: Path, config: SweepConfig) -> Mapping[str, tuple[float, float | None]]:
    """Return learning rate and radius of each variant."""
    request = request_from_config(config, [], runs_dir)
    return {run.arm: (run.config.optim.lr, getattr(run.config.bounds, "delta", None)) for run in request.runs}


def test_each_group_has_the_settings_with_the_best_mean_and_new_seeds(tmp_path: Path) -> None:
    write_tuning(tmp_path)
    options = {"tuned_on": "tuning", "seeds": "0,1,2", "baseline": "clip"}
    request = plan_sweep(None, {}, [], options, [{"steps": 7}], tmp_path)
    assert [(run.name, run.arm, run.seed) for run in request.runs] == [
        (f"{arm}-s{seed}", arm, seed) for seed in (0, 1, 2) for arm in ("clip", "kl")
    ]
    for run in request.runs:
        best = "bounds.method=clip" if run.arm == "clip" else "bounds.delta=0.1"
        expected = [f"seed={run.seed}", "steps=7", best, "optim.lr=1e-5"]
        assert run.config == resolve([read_assignments(expected)])
    assert [kind for kind, _ in request.notes()] == ["tuned:", "tuned:"]
    assert request.notes()[1][1] == (
        "kl: bounds.delta = 0.1; accuracy 0.450 over 2 seeds, the best of 2 variants"
    )


def test_the_plan_on_disk_says_how_the_settings_were_chosen(tmp_path: Path) -> None:
    write_tuning(tmp_path)
    request = request_from_config(SweepConfig(tuned_on="tuning"), [], tmp_path)
    folder = SweepFolder.create(tmp_path, "tested", request.runs, request.baseline, request.about)
    assert [run.arm for run in SweepFolder.open(tmp_path, "tested").runs] == ["clip", "kl"]
    tuning = read_tuning(folder)
    assert tuning == request.tuning
    assert tuning is not None
    assert (tuning.sweep, tuning.metric, tuning.seeds) == ("tuning", "accuracy", [100, 101])
    assert [(arm.arm, arm.values, arm.chosen) for arm in tuning.arms] == [
        (arm, list(values.values()), arm in ("clip lr=1e-05", "kl 0.1 lr=1e-05"))
        for (_, arm, _), values in FINALS.items()
    ]
    assert [arm.settings for arm in tuning.arms[:2]] == [{"optim.lr": 1e-5}, {"optim.lr": 1e-4}]
    assert read_tuning(SweepFolder.read(tmp_path / "tuning")) is None


def test_the_area_can_decide(tmp_path: Path) -> None:
    """In between, the accuracy is 0.9 minus the final one, so that the order of the areas is the opposite."""
    write_tuning(tmp_path)
    config = SweepConfig(tuned_on="tuning", tuned_by="area")
    assert settings_of(tmp_path, config) == {"clip": (1e-4, None), "kl": (1e-5, 0.02)}


def test_an_arm_with_a_failed_run_is_not_chosen(tmp_path: Path) -> None:
    write_tuning(tmp_path, clip="FAILED")
    assert settings_of(tmp_path, SweepConfig(tuned_on="tuning"))["clip"] == (1e-4, None)


@pytest.mark.slow
def test_a_run_that_was_stopped_early_counts_as_failed(tmp_path: Path) -> None:
    write_tuning(tmp_path, clip="KILLED")
    folder = SweepFolder.open(tmp_path, "tuning")
    folder.record_stopped("clip-lr=1e-05-s100", "far behind")
    assert settings_of(tmp_path, SweepConfig(tuned_on="tuning"))["clip"] == (1e-4, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "config", "message"),
    [
        ({"clip": None}, {}, r"1 of the 8 runs of tuning are not finished \(clip-lr=1e-05-s100\); finish them "
         r"first: bandpo sweep --resume tuning"),
        ({"clip": "KILLED"}, {}, "1 of the 8 runs of tuning are not finished"),
        ({"kl": "FAILED"}, {}, "no variant of kl has finished with every seed"),
        ({}, {"seeds": (0, 101)}, "seed 101 chose the settings in tuning; give seeds other than 100, 101"),
        ({}, {"tuned_on": "tunning"}, "no sweep 'tunning'.*did you mean 'tuning'"),
        ({}, {"baseline": "clipp"}, "baseline = 'clipp': no variant of that name.*clip, kl"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line(
    tmp_path: Path, status: dict[str, str | None], config: dict[str, object], message: str
) -> None:
    write_tuning(tmp_path, **status)
    with pytest.raises(ConfigError, match=message):
        request_from_config(SweepConfig(**{"tuned_on": "tuning", **config}), [], tmp_path)


def test_a_plan_without_groups_cannot_be_tuned_on(tmp_path: Path) -> None:
    write_tuning(tmp_path)
    path = tmp_path / "tuning" / "sweep.yaml"
    plan = yaml.safe_load(path.read_text(encoding="utf-8"))
    for run in plan["runs"]:
        del run["group"]
    write_plan(path.parent, plan)
    with pytest.raises(ConfigError, match="written by an earlier version"):
        request_from_config(SweepConfig(tuned_on="tuning"), [], tmp_path)


def test_axes_beside_a_tuning_sweep_are_refused(tmp_path: Path) -> None:
    write_tuning(tmp_path)
    with pytest.raises(ConfigError, match="axes: the variants are those of tuned_on = tuning; remove one"):
        plan_sweep(None, {"optim.lr": "1e-5"}, [], {"tuned_on": "tuning"}, [], tmp_path)
