"""The Python API: functions with callbacks. import-linter checks that they import no terminal library."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bandpo_cli import results
from bandpo_cli.callbacks import CallbackBase
from bandpo_cli.config.layers import resolve
from bandpo_cli.errors import ConfigError, RunError, UserError
from bandpo_cli.experiments import compare, evaluate, resume, sync, train
from bandpo_cli.metric_names import without_clock
from bandpo_cli.storage.run_folder import RunFolder
from tests.cli.train_runs import summary

SMALL = {
    "task": {"max_number": 5},
    "sampling": {"prompts": 2, "samples": 2},
    "optim": {"updates": 1, "warmup_steps": 0},
    "evaluation": {"problems": 2, "samples": 2, "k": [2], "every": 2},
    "tracking": {"mlflow": False},
}


def arguments(method: mock.Mock) -> list[Any]:
    """Return the arguments of all calls of a callback's method."""
    return [call.args[0] for call in method.call_args_list]


def outline(seen: mock.Mock, complete: bool = False) -> list[str]:
    """Return the calls of a callback, without the phases inside steps unless they are wanted, too."""
    calls = [f"phase {call.args[0]}" if call[0] == "phase" else call[0] for call in seen.method_calls]
    kept = ("phase load", "phase close", "phase tracking", "phase run", "phase report", "phase score")
    return [call for call in calls if complete or not call.startswith("phase") or call in kept]


@pytest.mark.slow
def test_train_resume_evaluate_and_compare(tmp_path):
    seen = mock.Mock()
    result = train(resolve([SMALL, {"steps": 1}]), runs_dir=tmp_path, name="demo", callbacks=[seen])
    assert (result.folder, result.name, result.status) == (tmp_path / "demo", "demo", "FINISHED")
    assert [record["step"] for record in result.records] == [0, 1]
    assert [result] == arguments(seen.end)
    assert outline(seen) == ["phase load", "start", "step", "step", "phase close", "end"]
    names = ["sample", "grade", "logprobs", "update", "record", "sync", "eval", "checkpoint"]
    assert outline(seen, complete=True)[-len(names) - 3 : -3] == [f"phase {name}" for name in names]
    assert json.loads((result.folder / "env.json").read_text())["sampler"] == {"engine": "transformers"}
    (info,) = arguments(seen.start)
    assert (info.folder, info.steps, info.first_step, info.parent) == (result.folder, 1, 0, None)
    assert info.config["sampling"]["prompts"] == 2
    assert [report.step for report in arguments(seen.step)] == [0, 1]

    seen = mock.Mock()
    result = resume("demo", runs_dir=tmp_path, settings=[{"steps": 2}], callbacks=[seen])
    assert outline(seen) == ["phase load", "start", "step", "phase close", "end"]
    assert arguments(seen.start)[0].first_step == 2
    assert (result.status, [record["step"] for record in result.records]) == ("FINISHED", [0, 1, 2])
    with pytest.raises(UserError, match="demo"):
        resume("demo", runs_dir=tmp_path)

    seen = mock.Mock()
    options: dict[str, Any] = {"n": 2, "k": [2], "limit": 2, "settings": [SMALL]}
    for name, model in (("a", "embedded"), ("b", "demo@1")):
        scored = evaluate(model, runs_dir=tmp_path, name=name, callbacks=[seen], **options)
        assert scored.folder == tmp_path / name
        assert json.loads((scored.folder / "env.json").read_text())["sampler"] == {"engine": "transformers"}
        record = json.loads((scored.folder / "eval.json").read_text())
        assert (record["name"], record["status"], scored.record["status"]) == (name, "finished", "finished")
    assert outline(seen)[:3] == ["phase load", "start", "step"]
    assert outline(seen)[-2:] == ["phase score", "end"]
    assert [info.completions for info in arguments(seen.start)] == [4, 4]
    assert sum(len(report.rows) for report in arguments(seen.step)) == 8
    compared = compare("a", "b", tmp_path)
    assert (compared.path_a, [*compared.sets]) == (tmp_path / "a" / "eval.json", ["countdown"])


