"""Untrusted settings files, sweep files and `--set`: accepted, or refused in one line, and nothing is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from bandpo_cli.config import files
from bandpo_cli.config.files import parse_yaml
from bandpo_cli.config.layers import read_assignments, read_layer, resolve, to_yaml
from bandpo_cli.errors import ConfigError
from bandpo_cli.experiments import sweep_request
from tests.fuzz.mutate import (
    ALIAS_BOMB,
    KINDS,
    MERGE_BOMB,
    NAMES,
    ODD,
    YAML_TEXTS,
    as_yaml,
    changed_values,
    damaged_files,
    each_entry_replaced,
    not_a_file,
)
from tests.fuzz.outcome import accepts, check_both_outcomes

DATA_TASK = {"name": "data", "train": [{"path": "a.jsonl", "fields": {"question": "q"}, "levels": [1]}]}
SWEEP: dict[str, Any] = {
    "fixed": {"steps": 2, "optim": {"lr": 1e-4}},
    "axes": {"bounds.method": ["band", "clip"], "bounds.delta": [0.01, 0.05], "optim.updates": [4, 8]},
    "arms": {"a": {"reward.wrong": -1}, "b": {}},
    "exclude": [{"bounds.method": "clip", "optim.updates": 8}],
    "seeds": [0, 1],
    "baseline": None,
}
QUICK = tuple(text for text in YAML_TEXTS if len(text) < 5000 or len(text) > 2**20)
COUNTS = pytest.mark.parametrize("count", [20, pytest.param(400, marks=pytest.mark.slow)])


@pytest.fixture
def empty_cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_request, "check_config", lambda config: None)
    return tmp_path


@pytest.mark.slow
@COUNTS
def test_settings_files(empty_cwd: Path, count: int) -> None:
    path = empty_cwd / "c.yaml"
    good = to_yaml(resolve([{"task": DATA_TASK}])).encode()
    value = yaml.safe_load(good)
    texts = QUICK if count < 100 else YAML_TEXTS
    contents = [*damaged_files(good, texts, 1, count), *map(as_yaml, changed_values(value, 2, count))]
    check_both_outcomes(lambda: to_yaml(resolve([read_layer(path)])), path, contents)


@pytest.mark.slow
def test_every_setting_with_every_unusual_value(empty_cwd: Path) -> None:
    """9,000 values, each as a layer read from a file, on top of a valid config."""
    value = yaml.safe_load(to_yaml(resolve([{"task": DATA_TASK}])))
    found = [
        accepts(lambda entry=entry: resolve([value, entry]), entry) for entry in each_entry_replaced(value)
    ]
    assert len(found) > 3000
    assert 0.05 < sum(found) / len(found) < 0.95


@COUNTS
def test_sweep_files(empty_cwd: Path, count: int) -> None:
    path = empty_cwd / "sweep.yaml"
    contents = [
        *damaged_files(as_yaml(SWEEP), QUICK[:20], 3, count),
        *map(as_yaml, changed_values(SWEEP, 4, count)),
    ]
    contents += [as_yaml(SWEEP)] if count < 100 else map(as_yaml, each_entry_replaced(SWEEP))
    check_both_outcomes(
        lambda: sweep_request.plan_sweep(path, {}, [], {}, [], empty_cwd / "runs"),
        path,
        contents,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_paths_that_are_not_files(empty_cwd: Path, kind: str) -> None:
    path = empty_cwd / "c.yaml"
    path.write_text("seed: 1\n")
    with not_a_file(path, kind):
        assert not accepts(lambda: read_layer(path), kind)


def test_assignments(empty_cwd: Path) -> None:
    texts = [*NAMES, *(str(item) for item in ODD), *(text for text in QUICK if len(text) < 5000)]
    found = [
        accepts(lambda key=key, text=text: resolve([read_assignments([f"{key}={text}"])]), (key, text))
        for key in ("model.path", "optim.lr", "bounds", "a\nb")
        for text in texts
    ]
    assert 0 < sum(found) < len(found)


def test_sweep_flags(empty_cwd: Path) -> None:
    def plan(axes: list[str], options: dict[str, str | None]) -> object:
        return sweep_request.plan_sweep(None, {}, axes, options, [], empty_cwd / "runs")

    for text in NAMES:
        axes: tuple[list[str], ...] = ([text], [f"optim.lr={text}"])
        for axis in axes:
            accepts(lambda axis=axis: plan(axis, {}), axis)
        for name in ("seeds", "baseline", "recorded", "tuned_on"):
            accepts(lambda name=name, text=text: plan([], {name: text}), (name, text))
    assert not list(empty_cwd.iterdir())


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (ALIAS_BOMB, "values"),
        (MERGE_BOMB, "not readable"),
        ("a: &a [*a]", "deep"),
        pytest.param("- 1\n" * 120_000, "100,000 values", marks=pytest.mark.slow),
        ("a: 0x" + "f" * 101, "100 digits"),
        ("a: " + "1:" * 60 + "1", "100 digits"),
        ("[" * 60 + "]" * 60, "deep"),
    ],
    ids=["aliases", "merges", "recursive", "many", "hexadecimal", "base-60", "deep"],
)
def test_an_expensive_yaml_text_is_refused_with_its_reason(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parse_yaml(text, "--config x")


def test_anchors_and_number_formats_are_read() -> None:
    text = "a: &x {lr: 1.0e-4, n: 1_000, h: 0x1F}\nb: *x\nc: [*x, *x]\nd: .inf\ne: 12:30\n"
    inner = {"lr": 1e-4, "n": 1000, "h": 31}
    assert parse_yaml(text, "") == {"a": inner, "b": inner, "c": [inner] * 2, "d": float("inf"), "e": 750}


TOKENS = (
    "a", "b:", "- ", ": ", "1e-3", "no", "0.5", "[", "]", "{", "}", ",", "'", " #", "\n", "  ", "01", "@", "=",
)  # fmt: skip


@given(st.lists(st.sampled_from(TOKENS)))
def test_libyaml_and_the_python_parser_read_the_same(parts: list[str]) -> None:
    text = "".join(parts)
    assume(files._SIMPLE.fullmatch(text))
    try:
        fast = yaml.load(text, Loader=files._FastLoader)
    except yaml.YAMLError:
        return  # then the Python parser decides
    assert fast == yaml.load(text, Loader=files._StrictLoader)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["[", "- ", "{a:", "a: ["])
def test_deeply_nested_short_texts_do_not_exhaust_the_stack(part: str) -> None:
    text = part * (4096 // len(part))
    assert files._SIMPLE.fullmatch(text)
    with pytest.raises(ConfigError):
        parse_yaml(text, "file")
