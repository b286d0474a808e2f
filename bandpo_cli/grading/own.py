"""A function named `module:function`: found, called, and its result read. The same for ours and for a user's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from bandpo_cli.errors import nearest
from bandpo_cli.grading.verdicts import CORRECT, NO_VERDICT, WRONG
from bandpo_cli.types import Grade

MAX_VERDICT_CHARS = 40


def load(name: str) -> Callable[..., Any]:
    """Import `module:function`, the current folder searched first as `python -m` would.

    Raises:
        ValueError: in a line, why there is no such function.
    """
    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"importing '{module_name}' failed: {type(error).__name__}: {error} "
            f"(searched the current folder {here} and the Python path)"
        ) from error
    finally:
        if here in sys.path:
            sys.path.remove(here)
    function = getattr(module, function_name, None)
    if function is None:
        raise ValueError(
            f"module '{module_name}' has no '{function_name}'{nearest(function_name, dir(module))}"
        )
    if not callable(function):
        raise ValueError(f"'{function_name}' is no function but a {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def read_result(result: Any) -> Grade:
    """Turn what a function returned into a grade.

    A bool; a score in [0, 1], right from 1 on; or a mapping with `score` and perhaps `correct` and `verdict`.

    Raises:
        ValueError: for anything else.
    """
    fields = result if isinstance(result, Mapping) else {"score": result}
    score = _score(fields.get("score"))
    correct = fields.get("correct", score >= 1)
    if not isinstance(correct, bool):
        raise ValueError(f"'correct' must be true or false, not {correct!r:.60}")
    verdict = fields.get("verdict", CORRECT.verdict if correct else WRONG.verdict)
    if not isinstance(verdict, str) or not 0 < len(verdict) <= MAX_VERDICT_CHARS or verdict in NO_VERDICT:
        raise ValueError(
            f"'verdict' must be a short word other than {sorted(NO_VERDICT)}, not {verdict!r:.60}"
        )
    return Grade(score, correct=correct, verdict=verdict)


def _score(value: Any) -> float:
    if hasattr(value, "item"):  # a number of numpy's or torch's
        value = value.item()
    if not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ValueError(
            f"a grader returns a bool, a score in [0, 1] or a dict with 'score', not {value!r:.60}"
        )
    return float(value)
