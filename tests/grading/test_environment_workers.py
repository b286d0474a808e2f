"""Workers of tools and environments: which worker continues a conversation, deaths, deadlines, and a closed pool."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.errors import ConfigError, RunError
from bandpo_cli.grading.tools import EnvironmentPool, ToolPool, first_messages
from bandpo_cli.types import Message, Problem

CODE = '''
import os, time

def pid() -> int:
    """Return the process id."""
    return os.getpid()

class Steps:
    """Notes each step in a file; a message is the time that the step takes, or what it returns."""
    reward = 0.5
    def reset(self, problem):
        self.name, self.count = problem["question"], 0
        time.sleep(problem.get("reset", 0))
        return "go"
    def step(self, message):
        with open("steps.txt", "a") as file:
            file.write(f"{self.name} {self.count} {os.getpid()}\\\\n")
        self.count += 1
        time.sleep(float(message["content"]))
        return f"{self.count}"

class Returns:
    """Returns what the message says, or has the reward that it says."""
    reward = 0.0
    def reset(self, problem): return {"role": problem.get("role", "user"), "content": problem["question"]}
    def step(self, message):
        if message["content"].startswith("reward"):
            self.reward = eval(message["content"][7:])
            return None
        return eval(message["content"])
'''.replace("\\\\", "\\")


@pytest.fixture(autouse=True)
def _code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("worker_turns.py").write_text(CODE)


def environments(name: str = "Steps", size: int = 1, deadline: float = 20.0) -> EnvironmentPool:
    return EnvironmentPool([f"worker_turns:{name}"], GradingConfig(deadline=deadline, workers=size))


def results(pool: ToolPool, calls: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the results of calls, as conversations get them."""
    keys = pool.submit(calls, ["p"] * len(calls), [[index] for index in range(len(calls))])
    replies = {}
    while len(replies) < len(calls):
        replies |= pool.poll(0.1)
    return [replies[key] for key in keys]


def kill(pool: ToolPool, count: int = 1) -> None:
    """Kill some of the workers, which are idle, and wait until they have ended."""
    for worker in pool._workers[:count]:
        os.kill(worker.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)


def step(number: int, turns: Sequence[str], is_end: bool = False, **columns: Any) -> list[Any]:
    return [number, {"question": f"c{number}", **columns}, [{"content": turn} for turn in turns], is_end]


def executed() -> Iterator[tuple[str, int, int]]:
    """Return conversation, number and process id of each step that was executed."""
    for line in Path("steps.txt").read_text().splitlines():
        name, count, process = line.split()
        yield name, int(count), int(process)


@pytest.mark.slow
def test_each_step_is_executed_once_by_the_worker_of_its_conversation():
    with closing(environments(size=4)) as pool:
        for turn in range(1, 7):
            calls = [step(number, ["0.001"] * turn, is_end=turn == 6) for number in range(32)]
            assert [reply["failed"] for reply in results(pool, calls)] == [False] * 32
        assert not any(worker.conversations for worker in pool._workers), "all conversations have ended"
    steps = [*executed()]
    assert len(steps) == len({(name, count) for name, count, _ in steps}) == 32 * 6
    workers = {name: {pid for other, _, pid in steps if other == name} for name, _, _ in steps}
    assert {len(pids) for pids in workers.values()} == {1}
    shares = [sum(pids == {pid} for pids in workers.values()) for pid in set.union(*workers.values())]
    assert shares == [8] * 4


@pytest.mark.slow
def test_after_a_death_another_worker_repeats_the_steps_each_within_the_deadline():
    """Six steps and the reset of 0.5 s exceed the deadline of 2 s together."""
    turns = ["0.5"] * 6
    with closing(environments(deadline=2.0)) as pool:
        for turn in range(1, 7):
            (reply,) = results(pool, [step(0, turns[:turn], reset=0.5)])
            assert reply["messages"] == [{"role": "user", "content": f"{turn}"}]
        kill(pool)
        (reply,) = results(pool, [step(0, [*turns, "0"], reset=0.5)])
    assert reply["messages"] == [{"role": "user", "content": "7"}]
    assert [count for _, count, _ in executed()] == [*range(6), *range(7)]


