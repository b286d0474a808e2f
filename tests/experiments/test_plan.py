"""Checks before a run: model references, by each kind of name, and the warning about one update per batch."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config import shipped_configs
from bandpo_cli.config.layers import read_layer, resolve
from bandpo_cli.errors import ConfigError, UserError
from bandpo_cli.experiments import eval_plan
from bandpo_cli.experiments.plan import extreme_settings, new_run_layers, run_warnings
from bandpo_cli.methods import METHODS
from bandpo_cli.storage.checkpoints import ModelRef, check_model_path, resolve_model, run_layers
from bandpo_cli.storage.run_folder import RunFolder


def make_run(folder: Path, *steps: int) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    for step in steps:
        checkpoint = folder / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.json").write_text("{}")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a runs folder with `a`, which has steps 2 and 10, and `a@2`, which has step 5."""
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/a"), 2, 10)
    make_run(Path("runs/a@2"), 5)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return Path("runs")


@pytest.mark.parametrize(
    ("text", "name", "step"),
    [
        ("a", "a", 10),
        ("./runs/a/", "a", 10),
        ("a@010", "a", 10),
        ("runs/a@10", "a", 10),
        ("a@2", "a@2", 5),  # a run with this name has priority over a step of another run
        ("a@2@5", "a@2", 5),
        ("runs/a/checkpoints/step-000002", "a", 2),
        ("runs/../runs/a/checkpoints/step-000002", "a", 2),
    ],
)
def test_runs_and_their_steps(runs, text, name, step):
    ref = resolve_model(text, runs)
    assert (ref.run.name, ref.step) == (name, step)
    assert Path(ref.path).resolve() == (runs / name / "checkpoints" / f"step-{step:06d}").resolve()
    assert ref.stem == f"{name}@{step}"


def test_models_that_no_run_made(runs, tmp_path):
    assert resolve_model("embedded", runs) == ModelRef("embedded")
    for text in ("Qwen/Qwen2.5-0.5B", "gpt2"):  # the second is from before the hub had owners
        assert resolve_model(text, runs) == ModelRef(text)
        assert ModelRef(text).stem == text.removeprefix("Qwen/")
        check_model_path(text)
    for text in ("model", "./model", "model/", str(tmp_path / "model")):
        ref = resolve_model(text, runs)
        assert (Path(ref.path).resolve(), ref.run, ref.stem) == (tmp_path / "model", None, "model")


def test_the_home_folder_is_understood(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model", runs).path == str(tmp_path / "model")
    assert resolve_model("~/runs/a@2", Path("elsewhere")).stem == "a@2@5"
    # A model's folder may have a config.yaml of its own beside config.json.
    (runs / "a" / "config.json").write_text("{}")
    assert resolve_model("runs/a", runs).run is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a@3", "no such checkpoint in .*runs/a; there are: 2, 10"),
        ("runs/a/checkpoints/step-000003", "no such checkpoint in .*runs/a; there are: 2, 10"),
        ("a@", "expected a step after @"),
        ("a@last", "expected a step after @, as in a@100; not 'last'"),
        ("a@²", "expected a step after @"),
        ("a@" + "1" * 5000, "expected a step after @"),
        ("b", "no such run"),
        *((text, "no such run") for text in ("", "runs/b", "./b", "a/b/c", "../x", "a\0b", "~none/x")),
        *((text, "no such run") for text in ("x y/z", "a/" + "b" * 200, "x" * 5000)),
        ("runs", "no config.json there"),
    ],
)
def test_what_names_nothing(runs, text, words):
    with pytest.raises(UserError, match=words) as caught:
        resolve_model(text, runs)
    assert len(str(caught.value)) < 600


