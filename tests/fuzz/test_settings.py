"""Untrusted settings files, sweep files and `--set`: accepted, or refused in one line, and nothing is executed."""

import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from bandpo_cli.config.layers import parse_yaml, read_assignments, read_layer, resolve, to_yaml
from bandpo_cli.sweeps import sweep_plan
from tests.fuzz.mutate import (
    NAMES,
    ODD,
    YAML_TEXTS,
    as_yaml,
    changed_values,
    damaged_files,
)
from tests.fuzz.outcome import accepts, check_both_outcomes

DATA_TASK = {"name": "data", "train": [{"path": "a.jsonl", "fields": {"question": "q"}, "levels": [1]}]}
SWEEP: dict[str, Any] = {
    "fixed": {"steps": 2, "optim": {"lr": 1e-4}},
    "axes": {"bounds.method": ["band", "clip"], "bounds.delta": [0.01, 0.05], "optim.updates": [4, 8]},
    "variants": {"a": {"reward.wrong": -1}, "b": {}},
    "exclude": [{"bounds.method": "clip", "optim.updates": 8}],
    "seeds": [0, 1],
    "baseline": None,
}
COUNT = 20
"""Files with changed bytes, and with changed values; every seed costs the same."""


@pytest.fixture
def empty_cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_plan, "check_config", lambda config: None)
    return tmp_path


@pytest.mark.slow
def test_settings_files(empty_cwd):
    path = empty_cwd / "c.yaml"
    good = to_yaml(resolve([{"task": DATA_TASK}])).encode()
    contents = [*damaged_files(good, YAML_TEXTS, 1, COUNT)]
    contents += map(as_yaml, changed_values(yaml.safe_load(good), 2, COUNT))
    check_both_outcomes(lambda: to_yaml(resolve([read_layer(path)])), path, contents)


@pytest.mark.slow
def test_sweep_files(empty_cwd):
    path = empty_cwd / "sweep.yaml"
    contents = [*damaged_files(as_yaml(SWEEP), YAML_TEXTS[:20], 3, COUNT), as_yaml(SWEEP)]
    contents += map(as_yaml, changed_values(SWEEP, 4, COUNT))
    plan = functools.partial(sweep_plan.plan_sweep, path, {}, [], {}, [], empty_cwd / "runs")
    check_both_outcomes(plan, path, contents)


def test_assignments(empty_cwd):
    texts = [*NAMES, *map(str, ODD), *(text for text in YAML_TEXTS if len(text) < 1000)]
    outcomes = [
        accepts(lambda key=key, text=text: resolve([read_assignments([f"{key}={text}"])]), (key, text))
        for key in ("model.path", "optim.lr", "bounds", "a\nb")
        for text in texts
    ]
    assert 0 < sum(outcomes) < len(outcomes)


def test_sweep_flags(empty_cwd):
    for text in NAMES[::2]:
        options = [{name: text} for name in ("seeds", "baseline", "recorded", "tuned_on")]
        for axes, option in [([text], {}), ([f"optim.lr={text}"], {}), *(([], option) for option in options)]:
            plan = functools.partial(sweep_plan.plan_sweep, None, {}, axes, option, [], empty_cwd / "runs")
            accepts(plan, (axes, option))
    assert not list(empty_cwd.iterdir())


def test_anchors_and_number_formats_are_read():
    text = "a: &x {lr: 1.0e-4, n: 1_000, h: 0x1F}\nb: *x\nc: [*x, *x]\nd: .inf\ne: 12:30\n"
    inner = {"lr": 1e-4, "n": 1000, "h": 31}
    assert parse_yaml(text, "") == {"a": inner, "b": inner, "c": [inner] * 2, "d": float("inf"), "e": 750}
