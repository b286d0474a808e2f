"""Ends of runs: exceptions of custom code that end a program, and failures after the last step."""

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bandpo_cli.config.layers import read_assignments, resolve
from bandpo_cli.errors import RunError, raised_by_signal
from bandpo_cli.experiments import evaluate, train
from bandpo_cli.reports import run_plots
from tests.cli.processes import end_of
from tests.cli.train_runs import SMALL as SMALL_FLAGS
from tests.cli.train_runs import sets
from tests.commands import Forked
from tests.experiments.test_api import SMALL, arguments

CODE = """
from pathlib import Path
from bandpo_cli.callbacks import TrainCallback
from bandpo_cli.methods.loss import PolicyLoss

def leave():
    if any(Path(place).exists() for place in ("a/config.yaml", "runs/a/config.yaml")):  # not in the trial before a run
        raise EXCEPTION

class Loss(PolicyLoss):
    def token_losses(self, logprobs, batch):
        leave()
        return -batch.ratios(logprobs) * batch.advantages

class Prepare(Loss):
    def prepare(self, old_logprobs, advantages):
        leave()
        return {}

    def token_losses(self, logprobs, batch):
        return -batch.ratios(logprobs) * batch.advantages

def interval(old_logprobs):
    leave()
    return 0.8, 1.2

def advantages(rewards, has_reward):
    leave()
    return rewards - rewards.mean(1, keepdim=True)

class Phase(TrainCallback):
    def phase(self, name):
        raise EXCEPTION

class Step(TrainCallback):
    def step(self, report):
        raise EXCEPTION

class End(TrainCallback):
    def end(self, result):
        raise EXCEPTION
"""
PLACES = {
    **dict.fromkeys(("Loss", "Prepare", "interval"), "bounds.method={}"), "advantages": "objective.advantages={}",
    **dict.fromkeys(("Phase", "Step", "End"), "tracking.callbacks=[{}]"),
}  # fmt: skip
"""The setting for each name in `leaving`."""
ONE_STEP: list[Any] = [SMALL, {"steps": 1, "evaluation": {"every": 0}}]


@pytest.fixture
def leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that writes the module `leaving`, whose functions raise an exception."""
    monkeypatch.chdir(tmp_path)

    def write(exception: str) -> None:
        Path("leaving.py").write_text(CODE.replace("EXCEPTION", exception))

    return write


@pytest.mark.slow
@pytest.mark.parametrize("exception", ["SystemExit(0)", "KeyboardInterrupt", "GeneratorExit"])
@pytest.mark.parametrize("place", PLACES)
def test_an_exit_of_custom_code_is_its_error(leaving, tmp_path, place, exception):
    leaving(exception)
    recorded = mock.Mock()
    setting = read_assignments([PLACES[place].format(f"leaving:{place}")])
    with pytest.raises(RunError, match=exception.partition("(")[0]) as raised:
        train(resolve([*ONE_STEP, setting]), runs_dir=tmp_path, name="a", callbacks=[recorded])
    assert "leaving.py:" in str(raised.value)
    if place not in ("Phase", "End"):  # before the run has begun, and after it was complete
        assert [result.status for result in arguments(recorded.end)] == ["FAILED"]
        assert json.loads((tmp_path / "a" / "summary.json").read_text())["status"] == "FAILED"


@pytest.mark.slow
@pytest.mark.parametrize("exception", ["SystemExit(0)", "KeyboardInterrupt", "GeneratorExit"])
def test_the_exit_code_after_an_exit_of_custom_code(leaving, tmp_path, exception):
    leaving(exception)
    words = ["--steps", "1", *sets("bounds.method=leaving:Loss evaluation.every=0"), "--name", "a"]
    _, err = end_of(Forked("train", *SMALL_FLAGS, *words, cwd=tmp_path), 1)
    last = err.strip().splitlines()[-1]
    assert last.startswith(f"error: custom code: {exception.partition('(')[0]}")
    assert "leaving.py:" in last


@pytest.mark.parametrize("handler", [signal.default_int_handler, lambda *_: exec("raise KeyboardInterrupt")])
def test_an_interrupt_while_custom_code_runs_is_not_its_error(handler):
    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10**6):
            pass

    def interrupting() -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        outcomes = []
        for function in (interrupted, interrupting):
            with pytest.raises(KeyboardInterrupt) as raised:
                function()
            outcomes.append(raised_by_signal(raised.value))
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcomes == [True, False]


@pytest.mark.slow
def test_a_failed_plot_is_a_warning(tmp_path, monkeypatch, caplog):
    def fail(*_: Any) -> None:
        raise ValueError("no font")

    monkeypatch.setattr(run_plots, "plot_run", fail)
    monkeypatch.setattr(run_plots, "plot_success_histogram", fail)
    recorded = mock.Mock()
    result = train(resolve(ONE_STEP), runs_dir=tmp_path, name="a", callbacks=[recorded])
    assert [result.status, arguments(recorded.end)[0].status] == ["FINISHED", "FINISHED"]
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["status"] == "FINISHED"
    assert f"the plots cannot be written; type bandpo plot {tmp_path / 'a'}: ValueError: no f" in caplog.text
    caplog.clear()
    scored = evaluate(n=2, k=[2], limit=2, settings=[SMALL], runs_dir=tmp_path, name="e")
    assert scored.record["status"] == "finished"
    assert json.loads((tmp_path / "e" / "eval.json").read_text())["status"] == "finished"
    assert "the histogram cannot be written: ValueError: no font" in caplog.text
