"""Registries: each entry loads, and a new entry works through the command line without any other edit."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from bandpo_cli.config.layers import read_assignments, resolve
from bandpo_cli.config.task import TaskSettings
from bandpo_cli.custom_code import is_function_path, load_function
from bandpo_cli.errors import ConfigError
from bandpo_cli.methods import METHODS
from bandpo_cli.methods.settings import MethodSettings
from bandpo_cli.registries import (
    ADVANTAGES,
    DATASETS,
    DIVERGENCES,
    ENGINES,
    GRADERS,
    SIGNATURES,
    TASKS,
    Entry,
    Registry,
    load_attribute,
    task_kind,
)
from tests.cli.eval_command import succeed

ROOT = Path(__file__).parents[1]
REGISTRIES = [METHODS, DIVERGENCES, ADVANTAGES, ENGINES, DATASETS, GRADERS, SIGNATURES, TASKS]


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_each_attribute_that_an_entry_names_exists(registry):
    for entry in registry.values():
        for value in vars(entry).values():
            if isinstance(value, str) and value.startswith("bandpo_cli."):
                assert load_attribute(value) is not None, value


def test_the_settings_classes_have_their_entries_names():
    for name, method in METHODS.items():
        settings = load_attribute(method.settings)
        assert issubclass(settings, MethodSettings)
        assert settings().method == name
    for name, task in TASKS.items():
        settings = load_attribute(task.settings)
        assert issubclass(settings, TaskSettings)
        assert settings(name=name).name == name


def test_the_entries_of_data_sets_refer_to_registered_names():
    for entry in DATASETS.values():
        assert entry.grader in GRADERS
        assert all(DATASETS[name].eval_split for name in entry.evaluation)
        assert task_kind(entry.name) == "data"


def test_names_of_entries_in_messages_and_help_texts():
    registry = Registry("pet", [Entry("cat", ""), Entry("dog", ""), Entry("ant", "")])
    assert registry.names_text() == "cat, dog or ant"
    assert registry.names_text(["cat", "ant"]) == "cat or ant"
    assert registry.names_text(["dog"]) == "dog"
    with pytest.raises(ValueError, match=r"no pet .* \(did you mean 'dog'\?\); known: cat, dog, ant$"):
        registry.check_name("dg")
    with pytest.raises(ValueError, match="no pet of that name"):
        registry.check_name("module:function")
    with pytest.raises(ValueError, match="pet 'dog' already"):
        registry.register(Entry("dog", "another dog"))


def test_a_function_path_is_accepted_where_the_registry_says_so():
    assert DIVERGENCES.check_name("module:function") == "module:function"
    assert DIVERGENCES.names_text().endswith("js, or a custom f as module:function")
    with pytest.raises(ValueError, match="or a custom f as module:function"):
        DIVERGENCES.check_name("my-module:f")
    assert is_function_path("a.b:c")
    assert not any(map(is_function_path, ["", "a", "a:", ":b", "a b:c", "a..b:c", "a:b:c"]))


def test_a_custom_function_is_imported_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "registries_custom.py").write_text("number = 3\ndef double(x):\n    return 2 * x\n")
    (tmp_path / "registries_exits.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    before = [*sys.path]
    assert load_function("registries_custom:double")(4) == 8
    for name, message in (
        ("registries_custom:doubl", r"has no function 'doubl' \(did you mean 'double'\?\)"),
        ("registries_custom:number", "has no function 'number'"),
        ("registries_no_module:f", "importing 'registries_no_module' failed"),
        ("registries_exits:f", r"'registries_exits' failed: SystemExit: 3 \(registries_exits.py:1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            load_function(name)
    assert sys.path == before


HELPS = {
    "train --help": ["--method", "--divergence", "--sampler", "--task"],
    "eval --help": ["--task", "--sampler", "--grader"],
    "sweep --help": ["--method", "--divergence", "--sampler"],
    "bounds --help": ["--divergence", "--compare", "--match"],
}
"""The options whose help has the names of entries, by command."""
BOUNDS = [
    "bounds 0.1 -d dummy,chi2 --compare dummy --format json",
    "bounds --match dummy --at 0.1 -d dummy --format json",
]


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """The output of each command in a process that registers the dummy entries before it imports the commands."""
    code = "import sys, tests.dummy_extension\nfrom bandpo_cli.__main__ import app\nfor command in sys.argv[1:]:\n"
    code += "    print(end='\\f', flush=True)\n    app(command.split(), standalone_mode=False)\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "dumb"}
    words = [sys.executable, "-c", code, *HELPS, *BOUNDS]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    return dict(zip([*HELPS, *BOUNDS], done.stdout.split("\f")[1:], strict=True))


@pytest.mark.slow
def test_help_texts_name_the_registered_entries(outputs):
    for command, options in HELPS.items():
        for option in options:
            _, _, text = outputs[command].partition(f"\n│ {option} ")
            assert "dummy" in text.partition("\n│ --")[0], (command, text)


@pytest.mark.slow
def test_a_registered_divergence_and_method_have_bounds(outputs):
    dummy, chi2, method = json.loads(outputs[BOUNDS[0]])
    assert dummy["upper"] == pytest.approx(chi2["upper"], rel=1e-9)
    assert (method["divergence"], method["lower"], method["upper"]) == ("dummy", 0.9, 1.1)
    (matched,) = json.loads(outputs[BOUNDS[1]])
    assert matched["delta"] == pytest.approx(0.01 * 0.1 / 0.9)


@pytest.fixture(scope="module")
def _dummies() -> Iterator[None]:
    """Register the dummy entries in this process; remove them after the tests of this module."""
    before = [dict(registry) for registry in REGISTRIES]
    import_module("tests.dummy_extension")
    yield
    for registry, entries in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.mark.usefixtures("_dummies")
def test_sections_of_entries_that_are_registered_later_are_validated():
    config = resolve([{"bounds": {"method": "dummy", "width": 0.3}, "task": {"name": "dummy"}}])
    assert config.bounds.model_dump() == {"method": "dummy", "width": 0.3}
    assert (config.bounds.slug(), config.bounds.describe()) == ("dummy", "dummy: a dummy")
    assert config.task.model_dump()["problems"] == 2


@pytest.mark.usefixtures("_dummies")
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("bounds.method=dumy", r"= 'dumy': unknown \(did you mean 'dummy'\?\); allowed: band, clip"),
        ("bounds.divergence=dumy", r"no divergence of that name \(did you mean 'dummy'\?\)"),
        ("sampling.engine=dumy", r"no sampling engine of that name \(did you mean 'dummy'\?\)"),
        ("task.name=dumy-set", r"= 'dumy-set': unknown \(did you mean 'dummy-set'\?\); allowed: countdown"),
        ("task={name: gsm8k, grader: dumy}", r"no grader of that name \(did you mean 'dummy'\?\)"),
        ("bounds={method: dummy, wdth: 1}", r"of 'dummy' \(did you mean 'width'\?\); known: method"),
    ],
)
def test_error_messages_name_the_registered_entries(setting, message):
    with pytest.raises(ConfigError, match=message):
        resolve([read_assignments([setting])])


@pytest.mark.slow
@pytest.mark.usefixtures("_dummies")
def test_a_registered_grader_grades_stored_completions(tmp_path):
    rows = [{"question": "2 + 2?", "answer": "4", "completions": ["4", "Answer: 4"]}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    flags = ("--grader", "dummy", "--no-mlflow", "--format", "json")
    assert "0.5" in succeed("eval", "--samples", "rows.json", *flags, cwd=tmp_path).out


@pytest.mark.slow
@pytest.mark.usefixtures("_dummies")
def test_a_run_has_registered_entries_of_every_kind(tmp_path, monkeypatch):
    """The embedded model reads countdown problems only, so this needs a small language model."""
    from tests.text_model import save_text_model

    corpus = ["1 + 3 = 4", "2 + 2 = 4"]
    model = str(save_text_model(tmp_path / "model", corpus, 300, layers=1, hidden=64))
    small = "sampling.prompts=2 sampling.samples=4 optim.updates=1 evaluation.samples=4 evaluation.k=[4]"
    options = [part for setting in small.split() for part in ("--set", setting)]
    words = "train --method dummy --sampler dummy --task dummy --steps 1 --name run --no-mlflow --model"
    succeed(*words.split(), model, *options, cwd=tmp_path)
    (step,) = map(json.loads, (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()[-1:])
    assert (step["step"], step["train/accuracy"], step["eval/dummy/mean_at_4"]) == (1, 0.5, 0.5)
    assert "method: dummy\n  width: 0.1" in (tmp_path / "runs" / "run" / "config.yaml").read_text()

    (tmp_path / "set").mkdir()
    rows = [{"q": f"{n} + {n}?", "a": str(2 * n)} for n in range(7)]
    for split, part in (("train", rows[2:]), ("test", rows[:2])):
        (tmp_path / "set" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, part)))
    entry = replace(DATASETS["dummy-set"], hub_id=str(tmp_path / "set"))
    monkeypatch.setitem(DATASETS, "dummy-set", entry)
    done = succeed("train", "--task", "dummy-set", "--model", model, "--dry-run", cwd=tmp_path)
    assert "dummy-set, 5 training problems" in done.out
