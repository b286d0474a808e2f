"""Worker processes: a user's function gets what it is promised, and nothing it does harms any other answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.grading import GraderPool, check_grader
from bandpo_cli.grading import pool as pool_module
from bandpo_cli.types import Grade, Problem

OWN = """
import ctypes, math, os, subprocess, sys, time
print("a print at import")

def judge(text, answer, extra):
    print("a print", flush=True)
    os.write(1, b'{"result": [1, true, "forged"]}\\n')
    if text == "input": return input() == ""
    if text == "stdin": return sys.stdin.read() == ""
    if text == "raise": raise RuntimeError("no idea")
    if text == "exit": sys.exit(0)
    if text == "die": os._exit(3)
    if text == "crash": ctypes.string_at(0)
    if text == "sleep": time.sleep(1000)
    if text == "spin": 9 ** 9 ** 9 ** 9
    if text == "memory": return len(bytearray(2**40)) > 0
    if text == "grow":
        hog = []
        while True: hog.append(bytearray(2**24))
    if text == "child":
        child = subprocess.Popen(["sleep", "1000"])
        open(extra["file"], "w").write(str(child.pid))
        time.sleep(1000)
    if text == "modules": return {"score": 0, "verdict": "torch" if "torch" in sys.modules else "none"}
    if text == "pid": return {"score": 0, "verdict": str(os.getpid())}
    if text.startswith("results"): return eval(text[7:])
    return text == answer and extra.get("key", 1) == 1

def numbers(text, answer, extra):
    import numpy
    return {"float32": numpy.float32(0.5), "bool": numpy.bool_(True), "zero": numpy.zeros(())}[text]

def echo(text, answer, extra):
    return text == answer == extra["text"]

