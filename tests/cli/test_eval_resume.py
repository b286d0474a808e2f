"""Resumed evaluations: after Ctrl-C or a kill at any moment the result equals that of an uninterrupted one."""

import json
import os
import random
import signal
import time
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest

from bandpo_cli.experiments.eval_plan import plan_evaluation, plan_evaluation_resume
from bandpo_cli.storage import tables
from bandpo_cli.storage.run_folder import EvalFolder
from tests.cli.eval_command import bandpo, record_of, samples_of, succeed, usage_error
from tests.cli.processes import end_of, wait_until
from tests.cli.train_runs import sets
from tests.commands import Forked
from tests.reports.sweep_folders import write_run
from tests.tasks.stored_completions import FOREIGN, jsonl

SETTINGS = [*sets("evaluation.batch=4 task.numbers=3"), *"--n 4 --limit 6 --seed 3 --no-mlflow".split()]  # noqa: SIM905
"""6 batches of one problem."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("uninterrupted")
    succeed("eval", *SETTINGS, "--name", "complete", cwd=place)
    return place / "runs" / "complete"


def test_settings_of_training_contradict_no_evaluation(tmp_path):
    """6 prompts cannot be split into 4 updates, the default; a buffer of 6 tokens is not within 5."""
    batch = ("sampling.prompts=6", "optim.updates=2")
    write_run(tmp_path / "a", (*batch, "task.rewards=[{weight: 1}, format]", "objective.advantages=gdpo"))
    write_run(tmp_path / "b", (*batch, "reward.overlong_buffer=6"))
    plan_evaluation("a@0", runs_dir=tmp_path, settings={"task.rewards": None})
    plan = plan_evaluation("b@0", runs_dir=tmp_path, max_tokens=5)
    folder = EvalFolder.create(tmp_path, "e")
    folder.write_record({"sets": {}, **plan.as_json()})
    folder.samples_path.touch()
    assert plan_evaluation_resume(folder).config.sampling == plan.config.sampling


def start_slowly(place: Path, *arguments: str) -> Forked:
    """Start an evaluation whose batches take half a second each."""
    return Forked("slow", "eval", *arguments, cwd=place, module="tests.cli.held_command", OMP_NUM_THREADS="1")


def count_parts(folder: Path) -> int:
    return len(list((folder / "parts").glob("[0-9]*.parquet")))


def check_equal(folder: Path, uninterrupted: Path) -> None:
    """Require equal completions and metrics, bit by bit, and the same files."""
    pd.testing.assert_frame_equal(samples_of(folder), samples_of(uninterrupted), check_exact=True)
    ours, theirs = record_of(folder), record_of(uninterrupted)
    for key in ("sets", "metrics", "config", "status"):
        assert ours[key] == theirs[key], key
    assert {path.name for path in folder.iterdir()} == {path.name for path in uninterrupted.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_keeps_stored_completions(tmp_path, uninterrupted, number):
    """The signal goes to the process group, as from a terminal; then the printed command is run."""
    process = start_slowly(tmp_path, *SETTINGS, "--name", "stopped", "--runs-dir", "my runs")
    folder = tmp_path / "my runs" / "stopped"
    wait_until(process, lambda: count_parts(folder) >= 2)
    os.killpg(process.pid, number)
    out, _ = end_of(process, 128 + number)
    stored = count_parts(folder)
    assert 2 <= stored < 6
    assert out.splitlines()[-1] == (
        f"interrupted: {4 * stored} of 24 completions are stored; resume with: bandpo eval --resume stopped "
        "--runs-dir 'my runs'"
    )
    assert record_of(folder)["status"] == "interrupted"
    assert not (folder / "samples.parquet").exists()
    usage_error("eval", "compare", "stopped", "stopped", "--runs-dir", "my runs", cwd=tmp_path)
    done = succeed("eval", "--resume", "stopped", "--runs-dir", "my runs", cwd=tmp_path)
    assert f"after {4 * stored} that were there" in done.out
    check_equal(folder, uninterrupted)


@pytest.mark.slow
def test_a_kill_loses_at_most_one_batch(tmp_path, uninterrupted):
    rng = random.Random(7)
    folder = tmp_path / "runs" / "killed"
    process = start_slowly(tmp_path, *SETTINGS, "--name", "killed")
    stored = [0]
    for _ in range(2):
        wait_until(process, lambda: count_parts(folder) > stored[-1])
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.communicate()
        assert record_of(folder)["status"] == "running"
        stored.append(count_parts(folder))
        process = start_slowly(tmp_path, "--resume", "killed", "--no-mlflow")
    end_of(process)
    assert 0 < stored[1] < stored[2] <= 6
    check_equal(folder, uninterrupted)


def interrupted_evaluation(place: Path, keep: int) -> Path:
    """Return the folder of an evaluation that Ctrl-C interrupted when `keep` batches were stored."""
    write, written = tables.write_eval_table, []

    def write_or_interrupt(path: Path, rows: list) -> Path:
        if len(written) == keep:
            raise KeyboardInterrupt
        written.append(path)
        return write(path, rows)

    with mock.patch.object(tables, "write_eval_table", write_or_interrupt):
        assert bandpo("eval", *SETTINGS, "--name", "part", cwd=place).code == 130
    folder = place / "runs" / "part"
    assert count_parts(folder) == keep
    assert record_of(folder)["status"] == "interrupted"
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("keep", [0, 6])
def test_resume_after_any_number_of_batches(tmp_path, uninterrupted, keep):
    """Before the first batch, and between the last part and the complete table; other tests stop in between."""
    folder = interrupted_evaluation(tmp_path, keep)
    succeed("eval", "--resume", "part", "--no-mlflow", cwd=tmp_path)
    check_equal(folder, uninterrupted)


@pytest.mark.slow
def test_a_damaged_part_is_named_and_other_files_are_ignored(tmp_path, uninterrupted):
    folder = interrupted_evaluation(tmp_path, 2)
    part = min((folder / "parts").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:100])
    (folder / "parts" / ".000-00000002.parquet.123.tmp").write_bytes(b"PAR1 half")
    (folder / "parts" / "notes.parquet").write_bytes(b"a user's own")
    usage_error("eval", "--resume", "part", cwd=tmp_path, parts=[part.name, "remove that file"])
    part.unlink()
    succeed("eval", "--resume", "part", "--no-mlflow", cwd=tmp_path)
    check_equal(folder, uninterrupted)


@pytest.mark.slow
def test_a_kill_between_the_table_and_the_metrics(tmp_path, uninterrupted):
    """The table is complete, the parts still exist, and the status is running: the metrics come from the table."""
    succeed("eval", *SETTINGS, "--name", "a", cwd=tmp_path)
    folder = tmp_path / "runs" / "a"
    record = record_of(folder)
    running = {**record, "status": "running", "sets": {"countdown": {"problems": 6}}}
    running.pop("metrics")
    (folder / "eval.json").write_text(json.dumps(running))
    (folder / "plots" / "success.png").unlink()
    (folder / "parts").mkdir()
    (folder / "parts" / "000-00000000.parquet").write_bytes(b"of no use any more")
    done = succeed("eval", "--resume", "a", "--no-mlflow", cwd=tmp_path)
    assert "has all its completions" in done.out
    check_equal(folder, uninterrupted)


@pytest.mark.slow
def test_a_finished_evaluation_is_graded_again_without_its_model(tmp_path):
    jsonl(tmp_path / "a.jsonl", *FOREIGN)
    succeed("eval", "--samples", "a.jsonl", "--name", "a", "--no-mlflow", cwd=tmp_path)
    before = record_of(tmp_path / "runs" / "a")
    (tmp_path / "a.jsonl").unlink()
    done = succeed("eval", "--resume", "a", "--no-mlflow", "--format", "json", cwd=tmp_path)
    assert json.loads(done.out)["sets"] == before["sets"]
    succeed("eval", *SETTINGS, "--limit", "1", "--name", "b", cwd=tmp_path)
    record = record_of(tmp_path / "runs" / "b")
    record["model"]["path"] = "/nowhere/at/all"
    (tmp_path / "runs" / "b" / "eval.json").write_text(json.dumps(record))
    succeed("eval", "--resume", "b", "--no-mlflow", cwd=tmp_path)
    assert record_of(tmp_path / "runs" / "b")["sets"] == record["sets"]


def test_a_changed_or_deleted_samples_file_is_refused_at_resume(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *FOREIGN)
    succeed("eval", "--samples", "a.jsonl", "--name", "a", "--no-mlflow", cwd=tmp_path)
    folder = tmp_path / "runs" / "a"
    before = samples_of(folder)
    (folder / "samples.parquet").unlink()
    succeed("eval", "--resume", "a", "--no-mlflow", cwd=tmp_path)
    pd.testing.assert_frame_equal(samples_of(folder), before, check_exact=True)
    (folder / "samples.parquet").unlink()
    for change in (lambda: path.write_text(path.read_text() + "\n"), path.unlink):
        change()
        assert "was changed or deleted" in usage_error("eval", "--resume", "a", "--no-mlflow", cwd=tmp_path)


@pytest.mark.slow
def test_changed_problems_with_the_same_ids_are_refused_at_resume(tmp_path):
    """The task's file, or its settings as here, gives the same number of problems, but different ones."""
    folder = interrupted_evaluation(tmp_path, 2)
    record = record_of(folder)
    record["config"]["task"]["max_number"] = 5
    (folder / "eval.json").write_text(json.dumps(record))
    usage_error("eval", "--resume", "part", cwd=tmp_path, parts=["its tasks have other problems now"])
    assert count_parts(folder) == 2


def test_resume_refuses_settings(tmp_path):
    flags = "--task countdown --n 4 --k 1 --temperature 0 --seed 0 --grader math --name b --set seed=1"
    words = flags.split()
    line = usage_error("eval", "--resume", "anything", *words, cwd=tmp_path)
    assert "settings of the evaluation" in line
    named = line.partition("leave out ")[2].strip().split(", ")
    assert sorted(named) == sorted(words[::2])


def test_a_damaged_record_is_one_line(tmp_path):
    folder = EvalFolder.create(tmp_path / "runs", "a")
    model = {"path": "embedded", "run": None, "step": None}
    record = {"name": "a", "status": "interrupted", "model": model, "samples": None, "config": {}, "sets": {}}
    for change in ({"config": []}, {"config": {"seed": -1}}, {"model": {}}, {"samples": {"path": 7}}):
        folder.write_record({**record, **change})
        usage_error("eval", "--resume", "a", cwd=tmp_path)
