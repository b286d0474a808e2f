"""A resumed run has the engine and the commits of model and data sets that it started with.

The hub's cache on disk is made by hand in its own layout, and read by transformers in offline mode. Only the request
for a data set is replaced by a fake.
"""

import json
import shutil
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
from huggingface_hub import try_to_load_from_cache
from safetensors.torch import load_file, save_file

from bandpo_cli.config.layers import resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.experiments import resume, train
from bandpo_cli.experiments.plan import check_config
from bandpo_cli.experiments.resume_and_fork import pin
from bandpo_cli.metric_names import without_clock
from bandpo_cli.models.load import embedded_model_path
from bandpo_cli.paths import cached_commit
from bandpo_cli.storage.run_folder import RunFolder
from bandpo_cli.tasks.task import build_task
from tests.experiments.test_api import SMALL
from tests.text_model import save_text_model

FIRST, SECOND = "1" * 40, "2" * 40
MODEL = "someone/countdown"
GSM8K = "openai/gsm8k"
TWO_STEPS = {"steps": 2, "evaluation": {"every": 0}, "checkpoint": {"every": 1}}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache of the hub, with all requests to the hub off."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


def set_main(cache: Path, repository: str, kind: str, commit: str, branch: str = "main") -> Path:
    """Make `commit` the one of a branch, as a download does; return the folder of its files."""
    folder = cache / f"{kind}s--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / branch).write_text(commit)
    return folder / "snapshots" / commit


def add_model(cache: Path, commit: str, scale: float = 1.0) -> None:
    """Put the bundled model into the cache as the main branch of MODEL, with scaled weights."""
    files = set_main(cache, MODEL, "model", commit)
    shutil.copytree(embedded_model_path(), files)
    weights = load_file(files / "model.safetensors")
    weights["model.norm.weight"] *= scale
    save_file(weights, files / "model.safetensors", metadata={"format": "pt"})


def test_the_commit_in_the_cache_is_that_of_the_hubs_library(hub):
    assert cached_commit(MODEL, "model") is None
    add_model(hub, FIRST)
    assert cached_commit(MODEL, "model") == FIRST
    assert FIRST in str(try_to_load_from_cache(MODEL, "config.json", cache_dir=hub))
    set_main(hub, MODEL, "model", SECOND, branch="v2")
    assert cached_commit(MODEL, "model", "v2") == SECOND
    assert cached_commit(MODEL, "model", "v3") is None
    assert cached_commit(MODEL, "dataset") is None
    assert cached_commit("nobody/nothing", "model", SECOND) == SECOND
    set_main(hub, MODEL, "model", "no commit", branch="damaged")
    assert cached_commit(MODEL, "model", "damaged") is None


@pytest.mark.slow
def test_a_resumed_run_has_the_commit_that_it_started_with(hub, tmp_path):
    """The model on the hub changes after the first step; the reference model is loaded from it again."""
    add_model(hub, FIRST)
    config = resolve([SMALL, TWO_STEPS, {"model": {"path": MODEL}, "objective": {"reference_kl": 0.1}}])
    complete = train(config, tmp_path / "runs", "complete")
    train(config, tmp_path / "runs", "stopped", stop_requested=chain([False], repeat(True)).__next__)
    folder = RunFolder(tmp_path / "runs" / "stopped")
    assert [line["step"] for line in folder.read_metrics()] == [1]
    add_model(hub, SECOND, scale=2.0)
    result = resume("stopped", tmp_path / "runs")
    assert [*map(without_clock, result.records)] == [*map(without_clock, complete.records)]
    env = json.loads((folder.path / "env.json").read_text())
    assert env["resolved"] == {"engine": "transformers", "dtype": "float32", "model": FIRST, "data": {}}
    assert "resolved" not in env["resumes"][0], "nothing has changed"
    assert (folder.path / "config.yaml").read_text() == (complete.folder / "config.yaml").read_text()


def run_folder(tmp_path: Path, **resolved: Any) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir(exist_ok=True)
    (folder.path / "env.json").write_text(json.dumps({"resolved": resolved}))
    return folder


