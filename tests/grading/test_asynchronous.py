"""Asynchronous reward functions: calls in flight, retries, deadlines, failures, and the judge of examples/."""

import threading
import time
from pathlib import Path

import pytest

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.errors import ConfigError
from bandpo_cli.grading import workers
from bandpo_cli.grading.pool import FAILURE_ADVICE, GraderPool, check_grader, failure_warnings
from bandpo_cli.types import Grade, Problem
from examples import judge as example
from tests.judge_server import JudgeServer, Reply

REWARDS = """
import asyncio, os, time
from bandpo_cli.grading import calls_and_retries

calls_and_retries.BACKOFF_S = 0.01
events, calls, running = {}, {}, set()

async def judge(text, answer, extra):
    kind, _, argument = text.partition(" ")
    calls[text] = calls.get(text, 0) + 1
    if kind == "together":  # ends when so many calls are in flight, so that fewer calls end at the deadline
        running.add(extra["number"])
        while len(running) < int(argument): await asyncio.sleep(0)
        return {"score": 0, "verdict": f"number-{extra['number']}"}
    if kind == "count":
        running.add(extra["number"])
        await asyncio.sleep(0.01)
        running_now = len(running)
        running.remove(extra["number"])
        return {"score": 0, "verdict": str(running_now)}
    if kind == "fail" and calls[text] <= int(argument): raise OSError(f"call {calls[text]}")
    if kind == "wait": await events.setdefault(argument, asyncio.Event()).wait()
    if kind == "release": events.setdefault(argument, asyncio.Event()).set()
    if kind == "return": return eval(argument)
    if kind == "block": time.sleep(1000)
    if kind == "exit": raise SystemExit(3)
    if kind == "die": os._exit(3)
    if kind == "stubborn":
        try: await asyncio.sleep(1000)
        except asyncio.CancelledError: return True
    if kind == "thread": await asyncio.to_thread(lambda: None)
    return {"score": 1, "verdict": f"call-{calls[text]}"}

class Callable:
    async def __call__(self, solution_strs, ground_truths): return [judged == "x" for judged in solution_strs]
callable_ = Callable()
async def trl(completions, level, **columns): return [await nested(turns[0]["content"]) for turns in completions]
async def nested(text): return None if text == "none" else float(len(text))
"""


