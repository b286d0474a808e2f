"""Delay warnings: a batch that takes long says which grader and problem it waits for, at doubling intervals."""

import threading
from pathlib import Path

import pytest

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.grading import pool as pool_module
from bandpo_cli.grading.pool import GraderPool, check_grader
from bandpo_cli.types import CORRECT, Grade, Problem

NOTICE_S = 0.05
WAIT = "import pathlib, time\nwhile not pathlib.Path('release').exists(): time.sleep(0.01)\n"
GRADERS = {
    "slow_import": f"{WAIT}def judge(text, answer, extra): return True\n",
    "slow_grader": f"def judge(text, answer, extra):\n    if text == 'slow': exec({WAIT!r})\n    return True\n",
}


@pytest.fixture(autouse=True)
def _short_interval_and_waiting_graders(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "DELAY_NOTICE_S", NOTICE_S)
    for name, source in GRADERS.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)


def release_after(count: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of all later warnings; the graders wait until it has `count` of them."""
    lines = []

    def warning(message: str, *arguments: object) -> None:
        lines.append(message % arguments)
        if len(lines) == count:
            Path("release").touch()

    monkeypatch.setattr(pool_module.log, "warning", warning)
    Path("release").unlink(missing_ok=True)
    return lines


def problem(id_: str, grader: str = "slow_grader:judge") -> Problem:
    return Problem(id_, "", "5", "t", grader)


@pytest.mark.slow
def test_slow_answer_in_a_worker_is_named_at_doubling_intervals(monkeypatch):
    with GraderPool(GradingConfig(workers=1, deadline=600)) as pool:
        pool.grade([problem("warm")], ["quick"])  # the import is not part of the observed batch
        lines = release_after(4, monkeypatch)
        problems = [problem("number", "number"), problem("set/17"), problem("after")]
        pool.grade(problems, ["Answer: 5", "slow", "quick"])
    waiting = "1 of 3 answers are graded, waiting for grader 'slow_grader:judge' on problem set/17"
    assert [line.rpartition(", for ")[2] for line in lines] == [
        f"{s} s so far" for s in (0.05, 0.1, 0.2, 0.4)
    ]
    # On a busy machine, the first notice may come before the worker has its answer.
    assert all(line.startswith(f"grading: {waiting}, for ") for line in lines[2:])


@pytest.mark.slow
def test_slow_import_is_named(monkeypatch):
    waiting = "waiting for the import of grader 'slow_import:judge', for"
    lines = release_after(4, monkeypatch)
    with GraderPool(GradingConfig(workers=1)) as pool:
        pool.grade([problem("p", "slow_import:judge")], ["quick"])
    assert lines[3] == f"grading: 0 of 1 answers are graded, {waiting} 0.4 s so far"
    lines = release_after(1, monkeypatch)
    check_grader("slow_import:judge")
    assert lines[0] == f"{waiting} 0.05 s so far"


def test_slow_python_code_in_this_process_is_named_in_one_printable_line(monkeypatch):
    lines = release_after(1, monkeypatch)

    def busy(problem: Problem, text: str) -> Grade:
        while text == "slow" and not lines:
            pass
        return CORRECT

    monkeypatch.setattr(pool_module, "load_attribute", lambda path: busy)
    with GraderPool(GradingConfig()) as pool:
        pool.grade([problem("a", "math"), problem("b\n\x1b" + "c" * 500, "math")], ["quick", "slow"])
    assert lines[0].startswith("grading: 1 of 2 answers are graded, waiting for grader 'math' on problem b")
    assert lines[0].isprintable()
    assert len(lines[0]) < 300


def test_quick_batches_give_no_warning_and_leave_no_thread(monkeypatch, caplog):
    monkeypatch.setattr(pool_module, "DELAY_NOTICE_S", 600)
    threads = threading.active_count()
    with GraderPool(GradingConfig()) as pool:
        for _ in range(20):
            pool.grade([problem("p", "number")] * 50, ["Answer: 5"] * 50)
    assert not caplog.messages
    assert threading.active_count() == threads