no_function = 3
"""


@pytest.fixture(autouse=True)
def _own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_grader.py").write_text(OWN)
    (tmp_path / "broken_grader.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "dying_grader.py").write_text("import os\nos._exit(7)\n")
    (tmp_path / "json.py").write_text("raise ImportError('the folder shadows the standard library')\n")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pool() -> Iterator[GraderPool]:
    with GraderPool(GradingConfig(workers=2, deadline=1)) as pool:
        yield pool


def problem(answer: str = "right", function: str = "judge", **extra: object) -> Problem:
    return Problem("p", "", answer, "test", f"own_grader:{function}", extra)


def verdicts(pool: GraderPool, texts: list[str], **extra: object) -> list[str]:
    return [grade.verdict for grade in pool.grade([problem(**extra)] * len(texts), texts)]


def test_the_function_gets_text_answer_and_extra_in_order(pool: GraderPool) -> None:
    texts = ["right" if index % 3 else "left" for index in range(200)]
    assert verdicts(pool, texts) == ["correct" if text == "right" else "wrong" for text in texts]
    assert verdicts(pool, ["right"], key=2) == ["wrong"]
    assert pool.grade([], []) == []


def test_one_batch_may_mix_graders(pool: GraderPool) -> None:
    countdown = Problem("c", "", "3", "t", "countdown", {"numbers": "1 2"})
    number = Problem("n", "", "3", "t", "number")
    grades = pool.grade([problem(), countdown, number, problem()], ["right", "1+2", "Answer: 4", "left"])
    assert [grade.verdict for grade in grades] == ["correct", "correct", "wrong", "wrong"]


def test_an_answer_that_comes_often_is_judged_once(pool: GraderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    run = pool_module.Team.run

    def counting(team: pool_module.Team, arguments: Any) -> list[Grade]:
        asked.append(len(arguments))
        return run(team, arguments)

    monkeypatch.setattr(pool_module.Team, "run", counting)
    formula = Problem("f", "", "x+1", "t", "math")
    grades = pool.grade(
        [formula] * 6, ["Answer: 1+x", "Answer: x", "no", "Answer: 1+x", "Answer: x", "Answer: 1+x"]
    )
    words = ["correct", "wrong", "malformed", "correct", "wrong", "correct"]
    assert [grade.verdict for grade in grades] == words
    assert asked == [2]
    verdicts(pool, ["right", "right"])  # a user's own function sees every one
    assert asked == [2, 2]


@pytest.mark.parametrize(
    ("result", "grade"),
    [
        ("True", Grade(1.0, True, "correct")),
        ("False", Grade(0.0, False, "wrong")),
        ("0.25", Grade(0.25, False, "wrong")),
        ("1", Grade(1.0, True, "correct")),
        ("{'score': 0.5}", Grade(0.5, False, "wrong")),
        ("{'score': 0.5, 'correct': True}", Grade(0.5, True, "correct")),
        ("{'score': 0, 'verdict': 'no-code'}", Grade(0.0, False, "no-code")),
    ],
)
def test_what_a_function_may_return(pool: GraderPool, result: str, grade: Grade) -> None:
    assert pool.grade([problem()], [f"results{result}"]) == [grade]


def test_numbers_of_numpy_are_numbers(pool: GraderPool) -> None:
    grades = pool.grade([problem(function="numbers")] * 3, ["float32", "bool", "zero"])
    assert [(grade.reward, grade.correct) for grade in grades] == [(0.5, False), (1.0, True), (0.0, False)]


@pytest.mark.parametrize(
    "result",
    [
        *(
            "None",
            "'correct'",
            "2",
            "-0.1",
            "math.nan",
            "math.inf",
            "[1]",
            "{}",
            "{'score': None}",
            "{'reward': 1}",
        ),
        *("{'score': 1, 'correct': 1}", "{'score': 1, 'verdict': ''}", "{'score': 1, 'verdict': 'x' * 99}"),
        *("{'score': 0, 'verdict': 'timeout'}", "{'score': 0, 'verdict': 3}", "object()"),
    ],
)
def test_anything_else_is_a_grader_error(pool: GraderPool, result: str) -> None:
    assert verdicts(pool, [f"results{result}", "right"]) == ["grader-error", "correct"]
    assert "ValueError" in pool.errors["own_grader:judge"]


@pytest.mark.parametrize("text", ["raise", "exit", "die", "crash", "memory", "grow"])
def test_an_error_or_a_death_costs_that_one_answer(text: str) -> None:
    with GraderPool(GradingConfig(workers=1, deadline=20, memory_gb=0.5)) as pool:
        assert verdicts(pool, ["right", text, "right", "left"]) == [
            "correct",
            "grader-error",
            "correct",
            "wrong",
        ]
        assert "\n" not in pool.errors["own_grader:judge"]


def test_a_print_and_an_input_cannot_reach_the_protocol(pool: GraderPool) -> None:
    assert verdicts(pool, ["input", "stdin", "right"]) == ["grader-error", "correct", "correct"]
    assert "EOFError" in pool.errors["own_grader:judge"]


@pytest.mark.parametrize("text", ["sleep", "spin"])
def test_the_deadline_costs_that_one_answer(text: str) -> None:
    with GraderPool(GradingConfig(workers=1, deadline=1)) as pool:
        texts = ["right", text, "right", "left", text, "right"]
        assert verdicts(pool, texts) == ["correct", "timeout", "correct", "wrong", "timeout", "correct"]


def test_the_deadline_is_that_of_one_answer_and_start_up_is_none_of_it(tmp_path: Path) -> None:
    (tmp_path / "slow_grader.py").write_text(
        "import time\ntime.sleep(1.5)\ndef judge(text, answer, extra):\n    time.sleep(0.3)\n    return True\n"
    )
    with GraderPool(GradingConfig(workers=1, deadline=1)) as pool:
        slow = Problem("p", "", "", "t", "slow_grader:judge")
        assert {grade.verdict for grade in pool.grade([slow] * 6, [""] * 6)} == {"correct"}


def test_what_the_function_started_dies_with_it(pool: GraderPool, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    assert verdicts(pool, ["child"], file=str(note)) == ["timeout"]
    assert gone_soon(int(note.read_text()))


@pytest.mark.parametrize(
    "text",
    [
        "x" * 5_000_000,
        "\u202eµ\U0001f600" * 100_000,
        "a\x00b\n\r\u2028\ud800\udfff\\\"'" * 1000,
        "\n" * 100_000,
    ],
    ids=["long", "unicode", "odd", "lines"],
)
def test_any_text_arrives_as_it_is(pool: GraderPool, text: str) -> None:
    grades = pool.grade([problem(text, "echo", text=text)] * 6, [text] * 6)
    assert {grade.verdict for grade in grades} == {"correct"}


def test_workers_stay_from_call_to_call_and_load_no_torch_and_no_main(pool: GraderPool) -> None:
    assert verdicts(pool, ["modules"]) == ["none"]
    [first], [second] = verdicts(pool, ["pid"]), verdicts(pool, ["pid"])
    assert first == second
    os.kill(int(first), signal.SIGKILL)
    while not gone(int(first)):
        time.sleep(0.01)
    assert verdicts(pool, ["right"]) == ["correct"], "a worker that died while idle is no answer's fault"
    assert pool.errors == {}


def test_the_worker_of_mathematics_loads_no_torch() -> None:
    code = (
        "import sys, bandpo_cli.grading.symbolic, bandpo_cli.grading.worker; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_close_leaves_no_worker(pool: GraderPool) -> None:
    pids = set(verdicts(pool, ["pid"] * 20))
    pool.close()
    assert all(gone(int(pid)) for pid in pids)
    pool.close()


def gone(pid: int) -> bool:
    """No such process, or a zombie that only its parent still has to read."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def gone_soon(pid: int) -> bool:
    """Wait for the system to end a process; a busy one takes its time."""
    waited_until = time.monotonic() + 30
    while not gone(pid) and time.monotonic() < waited_until:
        time.sleep(0.02)
    return gone(pid)


