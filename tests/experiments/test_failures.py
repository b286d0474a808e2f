"""Out of memory in every phase of an experiment, and objects that cannot be closed, through the Python API."""

import json
from functools import partial
from typing import Any

import pytest
import torch

from bandpo_cli.callbacks import CallbackBase
from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import RunError
from bandpo_cli.experiments import evaluate, resume, train
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.reports import run_plots
from bandpo_cli.sampling import rollouts
from bandpo_cli.sampling.sampler import StaleEngineError, TransformersSampler
from bandpo_cli.training import loop
from bandpo_cli.training.optimizer import Optimizer
from tests.experiments.test_api import SMALL

SIZE = "CUDA out of memory. Tried to allocate 2.00 GiB"
ADVICE = f"out of memory ({SIZE}); for less memory, in this order: --set optim.micro_batch_tokens=8192, "


def out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError(f"{SIZE}. GPU 0 has a total capacity of 79 GiB")


def wrapped_out_of_memory(*_: Any, **__: Any) -> None:
    try:
        out_of_memory()
    except torch.OutOfMemoryError as error:
        raise StaleEngineError("the engine did not load the weights") from error


ONE_STEP: list[Any] = [SMALL, {"steps": 1, "evaluation": {"every": 0}}]
PHASES = [
    ("loading", rollouts, "load_policy", out_of_memory),
    ("optimizer", Optimizer, "__init__", out_of_memory),  # the sampler is closed
    ("sampling", TransformersSampler, "_sample_batch", out_of_memory),
    ("scoring", loop, "prepare_updates", out_of_memory),
    ("update", loop, "update_policy", out_of_memory),
    ("wake-up", TransformersSampler, "sync", out_of_memory),
    ("wake-up, wrapped", TransformersSampler, "sync", wrapped_out_of_memory),
    ("evaluation", loop, "sample_batches", out_of_memory),
]


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "owner", "name", "fail"), PHASES, ids=[item[0] for item in PHASES])
def test_out_of_memory_in_any_phase_is_one_line_of_advice(tmp_path, monkeypatch, phase, owner, name, fail):
    closed: list[object] = []
    monkeypatch.setattr(TransformersSampler, "close", lambda sampler: closed.append(sampler))
    monkeypatch.setattr(owner, name, fail)
    every = 1 if phase == "evaluation" else 0
    config = resolve([SMALL, {"steps": 1, "evaluation": {"every": every}}])
    with pytest.raises(RunError) as raised:
        train(config, runs_dir=tmp_path, name="a")
    assert str(raised.value).startswith(ADVICE)
    assert "sampling.max_sequences=512" in str(raised.value)  # the engine that `auto` is on a CPU
    assert len(closed) == (phase != "loading")
    if phase not in ("loading", "optimizer"):
        assert json.loads((tmp_path / "a" / "summary.json").read_text())["status"] == "FAILED"


@pytest.mark.slow
def test_out_of_memory_while_a_run_is_resumed(tmp_path, monkeypatch):
    train(resolve(ONE_STEP), runs_dir=tmp_path, name="a")
    monkeypatch.setattr(Optimizer, "load_state", out_of_memory)
    with pytest.raises(RunError) as raised:
        resume("a", runs_dir=tmp_path, settings=[{"steps": 2}])
    assert str(raised.value).startswith(ADVICE)


@pytest.mark.parametrize("name", ["_sample_batch", "__init__"])
def test_out_of_memory_in_an_evaluation(tmp_path, monkeypatch, name):
    monkeypatch.setattr(TransformersSampler, name, out_of_memory)
    with pytest.raises(RunError, match=r"^out of memory") as raised:
        evaluate("embedded", n=2, k=[2], limit=2, settings=[SMALL], runs_dir=tmp_path, name="a")
    assert "sampling.max_sequences=512" in str(raised.value)
    assert "optim." not in str(raised.value)
    assert "gradient_checkpointing" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_sampler_that_cannot_be_closed_does_not_hide_the_error(tmp_path, monkeypatch, caplog, command):
    closed: list[str] = []
    create = GraderPool.__init__

    def close_sampler(sampler: TransformersSampler) -> None:
        closed.append("sampler")
        raise RuntimeError("the engine does not answer")

    def create_grader(pool: GraderPool, *arguments: Any) -> None:
        create(pool, *arguments)
        pool.close = lambda: closed.append("grader")

    monkeypatch.setattr(TransformersSampler, "close", close_sampler)
    monkeypatch.setattr(GraderPool, "__init__", create_grader)
    start: Any = partial(evaluate, n=2, k=[2], limit=2, settings=[SMALL])
    if command == "train":  # without an error, it is reported
        start = partial(train, resolve(ONE_STEP))
        assert start(runs_dir=tmp_path, name="complete").status == "FINISHED"
        assert closed == ["sampler", "grader"]
        assert "RuntimeError: the engine does not answer" in caplog.text
        closed.clear()
        caplog.clear()
    monkeypatch.setattr(TransformersSampler, "_sample_batch", out_of_memory)
    with pytest.raises(RunError, match=r"^out of memory"):
        start(runs_dir=tmp_path, name="a")
    assert sorted(closed) == ["grader", "sampler"]
    assert "RuntimeError: the engine does not answer" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["the callback failed", "no plots"])
def test_a_failure_at_the_end_does_not_hide_the_error_of_the_run(tmp_path, monkeypatch, caplog, failure):
    def fail(*_: Any) -> None:
        raise ValueError(failure)

    callback = CallbackBase()
    monkeypatch.setattr(loop, "update_policy", out_of_memory)
    if failure == "no plots":
        monkeypatch.setattr(run_plots, "plot_run", fail)
    else:
        monkeypatch.setattr(callback, "end", fail)
    with pytest.raises(RunError, match=r"^out of memory"):
        train(resolve([SMALL, {"steps": 1}]), runs_dir=tmp_path, name="a", callbacks=[callback])
    assert f"ValueError: {failure}" in caplog.text
