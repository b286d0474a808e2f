"""Registries: each entry loads, and a new entry works through the command line without any other edit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bandpo_cli.config.methods import MethodSettings
from bandpo_cli.config.task import TaskSettings
from bandpo_cli.datasets import DATASETS, TASKS, task_kind
from bandpo_cli.registries import (
    DIVERGENCES,
    ENGINES,
    GRADERS,
    METHODS,
    SIGNATURES,
    Entry,
    Registry,
    is_function_path,
    load_attribute,
    load_function,
)
from tests.commands import run_bandpo

ROOT = Path(__file__).parents[1]
REGISTRIES: list[Registry[Entry]] = [METHODS, DIVERGENCES, ENGINES, DATASETS, GRADERS, SIGNATURES, TASKS]  # type: ignore[list-item]


def bandpo(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process in which the dummy entries are registered."""
    variables = {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "dumb", **environment}
    return run_bandpo(*arguments, cwd=cwd, imports=["tests.dummy_extension"], **variables)


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_each_attribute_that_an_entry_names_exists(registry: Registry[Entry]) -> None:
    for entry in registry.values():
        for value in vars(entry).values():
            if isinstance(value, str) and value.startswith("bandpo_cli."):
                assert callable(load_attribute(value)) or isinstance(load_attribute(value), dict), value


def test_the_settings_classes_have_their_entries_names() -> None:
    for name, method in METHODS.items():
        settings = load_attribute(method.settings)
        assert issubclass(settings, MethodSettings)
        assert settings().method == name
    for name, task in TASKS.items():
        settings = load_attribute(task.settings)
        assert issubclass(settings, TaskSettings)
        assert settings(name=name).name == name


def test_the_entries_of_data_sets_refer_to_registered_names() -> None:
    for entry in DATASETS.values():
        assert entry.grader in GRADERS
        assert all(DATASETS[name].eval_split for name in entry.evaluation)
        assert task_kind(entry.name) == "data"


def test_an_entry_is_registered_once_and_can_be_removed() -> None:
    registry = Registry("pet", [Entry("cat", "a cat"), Entry("dog", "a dog")])
    with pytest.raises(ValueError, match="pet 'dog' already"):
        registry.register(Entry("dog", "another dog"))
    del registry["cat"]
    assert [*registry] == ["dog"]


def test_texts_name_the_entries_in_their_order() -> None:
    registry = Registry("pet", [Entry("cat", ""), Entry("dog", ""), Entry("ant", "")])
    assert registry.names_text() == "cat, dog or ant"
    assert registry.names_text(lambda entry: entry.name != "dog") == "cat or ant"
    assert registry.names_text(lambda entry: entry.name == "dog") == "dog"
    with pytest.raises(
        ValueError, match=r"no pet of that name \(did you mean 'dog'\?\); known: cat, dog, ant$"
    ):
        registry.check_name("dg")
    with pytest.raises(ValueError, match="no pet of that name"):
        registry.check_name("module:function")


def test_a_function_path_is_accepted_where_the_registry_says_so() -> None:
    assert DIVERGENCES.check_name("module:function") == "module:function"
    assert DIVERGENCES.names_text().endswith("js, or a custom f as module:function")
    with pytest.raises(ValueError, match="or a custom f as module:function"):
        DIVERGENCES.check_name("my-module:f")
    assert is_function_path("a.b:c")
    assert not any(map(is_function_path, ["", "a", "a:", ":b", "a b:c", "a..b:c", "a:b:c"]))


def test_a_custom_function_is_imported_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registries_custom.py").write_text("number = 3\ndef double(x):\n    return 2 * x\n")
    monkeypatch.chdir(tmp_path)
    before = [*sys.path]
    assert load_function("registries_custom:double")(4) == 8
    for name, message in (
        ("registries_custom:doubl", r"has no function 'doubl' \(did you mean 'double'\?\)"),
        ("registries_custom:number", "has no function 'number'"),
        ("registries_no_module:f", "importing 'registries_no_module' failed"),
    ):
        with pytest.raises(ValueError, match=message):
            load_function(name)
    assert sys.path == before


def test_the_registries_need_the_standard_library_only() -> None:
    code = "import sys, bandpo_cli.registries; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"pydantic", "numpy", "torch", "typer", "yaml"} & set(done.stdout.split())


