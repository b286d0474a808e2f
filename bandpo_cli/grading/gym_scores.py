"""Scores of the library reasoning-gym: the function of the grader `reasoning-gym` that runs in worker processes.

Several scorers of the library pass the answer, or a field of the problem, to Python's `eval`, or to `parse_expr` of
sympy, which calls it. They would run any code in a text that comes from a model or from a file. This module replaces
the two functions, in the process that imports it, by versions that refuse everything but literals, arithmetic and known
functions. Only workers import it.
"""

import ast
import builtins
import functools
import json
import operator
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

try:
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # of a dependency without bytecode
        import reasoning_gym.factory
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}; pip install "bandpo[gym]"') from error
import sympy.parsing.sympy_parser

_ROUNDING = 1e-9  # Scores are products and quotients of floats, and may exceed 1 by their rounding errors

_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
    ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert,
}  # fmt: skip
_EXPRESSION_NODES = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.keyword, ast.Load)
_FUNCTIONS = frozenset(
    ("Abs", "Integral", "sqrt", "exp", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan",
     "acot", "asec", "acsc", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh")
)  # fmt: skip
"""The functions of sympy that an expression may call. Some references of intermediate_integration have an Integral."""


def score(name: str, options: str, entry: str, answer: str) -> float | dict[str, object]:
    """Return the score of an answer, in [0, 1], by the generator `name` with these options (a JSON object).

    An answer for which the scorer raises an error, although it accepts the reference, is malformed; otherwise the error
    is raised. `entry` is the problem as the generator returned it, as a Python literal (JSON has no tuples).
    """
    dataset, problem = _dataset(name, options), ast.literal_eval(entry)
    try:
        value = float(dataset.score_answer(answer, problem))
    except MemoryError:
        raise
    except Exception:  # whatever the scorer raises for a text that it cannot read
        # Some scorers change the problem, so that the reference is scored with a new copy.
        problem = ast.literal_eval(entry)
        if problem["answer"] is None or dataset.score_answer(problem["answer"], problem) < 1:
            raise
        return {"score": 0.0, "correct": False, "verdict": "malformed"}
    return 1.0 if 1 < value < 1 + _ROUNDING else value


def evaluate_literal(text: str) -> Any:
    """Return the value of a text of literals, lists and integer arithmetic, in place of `eval`.

    Raise ValueError if the text contains anything else (a name, a call, an attribute), and SyntaxError like `eval`.
    """

    def value_of(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.List(elts=elements):
                return [*map(value_of, elements)]
            case ast.Tuple(elts=elements):
                return tuple(map(value_of, elements))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value_of(left), value_of(right))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value_of(operand))
        raise ValueError(f"{type(node).__name__} is not allowed in a literal")

    return value_of(ast.parse(text.strip(), mode="eval").body)


def check_expression(text: str) -> None:
    """Raise ValueError unless a text has only numbers, arithmetic, variables and calls of known functions.

    A name that is not called cannot run code. Python's built-in functions are refused all the same.
    """
    for node in ast.walk(ast.parse(text.strip(), mode="eval").body):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        number = isinstance(node, ast.Constant) and isinstance(node.value, int | float)
        variable = isinstance(node, ast.Name) and not hasattr(builtins, node.id)
        if not (called or number or variable or isinstance(node, _EXPRESSION_NODES)):
            raise ValueError(f"{type(node).__name__} is not allowed in an expression")


@functools.lru_cache(maxsize=256)
def _dataset(name: str, options: str) -> Any:
    """Return the generator; its seed does not affect scores."""
    return reasoning_gym.factory.create_dataset(name, **json.loads(options), seed=0)


def _replace_evaluation() -> None:
    """Replace `eval` and `parse_expr` in all modules of the library, and `parse_expr` in sympy itself."""
    parse = sympy.parsing.sympy_parser.parse_expr

    @functools.wraps(parse)
    def parse_checked(text: str, *arguments: Any, **keywords: Any) -> Any:
        check_expression(text)
        return parse(text, *arguments, **keywords)

    for name, module in [*sys.modules.items()]:
        package = name.partition(".")[0]
        if package in ("reasoning_gym", "sympy") and getattr(module, "parse_expr", None) is parse:
            module.parse_expr = parse_checked  # type: ignore[attr-defined]
        if package == "reasoning_gym":
            module.eval = evaluate_literal  # type: ignore[attr-defined]


_replace_evaluation()
