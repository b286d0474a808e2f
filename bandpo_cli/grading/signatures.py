"""Signatures of custom grader functions: this package's, verl's and TRL's, behind one interface for the worker.

The interfaces are those of verl 0.9.1 (`reward_manager/naive.py` and `batch.py`) and TRL 1.16
(`GRPOTrainer._calculate_rewards`). Imports no torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple

from bandpo_cli.custom_code import load_function
from bandpo_cli.errors import definition_location
from bandpo_cli.registries import SIGNATURES, load_attribute, split_signature
from bandpo_cli.types import (
    CORRECT,
    ENVIRONMENT_REWARD,
    MESSAGES,
    NOT_APPLICABLE,
    UNGRADED_VERDICTS,
    WRONG,
    Grade,
    Problem,
    messages_of,
)

MAX_VERDICT_CHARS = 40  # Maximal length of the verdict of a custom grader

# Arguments of TRL's rewards: those besides the columns, columns with other names, and those that do not exist here.
_TRL_ARGUMENTS = frozenset({"prompts", "completions", "log_extra", "log_metric"})
_TRL_PROMPT_COLUMNS = frozenset({"prompt", "completion", "completion_ids", MESSAGES, ENVIRONMENT_REWARD})
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NOT_AVAILABLE = frozenset({"completion_ids", "trainer_state", "environments"})


class Answer(NamedTuple):
    """A completion with its problem, as it is sent to a worker: JSON values only; `prompt` has the chat messages."""

    text: str
    answer: str
    extra: dict[str, Any]
    prompt: list[dict[str, str]]
    source: str


class BatchGrader(NamedTuple):
    """A grader function with its signature adapted: `call` takes answers [N] and returns grades [N]."""

    call: Callable[[Sequence[Any]], Coroutine[Any, Any, list[Grade]]]
    batched: bool = False  # N may be more than 1
    asynchronous: bool = False  # the function is `async def`; an event loop can run several calls at a time
    location: str = ""  # the end of an error message: where the function is defined
    about: Any = None  # what is sent to the parent process after the import
    has_steps: bool = False  # it awaits `asyncio.sleep(0)` after each step, and the deadline starts again

    def grade(self, answers: Sequence[Any], on_step: Callable[[], None] = lambda: None) -> list[Grade]:
        """Return the grades [N] of answers [N], outside an event loop; call `on_step` at the end of each step."""
        coroutine = self.call(answers)
        if self.asynchronous:
            return run_awaitable(coroutine)  # type: ignore[no-any-return]
        try:
            while coroutine.send(None) is None and self.has_steps:  # it never waits for an event
                on_step()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        raise AssertionError("a synchronous function was suspended")


def run_awaitable(value: Awaitable[Any]) -> Any:
    """Return the result of an awaitable, where no event loop runs."""
    import asyncio  # not at module level: every worker imports this module

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def answer_of(problem: Problem, text: str) -> Answer:
    """Return what a worker receives for a completion."""
    prompt = [{"role": turn.role, "content": turn.content} for turn in messages_of(problem.prompt)]
    return Answer(text, problem.answer, dict(problem.extra), prompt, problem.source)


def as_json(result: Any) -> Any:
    """Return a grade as the list of its fields that is sent to the parent process; any other result unchanged."""
    if isinstance(result, Grade):
        return result.reward, result.correct, result.verdict, result.has_reward
    return result


def load_worker(path: str) -> BatchGrader:
    """Return the function of a grader of this package that runs in workers."""
    return _single_grader(GraderFunction(load_function(path)), tuple, grade_from_result)


def load_grader(name: str) -> BatchGrader:
    """Import a custom grader and adapt its signature, which `name` states or its parameter names show.

    Raise ValueError if the import fails, or the function cannot be called in the way that `name` states.
    """
    signature, path = split_signature(name)
    function = GraderFunction(load_function(path))
    for key, entry in SIGNATURES.items():
        is_recognised = any(function.parameters.keys() >= names for names in entry.parameters)
        if signature == key or (signature is None and is_recognised):
            adapted: BatchGrader = load_attribute(entry.adapter)(function)
            break
    else:
        function.check_call("text", "answer", "extra")
        adapted = _single_grader(function, lambda answer: answer[:3], grade_from_result)
    return adapted._replace(asynchronous=function.asynchronous, location=function.location)


def _single_grader(
    function: GraderFunction,
    arguments: Callable[[Sequence[Any]], Sequence[Any]],
    grade: Callable[[Any], Grade],
    names: Sequence[str] = (),
) -> BatchGrader:
    """Return a grader that calls `function` for each answer, with its arguments by position or by `names`."""

    async def call(answers: Sequence[Any]) -> list[Grade]:
        rows = map(arguments, answers)
        calls = (function(**dict(zip(names, row, strict=True))) if names else function(*row) for row in rows)
        return [grade(await result) for result in calls]

    return BatchGrader(call)


def _batch_grader(
    function: GraderFunction,
    columns: Callable[[Sequence[Answer]], dict[str, Any]],
    grade: Callable[[Any], Grade],
) -> BatchGrader:
    """Return a grader that calls `function` for several answers, with their arguments as lists by name."""

    async def call(answers: Sequence[Any]) -> list[Grade]:
        result = await function(**columns([Answer(*answer) for answer in answers]))
        if isinstance(result, (str, bytes, Mapping)) or not hasattr(result, "__iter__"):
            raise ValueError(f"it must return a list with one reward per completion, not {result!r:.60}")
        if len(results := list(result)) != len(answers):
            raise ValueError(f"it returned {len(results)} rewards for {len(answers)} completions")
        return [*map(grade, results)]

    return BatchGrader(call, batched=True)


class GraderFunction:
    """A function and its parameters by name: none for a function in C that does not report them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._signature: inspect.Signature | None = None
        with suppress(TypeError, ValueError):
            self._signature = inspect.signature(function)
        self.parameters = self._signature.parameters if self._signature else {}
        self._takes_any = any(item.kind is item.VAR_KEYWORD for item in self.parameters.values())
        self.asynchronous = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self.location = definition_location(function)

    async def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        """Return the result for these arguments and those by name that have a parameter."""
        result = self._function(*arguments, **self._accepted(named))
        if self.asynchronous:
            return await result
        # A function that is not `async def` may return a coroutine; no event loop runs here.
        return run_awaitable(result) if inspect.isawaitable(result) else result

    def _accepted(self, named: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in named.items() if self._takes_any or name in self.parameters}

    def check_call(self, *arguments: str, **named: str) -> None:
        """Raise ValueError unless the function can be called with arguments of these names; see `__call__`."""
        try:
            if self._signature is not None:
                self._signature.bind(*arguments, **self._accepted(named))
        except TypeError as error:
            raise ValueError(
                f"it is called with ({', '.join([*arguments, *named])}) and is defined as "
                f"{getattr(self._function, '__name__', 'function')}{self._signature}: {error}{self.location}"
            ) from None

    def check_takes(self, name: str, signature: str, arguments: Sequence[str]) -> None:
        """Raise ValueError unless the function takes an argument of that name."""
        if name not in self.parameters and not self._takes_any:
            raise ValueError(
                f"'{signature}:' calls it with {', '.join(arguments)}, and its parameters are "
                f"{', '.join(sorted(self.parameters)) or 'none'}{self.location}"
            )


