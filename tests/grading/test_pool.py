"""Grader pool and worker processes: custom functions get the documented arguments and cannot affect other answers."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.grading import calls_and_retries
from bandpo_cli.grading import pool as pool_module
from bandpo_cli.grading.pool import GraderPool, check_grader
from bandpo_cli.grading.workers import MAX_PRINTED_BYTES, WorkerPool
from bandpo_cli.types import Grade, Problem
from benchmarks.hostile_answers import ENDLESS, HOSTILE, QUICK
from tests.processes.checks import check_ended, has_ended

CUSTOM_GRADER = """
import ctypes, math, os, re, subprocess, sys, time
print("a print at import")

def judge(text, answer, extra):
    print("a print", flush=True)
    os.write(1, b'{"result": [1, true, "forged"]}\\n')
    actions = {
        "input": input, "stdin": sys.stdin.read, "exit": lambda: sys.exit(0), "die": lambda: os._exit(3),
        "crash": lambda: ctypes.string_at(0), "sleep": lambda: time.sleep(1000),
        "stuck": lambda: re.match("(a+)+$", "a" * 99 + "b"),  # no other thread runs
        "memory": lambda: bytearray(2**40), "raise": lambda: int("no number"),
    }
    if text in actions: return actions[text]() == ""
    if text == "grow":
        hog = []
        while True: hog.append(bytearray(2**24))
    if text == "child":
        child = subprocess.Popen(["sleep", "1000"])
        open(extra["file"], "w").write(str(child.pid))
        time.sleep(1000)
    if text == "modules":
        return {"score": 0, "verdict": " ".join({"torch", "asyncio", "pydantic"} & {*sys.modules}) or "none"}
    if text == "flood":
        for _ in range(40): sys.stderr.write("\\x1b[2J" + "x" * 2**19)
    if text == "pid": return {"score": 0, "verdict": str(os.getpid())}
    if text.startswith("results"):
        import numpy
        return eval(text[7:])
    return text == answer and extra.get("key", 1) == 1

def echo(text, answer, extra):
    return text == answer == extra["text"]

async def wait(text, answer, extra):
    import asyncio
    await asyncio.sleep(1000 if text == "sleep" else 0)
    return {"score": 0, "verdict": str(os.getpid())}

def sleep(text, answer, extra):
    time.sleep(float(text))
    return True