@pytest.mark.slow
def test_a_section_of_a_method_that_is_registered_later_is_validated() -> None:
    """The validators of the tagged unions are built again after a registration."""
    code = (
        "from bandpo_cli.config.layers import resolve; resolve([{'bounds': {'method': 'clip'}}]);"
        "import tests.dummy_extension;"
        "bounds = resolve([{'bounds': {'method': 'dummy', 'width': 0.3}}]).bounds;"
        "assert bounds.width == 0.3 and bounds.slug() == 'dummy' and bounds.describe() == 'dummy: a dummy';"
        "assert resolve([{'task': {'name': 'dummy'}}]).task.problems == 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *(("train", option) for option in ("--method", "--divergence", "--sampler", "--task")),
        *(("eval", option) for option in ("--task", "--sampler", "--grader")),
        *(("sweep", option) for option in ("--method", "--divergence", "--sampler")),
        *(("bounds", option) for option in ("--divergence", "--compare", "--match")),
    ],
)
def test_help_texts_name_the_registered_entries(command: str, option: str, helps: dict[str, str]) -> None:
    _, _, text = helps[command].partition(f"\n│ {option} ")
    assert "dummy" in text.partition("\n│ --")[0], text


@pytest.fixture(scope="module")
def helps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The help text of each command, with the dummy entries."""
    folder = tmp_path_factory.mktemp("helps")
    return {
        command: bandpo(command, "--help", cwd=folder).stdout
        for command in ("train", "eval", "sweep", "bounds")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "dumy"], "= 'dumy': unknown (did you mean 'dummy'?); allowed: band, clip"),
        (["--divergence", "dumy"], "no divergence of that name (did you mean 'dummy'?)"),
        (["--sampler", "dumy"], "= 'dumy': unknown (did you mean 'dummy'?); allowed: auto, transformers"),
        (["--task", "dumy-set"], "= 'dumy-set': unknown (did you mean 'dummy-set'?); allowed: countdown"),
        (["--set", "task={name: gsm8k, grader: dumy}"], "no grader of that name (did you mean 'dummy'?)"),
        (
            ["--method", "dummy", "--set", "bounds.wdth=1"],
            "of 'dummy' (did you mean 'width'?); known: method",
        ),
    ],
)
def test_error_messages_name_the_registered_entries(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = bandpo("train", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
def test_a_registered_divergence_and_method_have_bounds(tmp_path: Path) -> None:
    done = bandpo("bounds", "0.1", "-d", "dummy,chi2", "--compare", "dummy", "--format", "json", cwd=tmp_path)
    dummy, chi2, method = json.loads(done.stdout)
    assert dummy["upper"] == pytest.approx(chi2["upper"], rel=1e-9)
    assert (method["divergence"], method["lower"], method["upper"]) == ("dummy", 0.9, 1.1)
    matched = bandpo(
        "bounds", "--match", "dummy", "--at", "0.1", "-d", "dummy", "--format", "json", cwd=tmp_path
    )
    assert json.loads(matched.stdout)[0]["delta"] == pytest.approx(0.01 * 0.1 / 0.9)


@pytest.mark.slow
def test_a_registered_grader_grades_stored_completions(tmp_path: Path) -> None:
    rows = [{"question": "2 + 2?", "answer": "4", "completions": ["4", "Answer: 4"]}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    done = bandpo(
        "eval", "--samples", "rows.json", "--grader", "dummy", "--no-mlflow", "--format", "json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "0.5" in done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small language model: the embedded one reads countdown problems only."""
    from tests.text_model import save_text_model

    corpus = ["1 + 3 = 4", "2 + 2 = 4"]
    return str(save_text_model(tmp_path_factory.mktemp("model") / "m", corpus, 300, layers=1, hidden=64))


@pytest.mark.slow
def test_a_run_with_a_registered_method_engine_task_and_grader(tmp_path: Path, model: str) -> None:
    small = ["sampling.prompts=2", "sampling.samples=4", "optim.updates=1"]
    small += ["evaluation.samples=4", "evaluation.k=[4]"]
    options = [part for setting in small for part in ("--set", setting)]
    done = bandpo(
        *("train", "--method", "dummy", "--sampler", "dummy", "--task", "dummy", "--model", model),
        *("--steps", "1", "--name", "run", "--no-mlflow", *options),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (step,) = map(json.loads, (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()[-1:])
    assert (step["step"], step["train/accuracy"], step["eval/dummy/mean_at_4"]) == (1, 0.5, 0.5)
    assert "method: dummy\n  width: 0.1" in (tmp_path / "runs" / "run" / "config.yaml").read_text()


@pytest.mark.slow
def test_a_registered_data_set_is_a_task(tmp_path: Path, model: str) -> None:
    (tmp_path / "set").mkdir()
    rows = [{"q": f"{n} + {n}?", "a": str(2 * n)} for n in range(7)]
    for split, part in (("train", rows[2:]), ("test", rows[:2])):
        (tmp_path / "set" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, part)))
    done = bandpo(
        *("train", "--task", "dummy-set", "--model", model, "--dry-run"),
        cwd=tmp_path,
        DUMMY_DATASET=str(tmp_path / "set"),
    )
    assert done.returncode == 0, done.stderr
    assert "dummy-set, 5 problems" in done.stdout