def grade_from_result(result: Any) -> Grade:
    """Convert the return value of a grader function into a grade; raise ValueError for other values than these.

    It is a bool; a score in [0, 1], correct if it is 1; or a mapping with `score` and optionally `correct` (a bool) and
    `verdict` (1 to 40 characters, not one of `UNGRADED_VERDICTS`).
    """
    fields = result if isinstance(result, Mapping) else {"score": result}
    expected = "a bool, a score in [0, 1] or a dict with 'score'"
    score = finite(fields.get("score", result), expected, is_share=True)
    correct = fields.get("correct", score >= 1)
    if not isinstance(correct, bool):
        raise ValueError(f"'correct' must be true or false, not {correct!r:.60}")
    verdict = fields.get("verdict", CORRECT.verdict if correct else WRONG.verdict)
    is_short = isinstance(verdict, str) and 0 < len(verdict) <= MAX_VERDICT_CHARS
    if not is_short or verdict in UNGRADED_VERDICTS:
        ungraded = sorted(UNGRADED_VERDICTS)
        raise ValueError(f"'verdict' must be a short word other than {ungraded}, not {verdict!r:.60}")
    return Grade(score, correct=correct, verdict=verdict)


def adapt_verl(function: GraderFunction) -> BatchGrader:
    """Adapt verl's `compute_score`: one completion per call, or lists if it has the parameters of the batch form.

    The arguments are passed by name, without those that the function does not have, so that the functions of
    `verl.utils.reward_score` can be named directly. A score is any number, or a dictionary with `score` and,
    optionally, `acc`. Raise ValueError if the function has neither form.
    """
    batched = "solution_strs" in function.parameters
    plural = "s" if batched else ""
    names = [f"{name}{plural}" for name in ("data_source", "solution_str", "ground_truth", "extra_info")]
    function.check_takes(names[1], "verl", names)
    function.check_call(**dict.fromkeys(names, ""))

    def row(fields: Sequence[Any]) -> tuple[Any, ...]:
        answer = Answer(*fields)  # a row in verl's layout has its own values
        source, info, model = map(answer.extra.get, ("data_source", "extra_info", "reward_model"))
        truth = model.get("ground_truth") if isinstance(model, Mapping) else None
        source = source if isinstance(source, str) else answer.source
        truth = answer.answer if truth is None or isinstance(truth, str) else truth
        return source, answer.text, truth, dict(info) if isinstance(info, Mapping) else answer.extra

    def columns(answers: Sequence[Answer]) -> dict[str, Any]:
        return dict(zip(names, map(list, zip(*map(row, answers), strict=True)), strict=True))

    def grade(result: Any) -> Grade:
        fields = result if isinstance(result, Mapping) else {"score": result}
        score = finite(fields.get("score", result), "a score or a dict with 'score'")
        return _unlimited_grade(score, finite(fields.get("acc", score), "'acc' as a number or a bool"))

    return _batch_grader(function, columns, grade) if batched else _single_grader(function, row, grade, names)