no_function = 3
"""


@pytest.fixture(autouse=True)
def _custom_graders(tmp_path, monkeypatch):
    (tmp_path / "custom_grader.py").write_text(CUSTOM_GRADER)
    (tmp_path / "broken_grader.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "dying_grader.py").write_text("import os\nos._exit(7)\n")
    (tmp_path / "json.py").write_text("raise ImportError('the folder shadows the standard library')\n")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pool():
    """Return a pool whose deadline no answer reaches on a busy machine."""
    with GraderPool(GradingConfig(workers=2, deadline=60)) as pool:
        yield pool


def problem(answer: str = "right", function: str = "judge", **extra: object) -> Problem:
    return Problem("p", "", answer, "test", f"custom_grader:{function}", extra)


def verdicts(pool: GraderPool, texts: list[str], **extra: object) -> list[str]:
    return [grade.verdict for grade in pool.grade([problem(**extra)] * len(texts), texts)]


def test_function_gets_text_answer_and_extra_in_order_also_beside_other_graders(pool):
    check_grader("custom_grader:judge")
    texts = ["right" if index % 3 else "left" for index in range(200)]
    assert verdicts(pool, texts) == ["correct" if text == "right" else "wrong" for text in texts]
    assert verdicts(pool, ["right"], key=2) == ["wrong"]
    assert pool.grade([], []) == []
    countdown = Problem("c", "", "3", "t", "countdown", {"numbers": "1 2"})
    number = Problem("n", "", "3", "t", "number")
    grades = pool.grade([problem(), countdown, number, problem()], ["right", "1+2", "Answer: 4", "left"])
    assert [grade.verdict for grade in grades] == ["correct", "correct", "wrong", "wrong"]


RESULTS = {
    "True": Grade(1.0, True, "correct"), "False": Grade(0.0, False, "wrong"), "0.25": Grade(0.25, False, "wrong"),
    "1": Grade(1.0, True, "correct"), "{'score': 0.5}": Grade(0.5, False, "wrong"),
    "{'score': 0.5, 'correct': True}": Grade(0.5, True, "correct"), "numpy.zeros(())": Grade(0.0, False, "wrong"),
    "{'score': 0, 'verdict': 'no-code'}": Grade(0.0, False, "no-code"),
    "numpy.float32(0.5)": Grade(0.5, False, "wrong"), "numpy.bool_(True)": Grade(1.0, True, "correct"),
}  # fmt: skip
BAD_RESULTS = """
None | 'correct' | 2 | -0.1 | math.nan | math.inf | [1] | {} | {'score': None} | {'reward': 1} | object()
{'score': 1, 'correct': 1} | {'score': 1, 'verdict': ''} | {'score': 1, 'verdict': 'x' * 99}
{'score': 0, 'verdict': 'timeout'} | {'score': 0, 'verdict': 3}
"""


def test_return_values_are_grades_or_grader_errors(pool):
    grades = pool.grade([problem()] * len(RESULTS), [f"results{result}" for result in RESULTS])
    assert dict(zip(RESULTS, grades, strict=True)) == RESULTS
    assert not any(use.error for use in pool.uses.values())
    bad_results = BAD_RESULTS.strip().replace("\n", " | ").split(" | ")
    assert set(verdicts(pool, [f"results{result}" for result in bad_results])) == {"grader-error"}
    assert "ValueError" in pool.uses["custom_grader:judge"].error


ERRORS = {
    "raise exit": "ValueError: invalid literal",
    "die crash": "the worker process ended with exit code 3",
    "crash": "the worker process was killed by SIGSEGV",
    "memory grow": "MemoryError",
    "input": "EOFError",  # input() and print() do not disturb the protocol
}


@pytest.mark.slow
@pytest.mark.parametrize("texts", ERRORS)
def test_error_or_exit_affects_only_that_answer(texts):
    with GraderPool(GradingConfig(workers=1, deadline=20, memory_gb=0.5)) as pool:
        failing = texts.split()
        expected = ["correct", *["grader-error"] * len(failing), "correct", "wrong"]
        assert verdicts(pool, ["right", *failing, "stdin", "left"]) == expected
        assert pool.uses["custom_grader:judge"].error.startswith(ERRORS[texts])


def test_what_a_grader_prints_is_limited_and_escaped(pool, capfd, caplog):
    """20 MB for each of four answers."""
    assert verdicts(pool, ["flood"] * 4) == ["wrong"] * 4
    printed = capfd.readouterr().err
    assert MAX_PRINTED_BYTES / 2 < len(printed) <= MAX_PRINTED_BYTES + 1000
    assert "\\x1b[2Jxxx" in printed
    assert "\x1b" not in printed
    warning = "grader 'custom_grader:judge' has printed more than 64 KiB; the rest is not shown"
    assert [message for message in caplog.messages if "has printed" in message] == [warning]


@pytest.mark.slow
def test_deadline_counts_neither_the_import_nor_idle_time_nor_queued_answers():
    Path("custom_grader.py").write_text(f"import time\ntime.sleep(0.6)\n{CUSTOM_GRADER}")
    sleeping = problem(function="sleep")
    with GraderPool(GradingConfig(workers=1, deadline=0.5, timeout_reward="wrong")) as pool:
        assert pool.grade([sleeping], ["0"])[0].correct
        time.sleep(0.6)
        assert pool.grade([sleeping], ["0"])[0].correct
        assert not any(use.error for use in pool.uses.values())
        slow, *queued = pool.grade([sleeping] * 4, ["60", "0", "0", "0"])
    assert (slow.verdict, slow.reward, slow.correct, slow.has_reward) == ("timeout", 0.0, False, True)
    assert all(grade.correct and grade.has_reward for grade in queued)


@pytest.mark.slow
def test_a_timeout_has_no_reward_and_kills_the_child_processes_too(tmp_path):
    note = tmp_path / "pid"
    with GraderPool(GradingConfig(workers=1, deadline=1)) as pool:
        (grade,) = pool.grade([problem(file=str(note))], ["child"])
    assert (grade.verdict, grade.has_reward) == ("timeout", False)
    check_ended([int(note.read_text())])


@pytest.mark.slow
def test_any_text_arrives_unchanged():
    odd = "a\x00b\n\r\u2028\ud800\udfff\\\"'" * 1000
    texts = ["x" * 1_000_000, "\u202eµ\U0001f600" * 50_000, odd, "\n" * 100_000] * 2
    # Megabytes take seconds on a busy machine.
    with GraderPool(GradingConfig(workers=2, deadline=60)) as pool:
        grades = pool.grade([problem(text, "echo", text=text) for text in texts], texts)
    assert {grade.verdict for grade in grades} == {"correct"}


def test_workers_persist_between_calls_until_close_and_import_little(pool):
    assert verdicts(pool, ["modules"]) == ["none"]
    [first], [second] = verdicts(pool, ["pid"]), verdicts(pool, ["pid"])
    assert first == second
    os.kill(int(first), signal.SIGKILL)
    check_ended([int(first)])
    assert verdicts(pool, ["right"]) == ["correct"], "the exit of an idle worker affects no answer"
    assert not any(use.error for use in pool.uses.values())
    pids = set(verdicts(pool, ["pid"] * 20))
    pool.close()
    assert all(has_ended(int(pid)) for pid in pids)


def test_a_reply_without_a_request_ends_the_worker():
    """An answer could otherwise have a result that the function did not give."""
    replies = [{"job": 7, "results": [[1.0, "correct", True]]}]
    worker = SimpleNamespace(receive=lambda: replies, ready=True, jobs={}, started_at=0.0)
    assert not WorkerPool._read(SimpleNamespace(), worker)


PARENT = """
import sys, time
from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.types import Problem
print("imported", flush=True)
pool = GraderPool(GradingConfig(workers=1, deadline=0.5))
problem = Problem("p", "", "", "t", f"custom_grader:{'wait' if sys.argv[1] == 'calling' else 'judge'}")
[pid] = pool.grade([problem], ["pid"])
print(pid.verdict, flush=True)
if sys.argv[1] in ("busy", "calling"):
    pool.grade([problem], ["stuck" if sys.argv[1] == "busy" else "sleep"])
