"""Overviews of runs: the task of a run on files, and the settings that differ from the defaults."""

from dataclasses import replace
from unittest import mock

from bandpo_cli import results
from bandpo_cli.config.layers import resolve
from bandpo_cli.results import changed_settings, describe_line, describe_run, summary_fields, task_settings
from bandpo_cli.storage import files, run_record
from bandpo_cli.storage.run_folder import RunFolder


def test_a_task_of_files_has_their_names():
    for task, title in (
        ({"name": "countdown"}, "countdown"),
        ({"name": "gsm8k"}, "gsm8k"),
        ({"name": "data", "train": "my/sums.jsonl"}, "sums"),
        ({"name": "data", "train": ["gsm8k", {"path": "a.jsonl", "label": "mine"}]}, "gsm8k+mine"),
    ):
        assert resolve([{"task": task}]).task.title == title


def test_template_and_grader_are_changed_settings_and_the_files_are_not():
    model = {"model": {"dtype": "float32"}}  # a run stores the dtype that it had
    files = {"name": "data", "train": "sums.jsonl", "heldout": "exam.jsonl"}
    assert changed_settings(resolve([model, {"task": files}])) == {}
    task = {**files, "template": "{question} Number only.", "grader": "gsm8k-flexible"}
    changed = {"task.template": (task["template"], "answer-line"), "task.grader": ("gsm8k-flexible", "math")}
    config = resolve([model, {"task": task}])
    assert changed_settings(config) == changed
    assert task_settings(config.task) == {
        "task.train.0.path": "sums.jsonl", "task.heldout.0.path": "exam.jsonl", "task.heldout_fraction": 0.05,
        "task.template": task["template"], "task.grader": "gsm8k-flexible",
    }  # fmt: skip


def test_the_defaults_of_a_run_are_those_of_its_model():
    pretrained = {"model": {"path": "a/b", "dtype": "float32"}, "task": {"name": "countdown"}}
    assert changed_settings(resolve([pretrained])) == {}
    assert changed_settings(resolve([pretrained, {"optim": {"lr": 5e-5}}])) == {"optim.lr": (5e-5, 1e-6)}


def test_the_lines_of_a_run_are_read_once(tmp_path, monkeypatch):
    """A metric without a value at the first or last step has the range of the steps that have one."""
    run = RunFolder.create(tmp_path, "a")
    run.write_config("seed: 3\n")
    for step in range(50):
        values: dict[str, object] = {f"x/{number}": float(step) for number in range(20)}
        values |= {"x/0": None if step in (0, 49) else step, "train/entropy": 0.5, "eval/a/mean_at_4": 0.25}
        run.append_metrics({"step": step, **values, "time/step": 2.0})
    parse, step_times = mock.Mock(wraps=files.parse_metrics), mock.Mock(wraps=run_record._step_times)
    monkeypatch.setattr(files, "parse_metrics", parse)
    monkeypatch.setattr(run_record, "_step_times", step_times)
    line = describe_line(run.path, tmp_path)
    assert (line.step, line.heldout, line.accuracy, line.entropy) == (49, 0.25, None, 0.5)
    assert parse.call_count == 50
    assert [max(map(len, call.args[1])) for call in step_times.call_args_list] == [4]
    shown = describe_run("a", tmp_path)
    assert shown["metrics"]["x/0"] == {"first": (1, 1.0), "last": (48, 48.0)}
    assert shown["metrics"]["x/7"] == {"first": (0, 0.0), "last": (49, 49.0)}
    assert (len(shown["metrics"]), shown["seconds"], shown["heldout"]) == (23, 100, 0.25)


def test_an_ended_run_is_read_from_its_summary(tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path, "a")
    run.write_config("seed: 3\n")
    run.append_metrics({"step": 7, "train/entropy": 0.5, "time/step": 2.0})
    summary = {"status": "FINISHED", "error": None, "steps": 7}
    run.write_summary(summary)
    slow = describe_line(run.path, tmp_path)
    run.write_summary(summary | summary_fields(run.path))
    read = mock.Mock(wraps=results.read_stored_run)
    monkeypatch.setattr(results, "read_stored_run", read)
    assert describe_line(run.path, tmp_path) == slow
    assert not read.called
    run.write_config("seed: 4\n")
    assert describe_line(run.path, tmp_path) == replace(slow, seed=4)
    run.write_summary(summary | summary_fields(run.path))
    run.append_metrics({"step": 8, "time/step": 2.0})
    assert (changed := describe_line(run.path, tmp_path)).step == 8
    assert changed.status == "KILLED"
    run.write_summary({**summary, "steps": 8, "status": "?", **summary_fields(run.path)})
    assert describe_line(run.path, tmp_path).status == "KILLED", "the status is not one of a run"
    run.write_summary({**summary, "steps": 8, **summary_fields(run.path), "overview": {"seed": "x"}})
    assert describe_line(run.path, tmp_path).seed == 4
    assert read.call_count == 7
