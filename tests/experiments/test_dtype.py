"""`model.dtype: auto`: bfloat16 on a CUDA GPU, float32 elsewhere; what a run used is in its record.

A GPU is replaced by the function that looks for one; the runs compute in bfloat16 on the CPU.
"""

import json
from typing import Any

import pytest
import torch

from bandpo_cli.cli.preview import print_memory
from bandpo_cli.cli.train_view import describe_model
from bandpo_cli.config.layers import read_layer, resolve, to_yaml, with_values
from bandpo_cli.config.run import ModelConfig
from bandpo_cli.errors import UserError
from bandpo_cli.experiments import evaluate, resume, train
from bandpo_cli.experiments.memory_check import memory_report, memory_savings
from bandpo_cli.exports.verl_settings import overrides_of
from bandpo_cli.metric_names import without_clock
from bandpo_cli.models.load import load_policy
from bandpo_cli.models.memory_estimate import GIB, Device, estimate_memory
from bandpo_cli.results import changed_settings
from bandpo_cli.sweeps.estimate import seconds_from_earlier_runs
from tests.config.shapes import use_gpus
from tests.conftest import output_of
from tests.experiments.test_api import SMALL

RUN: list[Any] = [SMALL, {"steps": 1, "evaluation": {"every": 0}}]

SHARE = "sampling.vllm.memory_fraction"


def test_a_policy_is_loaded_in_the_dtype_of_its_device(monkeypatch):
    assert ModelConfig().dtype == "auto"
    assert load_policy(ModelConfig()).model.dtype == torch.float32
    use_gpus(monkeypatch, [(80 * GIB, 80 * GIB)])
    assert load_policy(ModelConfig()).model.dtype == torch.bfloat16
    assert load_policy(ModelConfig(dtype="float32")).model.dtype == torch.float32


@pytest.mark.slow
def test_a_run_with_auto_is_repeated_elsewhere(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        use_gpus(patched, [(80 * GIB, 80 * GIB)])
        first = train(resolve(RUN), runs_dir=tmp_path, name="first")
        scored = evaluate(n=2, k=[2], limit=2, settings=[SMALL], runs_dir=tmp_path, name="scored")
    assert scored.record["config"]["model"]["dtype"] == "bfloat16"
    stored = read_layer(tmp_path / "first" / "config.yaml")
    assert stored["model"]["dtype"] == "bfloat16"
    again = train(resolve([stored]), runs_dir=tmp_path, name="again")
    assert [*map(without_clock, first.records)] == [*map(without_clock, again.records)]
    resume("first", runs_dir=tmp_path, settings=[{"steps": 2}])
    assert read_layer(tmp_path / "first" / "config.yaml")["model"]["dtype"] == "bfloat16"
    checkpoint = json.loads((tmp_path / "first/checkpoints/step-000002/config.json").read_text())
    assert checkpoint["dtype"] == "bfloat16"


def test_the_settings_names_the_dtype():
    for model, text in (
        ({}, "bfloat16 on a GPU, else float32"),
        ({"device": "cpu"}, "float32"),
        ({"device": "cuda:1"}, "bfloat16"),
        ({"device": "cpu", "dtype": "bfloat16"}, "bfloat16"),
    ):
        assert describe_model(resolve([{"model": {"path": "org/name", **model}}])) == f"org/name, {text}"


def test_the_estimate_and_the_advice_follow_the_device():
    text = output_of(print_memory, resolve([]), memory_report(resolve([])), width=200)  # on this machine
    assert "master weights" not in text
    config = resolve([])
    on_gpu, on_cpu = (estimate_memory(config, Device("x", 80 * GIB, 80 * GIB, on)) for on in (True, False))
    parts = on_gpu.always
    assert parts["master weights"] == 2 * parts["weights"] == on_cpu.always["weights"]
    assert "master weights" not in on_cpu.always
    assert memory_savings(config, on_gpu=False)[-1] == ("model.dtype", "bfloat16"), "slow on most CPUs"
    assert "model.dtype" not in dict(memory_savings(config, on_gpu=True))


def test_an_exported_job_is_on_gpus():
    for dtype, exported in (("auto", "bfloat16"), ("float32", "float32")):
        overrides = overrides_of(resolve([{"model": {"dtype": dtype}}]))
        assert overrides["actor_rollout_ref.rollout.dtype"] == exported


def test_the_dtype_that_auto_was_is_no_changed_setting():
    for dtype, on_gpu in (("float32", False), ("bfloat16", True)):
        config = resolve([{"model": {"dtype": dtype}}])
        assert "model.dtype" not in changed_settings(config, on_gpu)
        assert changed_settings(config, not on_gpu)["model.dtype"][0] == dtype


@pytest.mark.slow
def test_the_time_of_a_sweep_is_estimated_from_runs_with_the_dtype_of_auto(tmp_path):
    train(resolve(RUN), runs_dir=tmp_path, name="a")
    path = tmp_path / "a" / "config.yaml"
    assert read_layer(path)["model"]["dtype"] == "float32"

    def is_similar(**values: Any) -> bool:
        config, threads = with_values(resolve(RUN), values), torch.get_num_threads()
        return seconds_from_earlier_runs(config, tmp_path, threads) is not None

    assert is_similar()
    assert not is_similar(**{"model.dtype": "bfloat16"})
    path.write_text(to_yaml(with_values(resolve([read_layer(path)]), {SHARE: 0.3})))
    assert is_similar()
    assert not is_similar(**{SHARE: 0.4})


def test_flash_attention_with_auto_on_a_cpu_is_refused(monkeypatch):
    monkeypatch.setattr("bandpo_cli.models.load.is_flash_attn_2_available", lambda: True)
    with pytest.raises(UserError, match="does not support float32"):
        load_policy(ModelConfig(attention="flash_attention_2"))
