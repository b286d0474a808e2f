"""Folders of runs and evaluations: valid names, atomic writes, strict lines of metrics, tables, parts, and the lock."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli import __version__, results
from bandpo_cli.errors import UserError
from bandpo_cli.results import list_runs
from bandpo_cli.storage import files, run_folder, tables
from bandpo_cli.storage.files import run_lock
from bandpo_cli.storage.run_folder import (
    EvalFolder,
    PartKey,
    RunFolder,
    find_folder,
    find_run,
    shell_command,
    timestamped,
    unused_name,
)
from bandpo_cli.storage.run_record import read_stored_run, read_summary
from bandpo_cli.storage.tables import (
    TOKEN_COLUMNS,
    TokenValues,
    eval_table,
    read_graded_completions,
    read_token_values,
)
from bandpo_cli.types import MESSAGES, Completion, Grade, Group, Problem, Rollout
from tests.tasks.stored_completions import ROW


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("../x", "x"), ("/etc/x", "x"), ("a\\b", "b"), ("", "run"), ("..", "run"), (".hidden", "hidden"), ("-rf", "rf"),
        ("my run", "my-run"), ("a\n", "a"), ("mlartifacts", "mlartifacts-2"), ("x" * 300, "xxx"),
        ("v1.", "v1"),
    ],
)  # fmt: skip
def test_an_invalid_name_is_refused_with_a_valid_one(tmp_path, name, instead):
    runs = tmp_path / "runs"
    with pytest.raises(UserError, match=f"--name {instead}") as error:
        RunFolder.create(runs, name)
    assert list(tmp_path.iterdir()) == []
    RunFolder.create(runs, str(error.value).rpartition("--name ")[2])  # the suggested name works


def test_an_existing_name_is_refused_with_an_unused_one(tmp_path):
    assert unused_name("a", tmp_path) == "a"
    RunFolder.create(tmp_path, "a")
    (tmp_path / "a" / "config.yaml").write_text("mine")
    (tmp_path / "a-2").write_text("a file takes a name too")
    with pytest.raises(UserError, match=r"--name a-3"):
        RunFolder.create(tmp_path, "a")
    assert (tmp_path / "a" / "config.yaml").read_text() == "mine"


def test_an_unknown_name_is_refused_with_the_nearest_one(run, folder, tmp_path):
    runs = tmp_path / "runs"
    assert RunFolder.open(Path("nowhere"), str(run.path)).path == run.path
    with pytest.raises(UserError, match="did you mean 'first'"):
        RunFolder.open(runs, "frist")
    with pytest.raises(UserError, match=r"there is no folder .*none; --runs-dir names another"):
        RunFolder.open(tmp_path / "none", "first")
    with pytest.raises(UserError, match=r"no evaluation 'secnd' .*did you mean 'second'\?.*it has second"):
        EvalFolder.open(runs, "secnd")
    for name in ("", "x" * 5000, "a\0b"):
        with pytest.raises(UserError, match="no evaluation"):
            EvalFolder.open(runs, name)


def test_open_names_the_command_that_resumes_an_evaluation_or_a_sweep(tmp_path):
    for file, message in (("notes", "no config.yaml"), ("eval.json", "eval"), ("sweep.yaml", "sweep")):
        command = f"bandpo {message} --resume x{file} --runs-dir {tmp_path}"
        (tmp_path / f"x{file}").mkdir()
        (tmp_path / f"x{file}" / file).write_text("{}")
        with pytest.raises(UserError, match=message if file == "notes" else command):
            RunFolder.open(tmp_path, f"x{file}")


def test_find_folder_prefers_the_runs_folder_and_gives_every_folder_a_name(tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    for place in (runs / "a", tmp_path / "a", tmp_path / "b"):
        place.mkdir(parents=True)
        (place / "mark").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_folder("a", runs, "mark") == runs / "a"
    assert find_folder("b", runs, "mark") == Path("b")
    assert find_folder("~/b", runs, "mark") == tmp_path / "b"
    assert find_folder("", runs, "mark") is None
    assert find_folder("c", runs, "mark") is None
    assert find_folder("a", runs, "other") is None
    monkeypatch.chdir(tmp_path / "b")
    assert find_folder(".", runs, "mark") == tmp_path / "b"


def test_commands_name_a_run_in_the_runs_folder_and_give_the_path_of_any_other():
    runs = Path("runs")
    assert shell_command("train --resume", runs / "a", runs) == "bandpo train --resume a"
    resumed = shell_command("eval --resume", Path("my runs/a"), Path("my runs"))
    assert resumed == "bandpo eval --resume a --runs-dir 'my runs'"
    assert shell_command("sweep --resume", Path("/else/a"), runs) == "bandpo sweep --resume /else/a"
    assert shell_command("sync", runs / "a", runs) == "bandpo sync a"
    assert shell_command("sync", Path("b/a"), Path("b")) == "bandpo sync a --runs-dir b"


@pytest.mark.parametrize(
    ("env", "is_refused"),
    [
        ({"versions": {"bandpo": "99.1"}}, True),
        ({"versions": {"bandpo": __version__}, "resumes": [{"versions": {"bandpo": "99.1"}}]}, True),
        ({"versions": {"bandpo": __version__}, "resumes": [{"after_step": 1}]}, False),
        ({"versions": {"bandpo": "0.1.0"}}, False),
        ({"versions": ["99.1"], "resumes": 3}, False),
        ({"versions": {"bandpo": "unknown"}}, False),
    ],
)
def test_a_folder_of_a_later_version_is_refused(tmp_path, run, env, is_refused):
    run.write_env(env)
    words = f"first: written by bandpo 99.1, and this is {__version__}; install the later version"
    for read in (
        lambda: RunFolder.open(tmp_path, str(run.path)), lambda: find_run(f"{run.path}@3", tmp_path),
        lambda: read_stored_run(run.path), lambda: read_summary(run.path),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words) if is_refused else nullcontext():
            read()
    (listed,) = list_runs(run.path.parent)
    assert (words in str(listed.error)) == is_refused


def test_metrics_lines_are_strict_json_with_step_first(tmp_path):
    folder = RunFolder.create(tmp_path, "a")
    folder.append_metrics({"ratio/max": float("inf"), "kl/ref": float("nan"), "step": 7, "task": "é"})
    line = folder.metrics_path.read_text(encoding="utf-8")
    assert line == '{"step": 7, "ratio/max": null, "kl/ref": null, "task": "é"}\n'
    assert folder.read_metrics() == [{"step": 7, "ratio/max": None, "kl/ref": None, "task": "é"}]


def test_a_truncated_last_line_is_ignored_and_removed_by_a_rollback(run):
    with run.metrics_path.open("a") as file:
        file.write('{"step": 4, "train/rew')
    assert [record["step"] for record in run.read_metrics()] == [1, 2, 3]
    run.roll_back(3)
    run.append_metrics({"step": 4})
    assert [record["step"] for record in run.read_metrics()] == [1, 2, 3, 4]
    run.metrics_path.write_text('{"step": 1}\n[2]\n')
    with pytest.raises(UserError, match="line 2"):
        run.read_metrics()


def test_roll_back_removes_later_steps_only(run):
    for step in (2, 3):
        run.write_samples(step, [])
        run.write_eval(step, {})
        run.write_tokens(step, {key: [0.0] for key in TOKEN_COLUMNS})
    before = run.metrics_path.read_bytes()
    run.roll_back(2)
    assert run.metrics_path.read_bytes() == b"".join(before.splitlines(keepends=True)[:2])
    left = sorted(str(path.relative_to(run.path)) for path in run.path.rglob("step-*"))
    assert left == ["evals/step-000002.json", "samples/step-000002.parquet", "tokens/step-000002.parquet"]


def test_the_table_of_a_step_without_completions_has_the_same_columns(tmp_path):
    problem = Problem("p1", "1 2=3:", "3", "countdown", "countdown")
    completion = Completion((5, 6, 7), (-0.5, -0.25, -1.0), "stop", policy_version=4)
    grade = Grade(0.5, True, "correct", has_reward=False)
    rollout = Rollout(problem, "1 2=3:", (1, 2), completion, "1+2", grade)
    folder = RunFolder.create(tmp_path, "a")
    path = folder.write_samples(10, [Group(problem, (rollout, rollout))])
    assert path == tmp_path / "a/samples/step-000010.parquet"
    assert pq.read_table(path)["reward"].to_pylist() == [None, None]
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    empty = folder.write_samples(11, [])
    assert pq.read_table(empty).schema.equals(pq.read_table(path).schema)


def test_the_text_of_a_stored_conversation_has_all_turns_and_calls(tmp_path):
    call = {"type": "function", "function": {"name": "search", "arguments": {"q": "π"}}}
    messages = [
        {"role": "assistant", "content": "Let me look.", "tool_calls": [call]},
        {"role": "tool", "name": "search", "content": "3.14"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    problem = Problem("p1", "What is π?", "3.14", "mine", "mine", extra={MESSAGES: messages})
    rollout = Rollout(
        problem, "What is π?", (1,), Completion((5,), (-0.5,), "stop", 0), "…", Grade(1.0, True, "correct")
    )
    path = RunFolder.create(tmp_path, "a").write_samples(1, [Group(problem, (rollout,))])
    (row,) = read_graded_completions(path)
    function = '{"name": "search", "arguments": {"q": "π"}}'
    turns = ["[assistant] Let me look.", function, "[search] 3.14", f"[assistant] {function}"]
    assert row["text"].splitlines() == turns


def test_token_values_come_back_from_at_most_20_bytes_per_token(tmp_path):
    generator = np.random.default_rng(0)
    lengths, size = np.array([3, 1, 39_996]), 40_000
    floats = [generator.normal(size=size).astype(np.float32) for _ in range(6)]
    floats[1][7], floats[4][8] = np.nan, np.inf
    texts = [f"{number}\n</script>" for number in range(70_000)]
    indices, clipped = generator.integers(0, 70_000, size, np.int32), generator.integers(0, 3, size, np.uint8)
    halves = [column.astype(np.float16) for column in floats[2:]]
    advantages = np.array([0.5, np.nan, -1], np.float32)
    values = TokenValues(lengths, advantages, texts, indices, *floats[:2], *halves, clipped)
    folder = RunFolder.create(tmp_path, "a")
    folder.write_config("seed: 0\n")
    path = folder.write_token_values(1, values)
    # pandas counts in the type of a column: of more than 65,504 values in float16, the deviation would be 0.
    assert results.tokens(folder.path, 1).select_dtypes("float16").empty
    read = read_token_values(path)
    assert np.array(read.texts)[read.text_index].tolist() == [texts[index] for index in values.text_index]
    for name in ("lengths", "advantage", *TokenValues._fields[4:]):
        np.testing.assert_array_equal(getattr(read, name), getattr(values, name))
    columns = [pq.read_metadata(path).row_group(0).column(index) for index in range(9)]
    dictionary = sum(len(text.encode()) + 4 for text in texts)
    assert sum(column.total_uncompressed_size for column in columns) - dictionary < 20 * size
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="not readable as a table of values per token"):
        read_token_values(path)


def test_a_file_is_flushed_before_it_is_renamed_and_a_failed_write_keeps_the_old_one(tmp_path, monkeypatch):
    calls = []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda *a: (calls.append("replace"), replace(*a)))
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    path = files.write_json(tmp_path / "env.json", {"a": [float("nan"), 1]})
    assert calls == ["fsync", "replace", "fsync"]

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        files.write_text(path, "new")
    assert json.loads(path.read_text()) == {"a": [None, 1]}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("create", [RunFolder.create, EvalFolder.create])
def test_processes_that_start_in_the_same_second_get_folders_of_their_own(tmp_path, monkeypatch, create):
    """All have chosen their name before any of them creates its folder."""
    monkeypatch.setattr(time, "strftime", lambda _: "20261123-120000")
    names = [unused_name(timestamped("kl-s0"), tmp_path) for _ in range(3)]
    created = [create(tmp_path, name).name for name in names]
    assert created == [f"kl-s0-20261123-120000{end}" for end in ("", "-2", "-3")]


def test_records_are_found_among_many_without_parsing_the_others(tmp_path, monkeypatch):
    """Steps 3, 6, ... exist; the last line is truncated."""
    run = RunFolder.create(tmp_path, "a")
    assert run.read_records([0]) == []
    lines = [json.dumps({"step": step, **({} if step == 6 else {"a": 1})}) for step in range(0, 300, 3)]
    run.metrics_path.write_text("\n".join([*lines, '{"step": 300, "a": 1}']))
    parse = mock.Mock(side_effect=lambda line, path: json.loads(line))
    monkeypatch.setattr(run_folder, "parse_metrics", parse)
    assert [record["step"] for record in run.read_records([297, 6, -1, 4, 29, 300, 0])] == [0, 6, 297]
    assert parse.call_count == 3


@pytest.fixture
def folder(tmp_path):
    folder = EvalFolder.create(tmp_path / "runs", "second")
    folder.write_record({"status": "running", "sets": {}})
    return folder


def test_parts_round_trip_exactly_by_key(folder):
    """Parts are read in the order of sets and problems, independent of the order of writing."""
    keys = [PartKey(1, 0), PartKey(0, 128), PartKey(0, 4), PartKey(0, 100_000_000)]
    for key in keys:
        folder.write_part(key, [{**ROW, "problem_id": str(key)}, ROW])
    found = folder.read_parts()
    assert sorted(found) == [PartKey(0, 4), PartKey(0, 128), PartKey(0, 100_000_000), PartKey(1, 0)]
    assert all(found[key] == [{**ROW, "problem_id": str(key)}, ROW] for key in keys)
    assert folder.count_stored() == 8


def test_the_complete_table_replaces_the_parts(folder):
    folder.write_part(PartKey(0, 0), [ROW])
    folder.write_samples([ROW, ROW])
    assert not (folder.path / "parts").exists()
    assert folder.read_parts() == {}
    assert folder.count_stored() == 2
    assert pq.read_table(folder.samples_path).to_pylist() == [ROW, ROW]


@pytest.mark.parametrize("name", ["second", "{runs}/second/", "{runs}/second/eval.json", ".", "eval.json"])
def test_open_accepts_name_folder_and_record(tmp_path, folder, name, monkeypatch):
    monkeypatch.chdir(folder.path)
    found = EvalFolder.open(tmp_path / "runs", name.format(runs=tmp_path / "runs"))
    assert (found.path, found.name) == (folder.path, "second")


HOLD = """import os, sys, time; from pathlib import Path
from bandpo_cli.storage.files import run_lock
with run_lock(Path(sys.argv[1])):
    if sys.argv[2] == 'fork' and os.fork() == 0: time.sleep(20); os._exit(0)
    print('held', flush=True); time.sleep(20)
