"""A calculator as a tool: the model calls it while it solves a problem.

    bandpo train --task gsm8k --model Qwen/Qwen2.5-Coder-0.5B-Instruct --set task.tools=calculator:calculate

Run it in examples/, or copy the file to your folder. transformers makes the description that the model reads from the
type hints and the docstring of the function. An exception becomes an error result, which the model reads too.
"""

import ast
import operator

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> float:
    """Evaluate an arithmetic expression.

    Args:
        expression: numbers with + - * / and parentheses, for example (12 + 3) * 4.
    """

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(left), value(right))
        raise ValueError("only numbers, + - * / and parentheses are allowed")

    result = value(ast.parse(expression.strip(), mode="eval").body)
    return int(result) if result == int(result) else round(result, 6)