def test_a_gguf_file_is_answered_with_what_is_needed(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("model.gguf", "MODEL.GGUF", "folder/model-q4.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
        given = tmp_path / name.partition("/")[0]
        with pytest.raises(ConfigError, match=r"Face folder is needed, with config.json, ") as caught:
            resolve_model(str(given), tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="name the folder that save_pretrained wrote"):
        check_model_path(str(tmp_path / "model.safetensors"))


def test_unfinished_checkpoints_do_not_count(runs):
    """One that was being written when the run was killed has another name, or no config.json yet."""
    (runs / "a" / "checkpoints" / ".step-000020.writing").mkdir()
    (runs / "a" / "checkpoints" / "step-000030").mkdir()
    assert resolve_model("a", runs).step == 10
    make_run(runs / "young")
    with pytest.raises(UserError, match="there is none yet"):
        resolve_model("young", runs)


STORED = """
seed: 7
model: {path: a/b, revision: v1, dtype: float32}
task: {name: gsm8k, template: boxed, grader: number}
optim: {lr: 3.0e-6}
tracking: {parent: sweep}
"""


def test_a_new_run_of_a_checkpoint_has_the_settings_of_its_run(runs):
    (runs / "a" / "config.yaml").write_text(STORED)
    given = [{"model": {"path": "a"}}, {"optim": {"lr": 1e-5}, "model": {"path": "a@10"}}]
    expected = {
        "model": {"path": "runs/a/checkpoints/step-000010", "dtype": "float32"},
        "task": {"name": "gsm8k", "template": "boxed"},
    }
    config = resolve(new_run_layers(given, runs))
    assert config == resolve([{"seed": 7, "optim": {"lr": 1e-5}, **expected}])
    other = resolve([*new_run_layers([{"model": {"path": "a"}}], runs), {"task": {"train": "x.jsonl"}}])
    assert other.task.train[0].answer_grader == "math"


@pytest.mark.parametrize("model", ["embedded", "model", "some/id", 3, None])
def test_other_models_add_no_settings(runs, model):
    layers = [{"model": {"path": model}}, {"steps": 3}] if model else [{"model": model}]
    assert new_run_layers(layers, runs) == layers


def test_only_a_chosen_grader_of_a_run_is_used_for_other_data(runs):
    config = runs / "a" / "config.yaml"
    for grader in ("number", "math", "null"):
        config.write_text(f"task: {{name: gsm8k, grader: {grader}}}")
        layers = [] if grader == "math" else [{"task": {"grader": None}}]
        assert run_layers(RunFolder(runs / "a"))[1:] == layers


@pytest.mark.parametrize("task", [
    {"environment": "mine:Game", "system": "Be brief.", "max_turns": 3},
    {"tools": "mine:call", "rewards": [{"grader": "mine:reward"}, {"grader": "number", "weight": 0.5}]},
])  # fmt: skip
def test_an_evaluation_on_other_data_keeps_conversations_and_rewards(task):
    own = resolve({"task": {"name": "gsm8k", **task}})
    other = resolve([own.model_dump(), eval_plan._task_layer(["aime24"], own)]).task
    kept = {*task, "template", "grader"}
    assert other.model_dump(include=kept) == own.task.model_dump(include=kept)
    assert [source.name for source in other.sources("heldout")] == ["aime24"]


def warnings_of(method: str, updates: int = 1, **sections: Any) -> list[str]:
    return run_warnings(resolve([{"bounds": {"method": method}, "optim": {"updates": updates}}, sections]))


@pytest.mark.parametrize("method", METHODS)
def test_one_update_per_batch_is_warned_about_with_the_methods_that_still_differ(method):
    assert warnings_of(method, updates=4) == []
    warnings = ["all methods but luspo, wapo, clip-cov give the same run"] * (not METHODS[method].control)
    for warning, part in zip(warnings_of(method), warnings, strict=True):
        assert part in warning


@pytest.mark.parametrize(
    ("engine", "dtype", "warned"),
    [
        # With the log-probs of another engine as π_old the first ratio is the gap between the two engines.
        ("vllm", "auto", False),
        ("transformers", "float32", True),
        ("transformers", "bfloat16", False),
    ],
)
def test_one_update_is_warned_about_where_ratios_are_one(engine, dtype, warned):
    model, objective = {"dtype": dtype}, {"old_logprobs": "sampler"}
    warnings = warnings_of("clip", sampling={"engine": engine}, model=model, objective=objective)
    assert ["the ratio is always 1" in warning for warning in warnings] == [True] * warned
    # With a lag, π_old is that of the step's own weights, which the engine's log-probs of older ones are not.
    assert len(warnings_of("clip", sampling={"max_lag": 1})) == 1
    ahead = {"max_lag": 1, "engine": "transformers"}
    assert not warnings_of("clip", sampling=ahead, model=model, objective=objective), "of older weights"


GSM8K, LORA = {"model": {"path": "a/b"}, "task": {"name": "gsm8k"}}, {"model": {"lora": {"rank": 4}}}


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        ({"optim": {"lr": 1}}, ["optim.lr = 1 is extreme for adapters or a small model, above 0.001"]),
        ({**GSM8K, "optim": {"lr": 1e-3}}, ["optim.lr = 0.001 is extreme"]),
        ({**LORA, "optim": {"lr": 5e-4}}, []),
        ({**LORA, "optim": {"lr": 0.1}}, ["optim.lr = 0.1 is extreme for adapters or a small model"]),
        ({"sampling": {"temperature": 0.05}}, ["sampling.temperature = 0.05 is extreme, below 0.1"]),
        ({"bounds": {"delta": 50}}, ["bounds.delta = 50.0|p = 0.5|[1.86e-44, 2]|nothing is clipped"]),
        ({"bounds": {"method": "clip", "eps_high": 20}}, ["bounds.eps_high = 20.0|[0.8, 21]|no increase"]),
        *(({"bounds": {"method": name}}, []) for name in METHODS),
    ],
)
def test_extreme_settings_have_a_warning_and_the_defaults_of_no_method_have(layer, parts):
    """With the KL Band a token of p = 0.5 may fall to the ratio e^(−2δ)/2, which is 1.86e-44, and rise to 2."""
    lines = [*extreme_settings(resolve([layer]))]
    assert len(lines) == len(parts)
    for line, words in zip(lines, parts, strict=True):
        assert all(word in line for word in words.split("|")), line


def test_the_shipped_configs_are_not_extreme():
    for path in shipped_configs().values():
        with suppress(ConfigError):  # a sweep
            assert [*extreme_settings(resolve([read_layer(path)]))] == [], path
