"""Tools and environments of conversations, in worker processes.

A tool is a function with type hints and a docstring, from which transformers makes the schema that the model reads. An
environment is a class with these methods; it must be deterministic for a problem:

    reset(problem) -> messages           the first messages; `problem` has question, answer, seed and the row's columns
    step(message) -> messages or None    the answer to the assistant's message; None ends the conversation
    reward                               a number, or a method that returns one, read at the end

Messages are texts of the user, or dictionaries with `role` and `content`, in a list unless there is only one. All steps
of a conversation go to one worker, which keeps its environment. If this worker ends, another one repeats the steps of
the conversation from its start, each within the deadline.

An environment that is written for TRL has tools and no `step`; see `TrlEnvironment`.

A result is a dictionary: `content` and `failed` of a tool call; `messages`, `reward` and `failed` of an environment.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bandpo_cli.custom_code import load_function
from bandpo_cli.errors import ConfigError, definition_location, first_line, user_code_location
from bandpo_cli.grading.calls_and_retries import Loader
from bandpo_cli.grading.signatures import BatchGrader, finite, run_awaitable
from bandpo_cli.grading.workers import Job, WorkerPool
from bandpo_cli.types import Message, Problem, derive_seed, messages_of

if TYPE_CHECKING:
    from bandpo_cli.config.batch_and_sampling import GradingConfig

KEPT_ENVIRONMENTS = 4096  # Environments that a worker keeps; those that were used last


class ToolPool(WorkerPool):
    """Workers that call tools: the arguments of a call are the name of a tool and its arguments."""

    title, load = "task.tools", "load_tools"

    def __init__(self, tools: Sequence[str], config: GradingConfig, load: str | None = None) -> None:
        self.tools = tuple(tools)
        loader = Loader(f"{__name__}:{load or self.load}", self.tools)
        super().__init__(self.title, loader, config)

    def _result(self, fields: Any) -> Any:
        return fields

    def _failed(self, error: str) -> Any:
        return {"content": f"Error: {error}", "failed": True}

    def _late(self) -> Any:
        return {**self._failed(f"no result within {self._config.deadline:g} s"), "timed_out": True}


class EnvironmentPool(ToolPool):
    """Workers that run environments: the arguments are key, problem, messages of the assistant, and whether to end.

    A conversation begins in the worker that has the fewest, and stays there. Without a key, no environment is kept.
    """

    title, load = "task.environment", "load_environment"

    def _route(self) -> None:
        stateless: list[Job] = []
        for job in self._pending:
            if (key := self._answers[job[0]][0][0]) is None:
                stateless.append(job)
                continue
            fewest = min(self._workers, key=lambda worker: len(worker.conversations))
            worker = next((worker for worker in self._workers if key in worker.conversations), fewest)
            worker.conversations.add(key)
            worker.queue.append(job)
        self._pending = deque(stateless)

    def _store(self, job: Job, results: Sequence[Any]) -> None:
        super()._store(job, results)
        for answer, result in zip(job, results, strict=True):
            if result["messages"] is None:  # the conversation has ended
                for worker in self._workers:
                    worker.conversations.discard(self._answers[answer][0][0])

    def _failed(self, error: str) -> Any:
        return {"messages": None, "reward": error, "is_over": False, "failed": True}


def first_messages(
    environment: str, config: GradingConfig, problems: Sequence[Problem], grader: str
) -> list[Problem]:
    """Return the problems with `grader`, and as prompts the first messages of the environment.

    The system message of a problem stays before them; raise ConfigError if the environment has one too.
    """
    with closing(EnvironmentPool([environment], config)) as pool:
        requests: list[list[Any]] = [[None, as_problem(problem), [], False] for problem in problems]
        batches = [[index] for index in range(len(problems))]
        replies = pool.wait(pool.submit(requests, [problem.id for problem in problems], batches))
        if pool.failure is not None:
            raise ConfigError(f"task.environment = '{environment}': {pool.failure.error}")
    prompted, error = [], f"task.environment = '{environment}': reset returned"
    for problem, reply in zip(problems, replies, strict=True):
        if not reply["messages"]:
            raise ConfigError(f"{error} no messages for problem {problem.id}")
        prompt = tuple(Message(item["role"], item["content"]) for item in reply["messages"])
        if isinstance(first := problem.prompt[0], Message) and first.role == "system":
            if prompt[0].role == "system":
                one = f"a system message for problem {problem.id}, which has one (task.system, or its chat messages)"
                raise ConfigError(f"{error} {one}; leave out one of them")
            prompt = (first, *prompt)
        prompted.append(replace(problem, prompt=prompt, grader=grader, extra=as_problem(problem)))
    return prompted


@functools.cache
def tool_schemas(tools: tuple[str, ...], of_environment: bool) -> list[dict[str, Any]]:
    """Return the schemas of tools or of an environment, which a worker makes; raise ConfigError if that fails."""
    from bandpo_cli.config.batch_and_sampling import GradingConfig

    pool_type = EnvironmentPool if of_environment else ToolPool
    with closing(pool_type(tools, GradingConfig(), f"{pool_type.load}_schemas")) as pool:
        pool.start()
        return list(pool.about)


def load_tools_schemas(paths: Sequence[str]) -> BatchGrader:
    """Return the tools with their schemas as `about`; raise ValueError if one of them cannot be used."""
    return load_tools(paths)._replace(about=_schemas(_functions(paths)))


def load_environment_schemas(paths: Sequence[str]) -> BatchGrader:
    """Return an environment with the schemas of its tools as `about`; errors as in `load_environment`."""
    return load_environment(paths)._replace(about=_schemas(trl_tools(load_function(paths[0])())))


def _schemas(functions: Mapping[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the schemas of functions; raise ValueError if transformers cannot make one of them."""
    schemas = []
    for name, function in functions.items():
        from transformers.utils.chat_template_utils import get_json_schema  # takes seconds

        try:
            schemas.append(get_json_schema(function))
        except Exception as error:  # noqa: BLE001 - of several types
            raise ValueError(
                f"'{name}' needs type hints and a docstring with its arguments: {first_line(error)}"
                f"{definition_location(function)}"
            ) from None
    return schemas


