"""Tools and environments of conversations, in worker processes.

A tool is a function with type hints and a docstring, from which transformers makes the schema that the model reads. An
environment is a class with these methods; it must be deterministic for a problem:

    reset(problem) -> messages           the first messages; `problem` has question, answer, seed and the row's columns
    step(message) -> messages or None    the answer to the assistant's message; None ends the conversation
    reward                               a number, or a method that returns one, read at the end

Messages are texts of the user, or dictionaries with `role` and `content`. A worker keeps the environments of the
conversations that it has answered; another worker repeats the steps of a conversation from its start. So a worker
may end at any time.

A result is a dictionary: `content` and `failed` of a tool call; `messages`, `reward` and `failed` of an environment.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bandpo_cli.custom_code import load_function
from bandpo_cli.errors import ConfigError, definition_location, first_line, user_code_location
from bandpo_cli.grading.signatures import BatchGrader
from bandpo_cli.grading.workers import Loader, WorkerPool, default_workers
from bandpo_cli.seeds import derive_seed
from bandpo_cli.types import Message, Problem

if TYPE_CHECKING:
    from bandpo_cli.config.run import GradingConfig

KEPT_ENVIRONMENTS = 4096
"""Environments that a worker keeps; those that were used last."""


class ToolPool(WorkerPool):
    """Workers that call tools: the arguments of a call are the name of a tool and its arguments."""

    def __init__(
        self, tools: Sequence[str], config: GradingConfig, size: int, calls: int, load: str = "load_tools"
    ) -> None:
        self.tools, self._load = tuple(tools), load
        super().__init__("", config, size, calls)
        self._title = "task.tools"

    def _find(self, grader: str) -> Loader:
        return Loader(f"{__name__}:{self._load}", self.tools)

    def _result(self, fields: Any) -> Any:
        return fields

    def _failed(self, error: str) -> Any:
        return {"content": f"Error: {error}", "failed": True}

    def _late(self) -> Any:
        return self._failed(f"no result within {self._config.deadline:g} s")


class EnvironmentPool(ToolPool):
    """Workers that run environments: the arguments are key, problem, texts of the assistant, and whether to end."""

    def __init__(self, environment: str, config: GradingConfig, size: int, calls: int) -> None:
        super().__init__([environment], config, size, calls, "load_environment")
        self._title = "task.environment"

    def _failed(self, error: str) -> Any:
        return {"messages": None, "reward": error, "is_over": False, "failed": True}


def first_messages(
    environment: str, config: GradingConfig, problems: Sequence[Problem], grader: str | None
) -> list[Problem]:
    """Return the problems with the first messages of the environment as prompts, and `grader` unless it is None.

    Raises:
        ConfigError: the environment cannot be used.
    """
    with closing(EnvironmentPool(environment, config, default_workers(), 1)) as pool:
        requests = [[index, as_problem(problem), [], False] for index, problem in enumerate(problems)]
        keys = pool.submit(
            requests, [problem.id for problem in problems], [[i] for i in range(len(problems))]
        )
        replies = pool.wait(keys, lambda graded, label: None)
        if pool.failure is not None:
            raise ConfigError(f"task.environment = '{environment}': {pool.failure.error}")
    prompted = []
    for problem, reply in zip(problems, replies, strict=True):
        if not reply["messages"]:
            raise ConfigError(
                f"task.environment = '{environment}': reset returned no messages for problem {problem.id}"
            )
        prompt = tuple(Message(item["role"], item["content"]) for item in reply["messages"])
        name, about = grader or problem.grader, as_problem(problem)
        prompted.append(replace(problem, prompt=prompt, grader=name, extra=about))
    return prompted


@functools.cache
def tool_schemas(tools: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the schemas of tools, which a worker makes. Raise ConfigError if one of them cannot be used."""
    from bandpo_cli.config.run import GradingConfig

    with closing(ToolPool(tools, GradingConfig(), 1, 1, "load_schemas")) as pool:
        pool.start()
        return list(pool.about)