@pytest.fixture(autouse=True)
def _rewards(tmp_path, monkeypatch):
    (tmp_path / "async_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)


def problem(function: str = "async_rewards:judge", **extra: object) -> Problem:
    return Problem("p", "", "2", "test", function, extra)


def grade(pool: GraderPool, texts: list[str], **extra: object) -> list[Grade]:
    return pool.grade([problem(number=number, **extra) for number in range(len(texts))], texts)


def verdicts(pool: GraderPool, texts: list[str]) -> list[str]:
    return [grade.verdict for grade in grade(pool, texts)]


def test_as_many_calls_as_configured_are_in_flight_in_one_process():
    with GraderPool(GradingConfig(concurrency=64, deadline=60)) as pool:
        assert verdicts(pool, ["together 64"] * 64) == [f"number-{number}" for number in range(64)]
        assert [len(item._workers) for item in pool._worker_pools.values()] == [1]
    with GraderPool(GradingConfig(concurrency=3, deadline=60)) as pool:
        assert set(verdicts(pool, ["count"] * 12)) <= {"1", "2", "3"}
        assert verdicts(pool, ["together 3"] * 3) == ["number-0", "number-1", "number-2"]


@pytest.mark.slow
def test_an_exception_is_retried_and_only_the_answer_of_the_last_one_fails(caplog):
    """Also for a value that is no grade, and for sys.exit, which is not retried."""
    failing = ["fail 3", "return 'x'", "return float('nan')", "return None", "exit"]
    texts = ["right", "fail 2", *failing, "thread"]
    with GraderPool(GradingConfig(retries=2, deadline=60)) as pool:
        grades = grade(pool, texts)
        uses = pool.uses
    expected = ["call-1", "call-3", *["grader-error"] * 5, "call-1"]
    assert [item.verdict for item in grades] == expected
    assert [item.has_reward for item in grades] == [item.startswith("call") for item in expected]
    (line,) = failure_warnings([uses])
    assert line.startswith("grader 'async_rewards:judge' failed on 5 of 8 answers (62.5%), which have no rew")
    assert caplog.messages == [f"{line}; {FAILURE_ADVICE}"]


@pytest.mark.slow
def test_a_call_ends_at_its_deadline_and_counts_as_failed(caplog):
    with GraderPool(GradingConfig(deadline=2, retries=9)) as pool:
        # The waits before retries 1, 2, ... of the last one are 0.01, 0.02, ... s: they pass the deadline.
        found = verdicts(pool, ["wait", "stubborn", "right", "fail 99"])
        assert found == ["timeout", "timeout", "call-1", "grader-error"]
        (use,) = pool.uses.values()
        (line,) = failure_warnings([pool.uses])
    assert (use.graded, use.failed) == (4, 3)
    assert caplog.messages == [f"{line}; {FAILURE_ADVICE}"]
    assert "OSError: call " in str(use.error)
    with GraderPool(GradingConfig(deadline=0.1, timeout_reward="wrong")) as pool:
        assert [(item.reward, item.has_reward) for item in grade(pool, ["wait"])] == [(0.0, True)]
        assert not failure_warnings([pool.uses])


@pytest.mark.slow
def test_signatures_with_lists_are_awaited_and_several_calls_are_in_flight():
    with GraderPool(GradingConfig(batch=1, deadline=60)) as pool:
        texts = ["four", "none", "x"]
        grades = pool.grade([problem("trl:async_rewards:trl", level=1)] * 3, texts)
        assert [item.reward if item.has_reward else None for item in grades] == [4.0, None, 1.0]
        rewards = pool.grade([problem("verl:async_rewards:callable_")] * 3, texts)
        assert [item.reward for item in rewards] == [0.0, 0.0, 1.0]
        used = {name for name, use in pool.uses.items() if use.asynchronous}
        assert used == {"trl:async_rewards:trl", "verl:async_rewards:callable_"}


def test_answers_that_are_submitted_later_are_graded_while_a_call_waits():
    """As while sampling: the call of the first group ends only after the one of the second group has run."""
    with GraderPool(GradingConfig(deadline=600)) as pool:
        waits = [pool.begin([problem()], [text]) for text in ("wait a", "wait b")]
        done = []
        thread = threading.Thread(target=lambda: done.extend(waits[0]()))
        thread.start()
        last = pool.begin([problem()] * 2, ["release b", "release a"])
        thread.join(60)
        assert [item.verdict for item in [*done, *waits[1](), *last()]] == ["call-1"] * 4


@pytest.mark.slow
def test_a_blocked_loop_or_an_exit_fails_the_calls_in_flight_and_no_other(monkeypatch):
    monkeypatch.setattr(workers, "LOOP_MARGIN_S", 0.5)
    with GraderPool(GradingConfig(concurrency=2, deadline=0.5)) as pool:
        assert verdicts(pool, ["block", "wait", "right"]) == ["timeout", "timeout", "call-1"]
        assert verdicts(pool, ["wait", "die", "right", "x"]) == ["grader-error"] * 2 + ["call-1"] * 2
        assert "ended with exit code 3" in pool.uses["async_rewards:judge"].error


@pytest.mark.slow
def test_the_example_grades_and_a_judge_that_fails_gives_no_reward(monkeypatch):
    """The table has the server's first reply to an answer, and all later ones."""
    table = {
        "good": ["**Verdict:** 5."], "half": ["Not verdict: 5, but\nVerdict: 3/5"], "flaky": [503, "Verdict: 0"],
        "fail": [500], "drop": [None], "nonsense": ["pineapple"], "too high": ["Verdict: 9"], "slow": ["Verdict: 5"],
        "{answer} \\1": ["Verdict: 4"],
    }  # fmt: skip
    closing = threading.Event()

    def reply(text: str) -> Reply:
        if text == "hang":
            closing.wait()
        time.sleep(0.3 * (text == "slow"))
        values = table.get(text, [500])
        return values.pop(0) if len(values) > 1 else values[0]

    expected = {
        "good": ("judge-5", 1.0), "half": ("judge-3", 0.6), "flaky": ("judge-0", 0.0), "slow": ("judge-5", 1.0),
        "{answer} \\1": ("judge-4", 0.8),
    }  # fmt: skip
    expected |= dict.fromkeys(["fail", "drop", "nonsense", "too high"], ("grader-error", None))
    texts = [*expected, "hang"]
    with JudgeServer(reply) as server, GraderPool(GradingConfig(deadline=3, retries=1)) as pool:
        monkeypatch.setenv("JUDGE_URL", server.url)
        grades = pool.grade([problem("examples.judge:judge", question="1+1?")] * len(texts), texts)
        (use,) = pool.uses.values()
        closing.set()
    values = [(item.verdict, item.reward if item.has_reward else None) for item in grades]
    assert dict(zip(texts, values, strict=True)) == expected | {"hang": ("timeout", None)}
    # A client may repeat a request whose connection was closed.
    expected_calls = {"good": 1, "flaky": 2, "fail": 2, "nonsense": 2, "hang": 1}
    assert {text: server.calls[text] for text in expected_calls} == expected_calls
    assert (use.graded, use.failed) == (10, 5)


def test_verdicts_of_the_example():
    for reply in ("", "5", "Verdict: 10", "Verdict: 3.5", "verdict five"):
        with pytest.raises(ValueError, match="no verdict"):
            example.parse_verdict(reply)
    assert len(Path(example.__file__).read_text().splitlines()) < 80


BROKEN = """import asyncio
async def refused(text, answer, extra): raise OSError(f'no {answer}')
async def late(text, answer, extra): await asyncio.sleep(99)
def quick(text, answer, extra): return None
"""


@pytest.mark.slow
def test_a_trial_call_fails_in_one_line_that_says_what_to_do():
    (problem_,), config = [problem()], GradingConfig(retries=1, deadline=0.3)
    check_grader(problem_.grader, [problem_], config)
    Path("broken_judge.py").write_text(BROKEN)
    refused = r"OSError: no 2 \(broken_judge.py:2, in refused\)"
    for function, cause in (("refused", refused), ("late", "no result within 0.3 s .*")):
        name = f"broken_judge:{function}"
        with pytest.raises(ConfigError, match=f"'{name}' failed in a trial call: {cause}; start the server"):
            check_grader(name, [problem(name)], config)
        check_grader(name, [problem(name)])
    check_grader("broken_judge:quick", [problem("broken_judge:quick")], config)