PARENT = """
import sys
from bandpo_cli.config.run import GradingConfig
from bandpo_cli.grading import GraderPool
from bandpo_cli.types import Problem
print("imported", flush=True)
pool = GraderPool(GradingConfig(workers=1, deadline=2))
problem = Problem("p", "", "", "t", "own_grader:judge")
[pid] = pool.grade([problem], ["pid"])
print(pid.verdict, flush=True)
if sys.argv[1] == "busy":
    pool.grade([problem], ["spin"])
else:
    import time
    time.sleep(1000 if sys.argv[1] == "idle" else 0)
"""


@pytest.mark.parametrize(
    ("doing", "with_signal"),
    [
        *(("busy", signal.SIGINT), ("idle", signal.SIGINT), ("idle", signal.SIGKILL), ("ending", None)),
        pytest.param(
            "busy", signal.SIGKILL, marks=pytest.mark.slow
        ),  # the worker's own alarm, at 2 * 2 + 10 s
    ],
)
def test_no_worker_outlives_its_parent(
    doing: str, with_signal: signal.Signals | None, tmp_path: Path
) -> None:
    # A script with code at its top level: a worker that imported it again would start workers of its own.
    (tmp_path / "script.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    (tmp_path / "json.py").unlink()
    with subprocess.Popen(
        [sys.executable, "script.py", doing],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
        cwd=tmp_path,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "imported\n"
        worker = int(parent.stdout.readline())
        assert doing == "ending" or not gone(worker)
        if with_signal:
            time.sleep(0.2)  # into the call
            parent.send_signal(with_signal)
        assert "imported" not in parent.stdout.read()
        parent.wait(30)
    assert gone_soon(worker)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "own_grader:juge",
            r"grader 'own_grader:juge': module 'own_grader' has no 'juge' \(did you mean 'judge'\?\)",
        ),
        ("own_grader:no_function", "'no_function' is no function but a int"),
        ("no_such:thing", r"importing 'no_such' failed: ModuleNotFoundError.*searched the current folder"),
        (
            "broken_grader:judge",
            "importing 'broken_grader' failed: ModuleNotFoundError: .*no_such_module_anywhere",
        ),
        ("dying_grader:judge", "its process ended with exit code 7 while it imported"),
        (
            "maths",
            r"none of that name \(did you mean 'math'\?\); known: math, number, countdown, or your own",
        ),
    ],
)
def test_a_grader_that_cannot_be_had_is_a_line(pool: GraderPool, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check_grader(name)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=message):
        pool.grade([Problem("p", "", "", "t", name)], ["x"])


def test_check_grader_accepts_what_can_be_had() -> None:
    for name in ("math", "number", "countdown", "own_grader:judge"):
        check_grader(name)


def test_known_graders_start_no_process_for_plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a worker was wanted")

    monkeypatch.setattr(pool_module, "Team", refuse)
    with GraderPool(GradingConfig()) as pool:
        grades = pool.grade([Problem("p", "", "18", "t", "math")] * 3, ["Answer: 18", "\\boxed{19}", "none"])
    assert [grade.verdict for grade in grades] == ["correct", "wrong", "malformed"]