"""


@contextmanager
def holder(folder: Path, how: str = "single") -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the lock of `folder` within the body; kill it and its children afterwards."""
    command = [sys.executable, "-c", HOLD, str(folder), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_a_second_process_is_refused_with_a_message_that_names_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ACQUIRE_TIMEOUT_S", 0.01)
    with holder(tmp_path) as process:
        first = f"{tmp_path.name} .*process {process.pid} on {socket.gethostname()}"
        with pytest.raises(UserError, match=first), run_lock(tmp_path):
            pytest.fail("two processes have the lock")


@pytest.mark.parametrize("how", ["single", "fork"])
def test_a_killed_process_releases_the_lock_even_if_its_child_lives(tmp_path, how):
    with holder(tmp_path, how) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with run_lock(tmp_path):  # raises where the lock is still held
            assert process.returncode == -signal.SIGKILL


def test_the_lock_is_released_at_the_end_and_when_the_body_fails(tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), run_lock(tmp_path):
            raise ZeroDivisionError


def test_a_folder_that_is_not_writable_raises(tmp_path):
    with pytest.raises(UserError, match="cannot be written to"), run_lock(tmp_path / "nowhere"):
        pytest.fail("there is no such folder")


_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("task", "problem_id", "question", "prompt", "reference")]
    + [(name, pa.string()) for name in ("grader", "extra", "text", "answer")]
    + [("reward", pa.float64()), ("accuracy", pa.float64()), ("verdict", pa.string()), ("length", pa.int32())]
    + [("finish_reason", pa.string()), ("logprob_sum", pa.float64())]
)  # fmt: skip
_VALUES = {pa.string(): st.text(max_size=20), pa.float64(): st.floats()}
_VALUES[pa.int32()] = st.integers(-(2**31), 2**31 - 1)
_NULLABLE = ("answer", "reward", "length", "finish_reason", "logprob_sum")
_ROWS = st.fixed_dictionaries(
    {item.name: (st.none() if item.name in _NULLABLE else st.nothing()) | _VALUES[item.type] for item in _SCHEMA}
)  # fmt: skip


@pytest.mark.slow
@given(st.lists(_ROWS, max_size=7))
def test_a_table_of_completions_equals_the_one_of_pyarrow(rows):
    """Any text, NaN and infinities included; blocks of three rows, so that there are up to three of them."""
    with mock.patch.object(tables, "_ROWS_PER_BLOCK", 3):
        found = eval_table(rows)
    expected = pa.Table.from_pylist(rows, schema=_SCHEMA)
    assert found.schema.equals(expected.schema, check_metadata=True)
    assert repr(found.to_pylist()) == repr(expected.to_pylist())  # repr, because NaN is not equal to itself


@pytest.mark.parametrize(
    "value", [{"text": 5}, {"text": "\ud800"}, {"accuracy": "x"}, {"length": 2**31}, {"length": 1.5}, {"other": 1}]
)  # fmt: skip
def test_a_value_that_its_column_cannot_hold_is_an_error(value):
    with pytest.raises(ValueError, match=r"JSON|surrogates"):
        eval_table([{**ROW, **value}])