def test_the_engine_that_auto_resolved_to_is_pinned(tmp_path, monkeypatch):
    folder = run_folder(tmp_path, engine="vllm")
    monkeypatch.setattr("bandpo_cli.experiments.resume_and_fork.is_installed", lambda package: False)
    with pytest.raises(ConfigError, match=r"samples with vllm, not installed here.*make install-vllm"):
        pin(RunConfig(), folder)
    monkeypatch.setattr("bandpo_cli.experiments.resume_and_fork.is_installed", lambda package: True)
    assert pin(RunConfig(), folder)[0].sampling.engine == "vllm"
    named = RunConfig.model_validate({"sampling": {"engine": "transformers"}})
    assert pin(named, folder) == (named, [])
    assert pin(RunConfig(), run_folder(tmp_path, engine="transformers"))[0].sampling.engine == "transformers"


def test_commits_take_the_place_of_branches(tmp_path):
    task = {"name": "gsm8k", "revisions": {GSM8K: "v1"}}
    layers = [{"model": {"path": MODEL, "revision": "main"}, "task": task}]
    folder = run_folder(tmp_path, model=FIRST, data={GSM8K: SECOND, "another/set": FIRST})
    pinned, _ = pin(resolve(layers), folder)
    expected = resolve([*layers, {"model": {"revision": FIRST}, "task": {"revisions": {GSM8K: SECOND}}}])
    assert pinned == expected


def test_entries_that_no_run_writes_are_ignored(tmp_path):
    config = resolve([{"task": {"name": "gsm8k"}, "model": {"path": MODEL}}])
    unknown = {"engine": "steam", "model": "main", "data": {GSM8K: "main"}}
    for resolved in ({}, unknown, {"engine": 3, "dtype": "int4", "model": ["x"], "data": [1]}):
        assert pin(config, run_folder(tmp_path, **resolved)) == (config, [])
    (tmp_path / "run" / "env.json").write_text("{")
    unchanged, (warning,) = pin(config, RunFolder(tmp_path / "run"))
    assert unchanged == config
    assert "env.json" in warning
    assert warning.endswith("engine and commits of the run are not known and are chosen anew")


@pytest.mark.slow
def test_data_sets_are_pinned(hub, tmp_path, monkeypatch):
    rows = [[{"question": f"{split}?", "answer": "#### 1"}] * 3 for split in ("train", "test")]
    load = mock.Mock(side_effect=cycle(map(datasets.Dataset.from_list, rows)))
    monkeypatch.setattr(datasets, "load_dataset", load)

    def requests() -> list[tuple[str, str | None]]:
        made = [(call.args[0], call.kwargs.get("revision")) for call in load.call_args_list]
        load.reset_mock()
        return made

    model = save_text_model(tmp_path / "model", ["What is 1 + 1?"], hidden=64)
    set_main(hub, GSM8K, "dataset", FIRST)
    layer = {"model": {"path": str(model)}, "task": {"name": "gsm8k"}, "sampling": {"max_tokens": 4}}
    config = resolve([{**SMALL, "task": {}}, TWO_STEPS, layer])
    train(config, tmp_path / "runs", "a", stop_requested=chain([False], repeat(True)).__next__)
    folder = RunFolder(tmp_path / "runs" / "a")
    assert json.loads((folder.path / "env.json").read_text())["resolved"]["data"] == {GSM8K: FIRST}
    assert {*requests()} == {(GSM8K, None)}
    set_main(hub, GSM8K, "dataset", SECOND)
    resume("a", tmp_path / "runs")
    assert {*requests()} == {(GSM8K, FIRST)}
    named = build_task(resolve([{"task": {"name": "gsm8k", "revisions": {GSM8K: "v1"}}}]).task)
    named.train_problems(), named.heldout_sets()
    assert requests() == [(GSM8K, "v1")] * 2


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"task": {"revisions": {"openai/gsm8": "v1"}}}, r"'openai/gsm8' is no data set.*it reads openai/gsm8k"),
        ({"task": {"name": "data", "train": ["x.jsonl"], "revisions": {"a/b": "v"}}}, "it reads local files only"),
        ({"model": {"path": "embedded", "revision": "v1"}, "task": {"name": "countdown"}}, "'embedded' is a folder"),
        ({"model": {"path": "embedded-calculator"}, "task": {"name": "calculator", "max_turn_tokens": 49}},
         "max_turn_tokens = 49 must be within sampling.max_tokens = 48"),
    ],
)  # fmt: skip
def test_settings_that_have_no_effect_are_refused(layer, message):
    config = resolve([{"model": {"path": MODEL}, "task": {"name": "gsm8k"}}, layer])
    with pytest.raises(ConfigError, match=message):
        check_config(config)