def test_sync_reports_each_run(tmp_path, empty_database):
    run = RunFolder.create(tmp_path, "demo")
    run.write_config("tracking:\n  mlflow: false\n")
    run.append_metrics({"step": 1, "train/reward": 0.5})
    run.write_summary({"status": "FINISHED", "steps": 1})
    seen = mock.Mock()
    (report,) = sync(all_runs=True, runs_dir=tmp_path, callbacks=[seen])
    assert (report.name, report.result) == ("demo", None)
    assert "it has no tracker" in str(report.skipped)
    assert outline(seen) == ["start", "phase tracking", "step", "end"]
    uri = f"sqlite:///{shutil.copy(empty_database, tmp_path / 'other.db')}"
    (sent,) = sync(["demo"], uri=uri, runs_dir=tmp_path, callbacks=[seen])
    assert sent.result.ended
    assert outline(seen)[4:] == ["start", "phase tracking", "step", "end"]


@pytest.mark.slow
def test_a_requested_stop_before_the_first_step(tmp_path):
    """Without an evaluation at step 0 there is no line in metrics.jsonl yet."""
    config = resolve([SMALL, {"steps": 2, "evaluation": {"every": 0}}])
    seen = mock.Mock()
    result = train(config, tmp_path, "r", [seen], stop_requested=lambda: True)
    assert (result.status, result.records, result.error) == ("KILLED", [], None)
    assert outline(seen) == ["phase load", "start", "phase close", "end"]
    ended = summary(tmp_path / "r")
    assert (ended["status"], ended["steps"], ended["error"]) == ("KILLED", 0, "stopped by request")
    assert resume("r", tmp_path).status == "FINISHED"


class Patience(CallbackBase):
    on_every_rank = True

    def step(self, report: Any) -> None:
        if report.step >= 2:
            report.stop("enough\nsteps")


@pytest.mark.slow
def test_a_callback_ends_a_run_which_is_finished_and_can_be_resumed(tmp_path):
    settings: dict[str, Any] = {**SMALL, "steps": 4, "checkpoint.every": 0}
    full = train(settings, tmp_path, "full")
    result = train(settings, tmp_path, "early", [Patience()])
    assert (result.status, result.stopped_by, result.error) == ("FINISHED", "enough steps", None)
    assert [*map(without_clock, result.records)] == [*map(without_clock, full.records[:3])]
    assert summary(result.folder)["stopped_by"] == "enough steps"
    assert results.runs(tmp_path).set_index("name").stopped_by["early"] == "enough steps"
    resumed = resume("early", tmp_path, settings={"steps": 3}, callbacks=[Patience()])
    assert (resumed.status, resumed.stopped_by, len(resumed.records)) == ("FINISHED", None, 4)


def test_an_exception_in_a_callback_ends_the_run_as_failed(tmp_path):
    failing, seen = CallbackBase(), mock.Mock()
    failing.step = mock.Mock(side_effect=RunError("enough"))
    with pytest.raises(RunError, match="enough"):
        train(resolve([SMALL, {"steps": 1}]), tmp_path, "r", [failing, seen])
    assert outline(seen) == ["phase load", "start", "phase close", "end"]
    result = arguments(seen.end)[0]
    assert (result.status, str(result.error)) == ("FAILED", "enough")
    assert summary(tmp_path / "r")["status"] == "FAILED"


def test_a_callback_that_cannot_be_created_is_an_error_with_its_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("needy.py").write_text(
        "from bandpo_cli.callbacks import CallbackBase\n\n\nclass Needy(CallbackBase):\n"
        "    def __init__(self, path):\n        self.path = path\n"
    )
    layer = {"tracking": {"callbacks": ["needy:Needy"]}}
    with pytest.raises(ConfigError, match=r"'needy:Needy': .*missing 1 required .*'path' \(needy.py:4"):
        train(resolve([SMALL, layer, {"steps": 1}]), tmp_path, "r")
    assert not (tmp_path / "r").exists()


def test_mistakes_are_raised_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"callbacks: <class .*Patience'> is no object of a subclass of "):
        train({"steps": 1}, tmp_path / "runs", callbacks=[Patience])
    (tmp_path / "demo").mkdir()
    with pytest.raises(UserError, match="exists already"):
        train(resolve([SMALL]), tmp_path, "demo")
    with pytest.raises(UserError, match="no such run"):
        evaluate("nowhere", runs_dir=tmp_path)
    with pytest.raises(UserError, match="runs_dir = 3: expected a path"):
        train({"steps": 1}, runs_dir=3)
    with pytest.raises(UserError, match="callbacks: 3 is no object of a subclass"):
        train({"steps": 1}, tmp_path, callbacks=3)
    with pytest.raises(UserError, match=f"no run {str(tmp_path / 'other')!r}"):  # a path is a name, too
        resume(tmp_path / "other", tmp_path)
    assert [*tmp_path.rglob("*")] == [tmp_path / "demo"]
