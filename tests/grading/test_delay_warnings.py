"""Delay warnings: a batch that takes long says which grader and problem it waits for, at doubling intervals."""

import threading
import time
from pathlib import Path

import pytest

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.grading import pool as pool_module
from bandpo_cli.grading.pool import GraderPool, check_grader
from bandpo_cli.types import CORRECT, Grade, Problem

NOTICE_S = 0.1
SLOW_GRADER = "import time\ndef judge(text, answer, extra):\n    time.sleep(float(text))\n    return True\n"


@pytest.fixture(autouse=True)
def _short_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "DELAY_NOTICE_S", NOTICE_S)
    (tmp_path / "slow_grader.py").write_text(SLOW_GRADER)
    (tmp_path / "slow_import.py").write_text(f"import time\ntime.sleep({4 * NOTICE_S})\n{SLOW_GRADER}")
    monkeypatch.chdir(tmp_path)


def problem(id_: str, grader: str = "slow_grader:judge") -> Problem:
    return Problem(id_, "", "5", "t", grader)


@pytest.mark.slow
def test_slow_answer_in_a_worker_is_named_at_doubling_intervals(caplog: pytest.LogCaptureFixture) -> None:
    with GraderPool(GradingConfig(workers=1, deadline=60)) as pool:
        pool.grade([problem("warm")], ["0"])  # the import is not part of the measured batch
        caplog.clear()
        problems = [problem("number", "number"), problem("set/17"), problem("after")]
        pool.grade(problems, ["Answer: 5", str(8 * NOTICE_S), "0"])
        lines = list(caplog.messages)
        time.sleep(2 * NOTICE_S)
    expected = [
        "grading: 1 of 3 answers are graded, waiting for grader 'slow_grader:judge' on problem set/17, "
        f"for {seconds:g} s so far"
        for seconds in (NOTICE_S, 2 * NOTICE_S, 4 * NOTICE_S, 8 * NOTICE_S)
    ]
    assert lines == expected[: len(lines)]
    assert len(lines) >= 2
    assert caplog.messages == lines, "a warning came after the end of the batch"


@pytest.mark.slow
def test_slow_import_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with GraderPool(GradingConfig(workers=1)) as pool:
        pool.grade([problem("p", "slow_import:judge")], ["0"])
    waiting = f"waiting for the import of grader 'slow_import:judge', for {NOTICE_S:g} s so far"
    assert caplog.messages[0] == f"grading: 0 of 1 answers are graded, {waiting}"
    caplog.clear()
    check_grader("slow_import:judge")
    assert caplog.messages[0] == waiting


@pytest.mark.slow
def test_slow_python_code_in_this_process_is_named_in_one_printable_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(problem: Problem, text: str) -> Grade:
        end = time.monotonic() + (4 * NOTICE_S if text == "slow" else 0)
        while time.monotonic() < end:
            pass
        return CORRECT

    monkeypatch.setattr(pool_module, "_first_stage", busy)
    with GraderPool(GradingConfig()) as pool:
        pool.grade([problem("a", "math"), problem("b\n\x1b" + "c" * 500, "math")], ["quick", "slow"])
    message = caplog.messages[0]
    assert message.startswith("grading: 1 of 2 answers are graded, waiting for grader 'math' on problem b")
    assert message.isprintable()
    assert len(message) < 300


def test_quick_batches_give_no_warning_and_leave_no_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_module, "DELAY_NOTICE_S", 10)
    threads = threading.active_count()
    with GraderPool(GradingConfig()) as pool:
        for _ in range(20):
            pool.grade([problem("p", "number")] * 50, ["Answer: 5"] * 50)
    assert not caplog.messages
    assert threading.active_count() == threads