def adapt_trl(function: GraderFunction) -> BatchGrader:
    """Adapt a reward function of TRL's GRPOTrainer, which gets lists and returns one reward, or None, per completion.

    Prompts and completions are lists of messages, with tools or an environment all after the prompt. A function with
    the annotation `completions: list[str]` gets texts, the last message of each conversation. The columns of the rows
    have one value per completion. None and, as in TRL, NaN mean that the function does not apply. Raise ValueError if
    the function has no parameter `completions`, or needs an argument that only TRL's trainer has.
    """
    function.check_takes("completions", "trl", ("prompts", "completions", "**columns"))
    parameters = function.parameters
    required = {
        name for name, item in parameters.items() if item.default is item.empty and item.kind not in _VARIADIC
    }
    if missing := required & _NOT_AVAILABLE:
        raise ValueError(f"it needs {', '.join(sorted(missing))}, which only TRL's trainer has")
    annotation = parameters["completions"].annotation if "completions" in parameters else None
    as_text = annotation in (list[str], "list[str]", "List[str]")

    def columns(answers: Sequence[Answer]) -> dict[str, Any]:
        names = dict.fromkeys(key for item in answers for key in item.extra if key not in _TRL_PROMPT_COLUMNS)
        values: dict[str, Any] = {"answer": [answer.answer for answer in answers]}
        values |= {name: [answer.extra.get(name) for answer in answers] for name in names}
        if missing := required - _TRL_ARGUMENTS - set(values):
            given = ", ".join(sorted(values))
            raise ValueError(f"no column {', '.join(sorted(missing))} in the rows, which have {given}")
        if as_text:
            values["prompts"] = ["\n\n".join(turn["content"] for turn in answer.prompt) for answer in answers]
            values["completions"] = [answer.text for answer in answers]
        else:
            values["prompts"] = [answer.prompt for answer in answers]
            values["completions"] = [
                item.extra.get(MESSAGES) or [{"role": "assistant", "content": item.text}] for item in answers
            ]
        # TRL's two functions that write to its own tables do nothing here.
        return values | dict.fromkeys(("log_extra", "log_metric"), lambda *_, **__: None)

    def grade(reward: Any) -> Grade:
        value = reward.item() if hasattr(reward, "item") else reward
        if value is None or value != value:  # NaN
            return NOT_APPLICABLE
        return _unlimited_grade(finite(value, "a number or None for each completion"))

    return _batch_grader(function, columns, grade)


def _unlimited_grade(score: float, accuracy: float | None = None) -> Grade:
    """Return the grade of any score; correct from an accuracy of 1 on, which is the score by default."""
    return replace(CORRECT if (score if accuracy is None else accuracy) >= 1 else WRONG, reward=score)


def finite(value: Any, expected: str, is_share: bool = False) -> float:
    """Return a finite number, also of NumPy or torch; raise ValueError for anything else, or for a share not in [0, 1].

    `expected` describes the numbers in the message.
    """
    number = value.item() if hasattr(value, "item") else value
    is_finite = isinstance(number, Real) and math.isfinite(number)
    if not is_finite or (is_share and not 0 <= float(number) <= 1):
        advice = "; scale it, or use TRL's or verl's signature, whose scores have no limits (trl: or verl:"
        advice = f"{advice}module:function)" if is_finite else ""
        raise ValueError(f"it must return {expected}, not {number!r:.60}{advice}")
    return float(number)