def load_schemas(paths: Sequence[str]) -> BatchGrader:
    """Return no function, and the schemas of tools; raise ValueError if transformers cannot make one of them."""
    from transformers.utils.chat_template_utils import get_json_schema

    schemas = []
    for path in paths:
        function = load_function(path)
        try:
            schemas.append(get_json_schema(function))
        except Exception as error:  # noqa: BLE001 - of several types
            raise ValueError(
                f"'{path}' needs type hints and a docstring with its arguments: {first_line(error)}"
                f"{definition_location(function)}"
            ) from None
    return load_tools(paths)._replace(about=schemas)


def load_tools(paths: Sequence[str]) -> BatchGrader:
    """Import tools, without the seconds that the import of transformers takes; errors as in `load_schemas`.

    Synchronous tools among asynchronous ones run in threads.
    """
    import asyncio

    functions: dict[str, Callable[..., Any]] = {}
    for path in paths:
        function = load_function(path)
        if functions.setdefault(function.__name__, function) is not function:
            raise ValueError(f"two tools have the name '{function.__name__}'")
    asynchronous = any(map(inspect.iscoroutinefunction, functions.values()))

    async def call(name: str | None, arguments: Any) -> dict[str, Any]:
        if name is None:  # a call that was not readable
            return {"content": f"Error: {arguments}", "failed": True}
        if name not in functions:
            return {"content": f"Error: no tool '{name}'; there are {', '.join(functions)}", "failed": True}
        function = functions[name]
        try:
            if inspect.iscoroutinefunction(function):
                result = await function(**arguments)
            elif asynchronous:
                result = await asyncio.to_thread(function, **arguments)
            else:
                result = function(**arguments)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model reads it
            return {"content": f"Error: {type(error).__name__}: {first_line(error)}", "failed": True}
        text = result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
        return {"content": text, "failed": False}

    async def answer(calls: Sequence[Any]) -> list[Any]:
        return [await call(*item) for item in calls]

    return BatchGrader(answer, asynchronous=asynchronous)


def load_environment(paths: Sequence[str]) -> BatchGrader:
    """Import an environment, of a single path; raise ValueError if it cannot be created or lacks a method."""
    (path,) = paths
    create = load_function(path)
    try:
        first = create()
    except Exception as error:  # noqa: BLE001 - the user's code
        raise ValueError(
            f"'{path}' cannot be created: {type(error).__name__}: {first_line(error)}{user_code_location(error)}"
        ) from None
    if missing := [name for name in ("reset", "step") if not callable(getattr(first, name, None))]:
        raise ValueError(f"'{path}' has no method {' and no '.join(missing)}{definition_location(create)}")
    kept: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    def reply(key: str, problem: Mapping[str, Any], texts: Sequence[str], is_end: bool) -> dict[str, Any]:
        environment, done = kept.pop(key, (None, 0))
        messages: Any = ()
        if environment is None or done > len(texts):
            environment, done = create(), 0
            messages = environment.reset(dict(problem))
            messages = [messages] if isinstance(messages, str) else messages
        for text in texts[done:]:
            if messages is None:
                raise ValueError(
                    "an environment that is not deterministic: it ended earlier when it was repeated"
                )
            messages = environment.step({"role": "assistant", "content": text})
            messages = [messages] if isinstance(messages, str) else messages
        if messages is None or is_end:
            reward = environment.reward
            value = reward() if callable(reward) else reward
            return {"messages": None, "reward": float(value), "is_over": messages is None, "failed": False}
        kept[key] = environment, len(texts)
        if len(kept) > KEPT_ENVIRONMENTS:
            kept.popitem(last=False)
        return {"messages": [*map(as_message, messages)], "reward": None, "failed": False}

    async def answer(requests: Sequence[Any]) -> list[Any]:
        return [reply(*request) for request in requests]

    return BatchGrader(answer, location=definition_location(create))


def as_problem(problem: Problem) -> dict[str, Any]:
    """Return what `reset` of an environment receives for a problem; afterwards this is its `extra`."""
    question = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1].content
    about = {"question": question, "answer": problem.answer, "seed": derive_seed(0, problem.id)}
    return {**about, **problem.extra}


def as_message(message: Any) -> dict[str, Any]:
    """Return a message of an environment as a dictionary; raise ValueError for anything else than a message or text."""
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if isinstance(message, Mapping) and isinstance(message.get("content"), str) and "role" in message:
        return dict(message)
    raise ValueError(
        f"an environment must return texts or messages with role and content, not {message!r:.60}"
    )