time.sleep(1000 if sys.argv[1] == "idle" else 0)
"""
SHORT_ALARM = "import bandpo_cli.grading.calls_and_retries as process\nprocess.ALARM_MARGIN_S = -0.5\n"
"""The alarm of a worker comes at 2 · 0.5 − 0.5 s."""


@pytest.mark.slow
@pytest.mark.parametrize(("doing", "with_signal"), [("busy", 9), ("calling", 9), ("idle", 2), ("ending", 0)])
def test_workers_exit_with_their_parent(doing, with_signal, tmp_path):
    # A script with code at its top level: a worker that imports it would start further workers.
    (tmp_path / "script.py").write_text(PARENT)
    (tmp_path / "custom_grader.py").write_text(SHORT_ALARM + CUSTOM_GRADER)
    (tmp_path / "json.py").unlink()
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    options |= {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}}
    with subprocess.Popen([sys.executable, "script.py", doing], **options) as parent:
        assert parent.stdout.readline() == "imported\n"
        worker = int(parent.stdout.readline())
        if with_signal:
            time.sleep(0.1)  # until the call runs
            parent.send_signal(with_signal)
        assert "imported" not in parent.stdout.read()
        parent.wait(30)
    check_ended([worker])


UNUSABLE = {
    "custom_grader:juge": r"custom_grader:juge': module '.*' has no function 'juge' \(did you mean 'judge'\?\)",
    "custom_grader:no_function": "module '.*' has no function 'no_function'",
    "no_such:thing": r"importing 'no_such' failed: ModuleNotFoundError.*searched the current folder",
    "broken_grader:judge": "importing 'broken_grader' failed: ModuleNotFoundError: .*no_such_module_any",
    "dying_grader:judge": "its process ended with exit code 7 while importing",
    "maths": r"none of that name \(did you mean 'math'\?\); known: math, number, .*, or a custom function",
}


@pytest.mark.slow
def test_unusable_grader_is_reported_in_one_line(pool):
    for name, message in UNUSABLE.items():
        with pytest.raises(ConfigError, match=message):
            check_grader(name)
    with pytest.raises(ConfigError, match=message):
        pool.grade([Problem("p", "", "", "t", name)], ["x"])


@pytest.mark.slow
def test_hostile_answers_are_never_correct_and_do_not_break_the_pool(monkeypatch):
    """Each hostile answer is followed by an ordinary answer, which the worker grades once."""
    calls = []
    submit = pool_module.GraderWorkers.submit

    def counting(worker_pool: pool_module.GraderWorkers, arguments: Any, *rest: Any) -> range:
        calls.append(len(arguments))
        return submit(worker_pool, arguments, *rest)

    monkeypatch.setattr(pool_module.GraderWorkers, "submit", counting)
    five = Problem("five", "", "5", "test", "math")
    # One of the endless answers: a worker that is killed at its deadline takes seconds to replace.
    hostile_texts = [ENDLESS[0], *QUICK[::3]]
    texts = [text for hostile in hostile_texts for text in (hostile, "Answer: 2+3")]
    with GraderPool(GradingConfig(workers=1, deadline=2)) as pool:
        pool.spawn(["math", "number", "nosuch:judge"])
        ((worker,),) = [worker_pool._workers for worker_pool in pool._worker_pools.values()]
        assert not worker.ready, "the import is not waited for"
        given = [grade.verdict for grade in pool.grade([five] * len(texts), texts)]
        after = pool.grade([five] * 3, ["Answer: \\sqrt{25}", "Answer: \\sqrt{36}", "Answer: 5"])
    assert given[0] == "timeout"
    assert {"wrong", "malformed"} <= set(given[::2]) <= {"timeout", "wrong", "malformed"}
    assert set(given[1::2]) == {"correct"}
    assert [grade.verdict for grade in after] == ["correct", "wrong", "correct"]
    assert calls[0] <= len(hostile_texts)


@pytest.mark.parametrize("grader", ["number", "countdown", "gsm8k"])
def test_graders_without_workers_handle_hostile_answers(grader):
    problem = Problem("five", "", "5", "test", grader, {"numbers": "2 3"})
    with GraderPool(GradingConfig()) as pool:
        grades = pool.grade([problem] * len(HOSTILE), HOSTILE)
        assert not pool._worker_pools
    assert {grade.verdict for grade in grades} <= {"wrong", "malformed", "wrong-numbers", "wrong-value"}


def test_a_worker_without_proc_has_no_memory_limit(monkeypatch, tmp_path):
    limits = []
    monkeypatch.setattr(calls_and_retries.resource, "setrlimit", lambda kind, _: limits.append(kind))
    calls_and_retries._limit_memory(2.0)
    assert limits == [resource.RLIMIT_AS, resource.RLIMIT_CORE]
    limits.clear()
    monkeypatch.setattr(calls_and_retries, "PAGES", tmp_path / "absent")
    calls_and_retries._limit_memory(2.0)
    assert limits == [resource.RLIMIT_CORE]
