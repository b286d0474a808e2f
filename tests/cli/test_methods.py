"""Methods from the command line: the settings with their source, and a run of a method without bounds in all views."""

import json

import pandas as pd
import pytest

from bandpo_cli.cli.train_view import settings_rows
from bandpo_cli.config.layers import resolve
from bandpo_cli.methods import METHODS
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import Task, build_task
from bandpo_cli.tracking.trackers import FIRST_METRICS, finite_metrics
from tests.cli.eval_command import succeed
from tests.cli.train_runs import SMALL


@pytest.fixture(scope="module")
def task() -> Task:
    return build_task(resolve([{"task": {"max_number": 5}}]).task)


@pytest.mark.parametrize("method", METHODS)
def test_the_settings_has_the_methods_settings_and_source(task, method):
    config = resolve([{"bounds": {"method": method}}])
    described, *source = dict(settings_rows(config, task))["method"].split("\n")
    assert described == config.bounds.describe()
    paper = METHODS[method].paper
    assert source == ([f"{paper}, published defaults"] if paper else [])


def test_the_source_names_settings_that_differ_from_the_published_ones():
    """DPPO's published radius depends on its divergence."""
    dppo = {"method": "dppo", "divergence": "tv"}
    assert resolve([{"bounds": dppo}]).bounds.source() == "arXiv 2602.04879, published defaults"
    changed = resolve([{"bounds": {**dppo, "max_weight": 5, "delta": 0.1}}]).bounds
    assert changed.source() == "arXiv 2602.04879, delta, max_weight changed"


@pytest.mark.slow
def test_a_run_of_a_method_without_bounds_in_every_view(tmp_path):
    for name, method in (("soft", "sapo"), ("hard", "clip")):
        flags = ("--steps", "2", "--lr", "1e-3", "--name", name)
        succeed("train", "--method", method, *SMALL, *flags, cwd=tmp_path)
    for record in RunFolder(tmp_path / "runs" / "soft").read_metrics()[1:]:
        assert "clip/outside_fraction" not in record
        assert record["clip/active_fraction"] == record["gradient/zero_fraction"] == 0
        sent = finite_metrics(record)
        heldout = [name for name in ("Main/heldout_accuracy", "Main/heldout_reward") if name in sent]
        assert len(sent) == len(record) - 1 + len(FIRST_METRICS) + len(heldout)  # "step" is no metric
        assert not {name for name in sent if "/p_" in name}
    tokens = pd.read_parquet(tmp_path / "runs/soft/tokens/step-000002.parquet")
    assert (tokens["lower"] == 0).all()
    assert (tokens["gradient_weight"][tokens["advantage"] != 0] > 0).all()
    plots = {path.stem for path in (tmp_path / "runs/soft/plots").iterdir()}
    assert {"clip", "clip_map"} <= plots
    shown = succeed("show", "soft", cwd=tmp_path).out
    assert "SAPO: soft gate" in shown
    assert "gradient/weight_mean" in shown
    assert "clip/outside_fraction" not in shown
    assert "clip/outside_fraction" in succeed("show", "hard", cwd=tmp_path).out
    report = json.loads(succeed("report", "runs", "--format", "json", cwd=tmp_path).out)
    assert {variant["name"] for variant in report["variants"]} == {"sapo", "clip"}