def load_tools(paths: Sequence[str]) -> BatchGrader:
    """Import tools, without the seconds that the import of transformers takes; raise ValueError where that fails.

    Synchronous tools among asynchronous ones run in threads.
    """
    functions = _functions(paths)
    asynchronous = any(map(inspect.iscoroutinefunction, functions.values()))

    async def answer(calls: Sequence[Any]) -> list[Any]:
        return [await call_tool(functions, name, arguments, asynchronous) for name, arguments in calls]

    return BatchGrader(answer, asynchronous=asynchronous)


def _functions(paths: Sequence[str]) -> dict[str, Callable[..., Any]]:
    functions: dict[str, Callable[..., Any]] = {}
    for path in paths:
        function = load_function(path)
        if isinstance(function, type):
            raise ValueError(
                f"'{path}' is a class; a tool is a function, and a class goes into task.environment"
            )
        if functions.setdefault(function.__name__, function) is not function:
            raise ValueError(f"two tools have the name '{function.__name__}'")
    return functions


async def call_tool(
    functions: Mapping[str, Callable[..., Any]], name: str | None, arguments: Any, in_threads: bool = False
) -> dict[str, Any]:
    """Return the result of a call: `content` as a text, and whether it `failed`.

    The name of a call that was not readable is None, and its arguments are the error.
    """
    if name is None or name not in functions:
        error = arguments if name is None else f"no tool '{name}'; there are {', '.join(functions)}"
        return {"content": f"Error: {error}", "failed": True}
    function = functions[name]
    try:
        if in_threads and not inspect.iscoroutinefunction(function):
            import asyncio  # not at module level: most workers need none

            result = await asyncio.to_thread(function, **arguments)
        else:
            result = function(**arguments)
            result = await result if inspect.isawaitable(result) else result
    except MemoryError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit) as error:  # noqa: BLE001 - the model reads it
        return {"content": f"Error: {type(error).__name__}: {first_line(error)}", "failed": True}
    text = result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
    return {"content": text, "failed": False}


def trl_tools(environment: Any) -> dict[str, Callable[..., Any]]:
    """Return the tools of an environment of TRL: its public methods, if it has no `step`."""
    if hasattr(environment, "step"):
        return {}
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    own = (name for name in names if not name.startswith("_") and name not in ("reset", "get_reward"))
    return {name: getattr(environment, name) for name in own}