@pytest.mark.slow
def test_a_step_that_exceeds_the_deadline_ends_its_conversation_alone():
    """The others of its worker continue with another one, though their steps take longer than the deadline together."""
    with closing(environments(deadline=1.0)) as pool:
        results(pool, [step(number, ["0.4", "0.4"]) for number in range(2)])
        late, other = results(pool, [step(0, ["0.4", "0.4", "60"]), step(1, ["0.4", "0.4", "0.4"])])
    assert (late["reward"], late["timed_out"]) == ("no result within 1 s", True)
    assert other["messages"] == [{"role": "user", "content": "3"}]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("killed", [2, 1])
def test_the_death_of_an_idle_worker_affects_no_call(killed):
    with closing(ToolPool(["worker_turns:pid"], GradingConfig(workers=2))) as pool:
        while not pool._workers or not all(worker.ready for worker in pool._workers):
            pool.poll(0.1)
        kill(pool, killed)
        replies = results(pool, [["pid", {}]] * 8)
    assert [reply["failed"] for reply in replies] == [False] * 8


def test_a_closed_pool_ends_the_thread_that_polls_and_starts_no_worker():
    pool = environments()
    pool.submit([step(0, ["60"])], ["p"], [[0]])

    def poll() -> None:
        while True:
            pool.poll(0.1)

    with ThreadPoolExecutor(1) as threads:
        polling = threads.submit(poll).result
        while not (workers := [*pool._workers]) or not workers[0].jobs:
            time.sleep(0.01)
        pool.close()
        message = "task.environment: its worker processes were terminated because the command ends"
        wait = lambda: pool.wait([0], lambda graded, label: None)  # noqa: E731
        for use in (polling, pool.start, lambda: pool.poll(0), wait):
            with pytest.raises(RunError, match=message):
                use()
    assert pool._workers == []
    assert [worker.code for worker in workers] == [-signal.SIGKILL]


def test_a_reward_that_is_no_finite_number_is_a_failure():
    values = ["float('nan')", "-float('inf')", "None", "'1'", "lambda: float('nan')", "3"]
    with closing(environments("Returns")) as pool:
        *bad, good = results(pool, [step(i, [f"reward {value}"]) for i, value in enumerate(values)])
    for reply in bad:
        assert reply["failed"]
        assert reply["reward"].startswith("ValueError: it must return a finite number as its reward, not")
    assert good["reward"] == 3.0


def test_what_a_step_returns_is_checked():
    one = {"role": "user", "content": "1="}
    good = {repr(one): [one], repr((one, "2")): [one, {"role": "user", "content": "2"}], repr("1="): [one]}
    bad = ["5", "[]", "b'text'", "{'text': '1='}", "['a', 5]", "{'role': 5, 'content': ''}", "{'a', 'b'}"]
    unsendable = [f"{{**{one}, (1, 2): 3}}", f"{{**{one}, 'data': object()}}"]
    turns = [*good, *bad, *unsendable]
    with closing(environments("Returns")) as pool:
        replies = results(pool, [step(number, [turn]) for number, turn in enumerate(turns)])
        assert [reply["messages"] for reply in replies] == [*good.values(), *[None] * 9]
        assert "ValueError: an environment must return messages, or None" in replies[3]["reward"]
        assert all("worker process" not in reply["reward"] for reply in replies[3:])
        assert len({worker.pid for worker in pool._workers}) == 1


@pytest.mark.slow
def test_the_system_message_of_a_problem_stays_before_the_first_messages():
    user, system = Message("user", "q?"), Message("system", "Be brief.")
    plain, framed = (Problem("p", prompt, "1", "data", "math") for prompt in ((user,), (system, user)))
    pool = partial(first_messages, "worker_turns:Returns", GradingConfig(workers=1))
    assert [problem.prompt for problem in pool([plain, framed], "number")] == [(user,), (system, user)]
    with pytest.raises(ConfigError, match=r"reset returned a system message for problem p, which has one \("):
        pool([replace(framed, extra={"role": "system"})], "number")