class TrlEnvironment:
    """An environment written for TRL's `environment_factory` (1.16), whose public methods are tools.

    `reset(**columns)` returns None or a text that follows the question; `get_reward()` returns the reward.
    """

    def __init__(self, environment: Any) -> None:
        self._environment, self._tools = environment, trl_tools(environment)
        self.reward = environment.get_reward

    def reset(self, problem: dict[str, Any]) -> list[str]:
        """Return the question and what the environment adds to it."""
        return [f"{problem['question']}{self._environment.reset(**problem) or ''}"]

    def step(self, message: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """Return the results of the message's calls; None if it has none, which ends the conversation."""
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return [
            {
                "role": "tool",
                "name": str(call["name"]),
                **run_awaitable(call_tool(self._tools, call["name"], call["arguments"])),
            }
            for call in calls
        ] or None


def load_environment(paths: Sequence[str]) -> BatchGrader:
    """Import an environment, of a single path; raise ValueError if it cannot be used."""
    import asyncio

    (path,) = paths
    function = load_function(path)

    def create() -> Any:
        try:
            environment = function()
        except BaseException as error:  # noqa: BLE001 - the user's code
            raise ValueError(
                f"'{path}' cannot be created: {type(error).__name__}: {first_line(error)}{user_code_location(error)}"
            ) from None
        needed = ("reset", "get_reward" if trl_tools(environment) else "step")
        if missing := [name for name in needed if not callable(getattr(environment, name, None))]:
            raise ValueError(
                f"'{path}' has no method {' and no '.join(missing)}{definition_location(function)}"
            )
        return TrlEnvironment(environment) if trl_tools(environment) else environment

    create()
    kept: OrderedDict[int | None, tuple[Any, int]] = OrderedDict()

    async def reply(key: int | None, problem: dict[str, Any], turns: Sequence[Any], is_end: bool) -> Any:
        environment, done = kept.pop(key, (None, 0))
        messages: Any = ()
        if environment is None or done > len(turns):
            environment, done = create(), 0
            messages = environment.reset(dict(problem))
            await asyncio.sleep(0)  # the deadline starts again, as after each step
        for turn in turns[done:]:
            if messages is None:
                raise ValueError(
                    "an environment that is not deterministic: it ended earlier when it was repeated"
                )
            messages = environment.step(turn)
            await asyncio.sleep(0)
        if messages is None or is_end:
            reward = environment.reward
            value = reward() if callable(reward) else reward
            value = run_awaitable(value) if inspect.isawaitable(value) else value
            value = finite(value, "a finite number as its reward")
            return {"messages": None, "reward": value, "is_over": messages is None, "failed": False}
        if key is not None:
            kept[key] = environment, len(turns)
        if len(kept) > KEPT_ENVIRONMENTS:
            kept.popitem(last=False)
        messages = as_messages(messages)
        failed = sum(bool(message.pop("failed", False)) for message in messages)
        return {"messages": messages, "reward": None, "failed": failed}

    async def answer(requests: Sequence[Any]) -> list[Any]:
        return [await reply(*request) for request in requests]

    return BatchGrader(answer, location=definition_location(function), has_steps=True)


def as_problem(problem: Problem) -> dict[str, Any]:
    """Return what `reset` of an environment receives for a problem; afterwards this is its `extra`."""
    about = {
        "question": messages_of(problem.prompt)[-1].content,
        "answer": problem.answer,
        "seed": derive_seed(0, problem.id),
    }
    return {**problem.extra, **about}


def as_messages(result: Any) -> list[dict[str, Any]]:
    """Return what `reset` or `step` has returned as messages; raise ValueError unless there is at least one."""
    result = [result] if isinstance(result, (str, Mapping)) else result
    if not isinstance(result, (list, tuple)) or not result:
        raise ValueError(f"an environment must return messages, or None from step to end, not {result!r:.60}")
    messages = []
    for item in result:
        message = {"role": "user", "content": item} if isinstance(item, str) else item
        texts = map(message.get, ("role", "content")) if isinstance(message, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"an environment must return texts or messages with role and content, not {item!r:.60}"
            )
        messages.append(dict(message))
    return messages
