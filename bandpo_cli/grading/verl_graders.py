r"""Graders of verl: `math-dapo`, `math-dapo-boxed`, `gsm8k` and `gsm8k-flexible`.

An answer is correct here exactly when verl gives it the full score, so that accuracies can be compared with the
accuracies that users of verl report. The rules come from `verl/utils/reward_score/math_dapo.py` and `gsm8k.py`; arXiv
2603.04918 uses `math-dapo`. They compare texts, not values: do not improve any rule here. `tests/integrations` compares
the graders with verl itself.

Only the end of a completion is read, so that the work per answer is bounded.
"""

import re
from collections.abc import Callable, Sequence

from bandpo_cli.types import CORRECT, MALFORMED, WRONG, Grade, Problem

TAIL_CHARS, BOX_TAIL_CHARS = 300, 100
"""Number of characters at the end of a completion that are read, and in which `math-dapo-boxed` reads a box."""

MAX_REFERENCE_CHARS = 1000  # Maximal length of a reference of `math-dapo`, which bounds the work per answer

_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_BOX = r"\boxed{"
_BRACE = re.compile(r"[{}]")

# The normalisation of Minerva (arXiv 2206.14858, appendix D) as verl has it. The order counts: every replacement acts
# on the result of those before it, also within words ("than 5" becomes "th5").
_REMOVED_WORDS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples"
)
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
    *((removed, "") for removed in (
        *_REMOVED_WORDS.split(), r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}",
        r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
    )),
)  # fmt: skip
_FORMULA = re.compile(r"^[^$\n]*\$([^$\n]*)\$.*", re.MULTILINE)  # the first $...$ stands for its line
# Without a closing brace the rest of the line is matched too, without a group: nothing in it can match either.
_WRAPPERS = (
    *(re.compile(rf"\\{name}\{{(?:([^}}\n]*+)\}}|[^}}\n]*+)") for name in ("text", "textbf", "overline")),
    re.compile(r"\\boxed\{(?:([^\n]*)\}|[^\n]*+)"),
)
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")  # \frac12 is \frac{1}{2}
_SHORT_ROOT = re.compile(r"sqrt([^{])")

_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")
_DIGIT = re.compile(r"[0-9]")


def vote_math_dapo(text: str) -> str | None:
    """Return the normalised answer of the last `Answer: ...` line; None if there is none."""
    lines = _ANSWER_LINE.findall(text[-TAIL_CHARS:])  # what follows, on the same line or the next with a text
    return normalize(lines[-1]) if lines else None


def vote_math_dapo_boxed(text: str) -> str | None:
    r"""Return the vote for `math-dapo`; without an `Answer: ...` line, the content of the last `\boxed{...}`."""
    answer = vote_math_dapo(text)
    return _last_box(text) if answer is None else answer


def vote_gsm8k(text: str) -> str | None:
    """Return the number after the last `#### `, without commas; None if there is none."""
    return _last_number([number.replace(",", "") for number in _HASHES.findall(text[-TAIL_CHARS:])])


def vote_gsm8k_flexible(text: str) -> str | None:
    """Return the last number; None if there is none. Like verl, read "18, or" as "18," and "It is 18." as "18."."""
    return _last_number([number for number in _NUMBER.findall(text[-TAIL_CHARS:]) if number != "."])


def normalize(answer: str) -> str:
    r"""Return verl's normal form of an answer or a reference of `math-dapo`.

    Of an equation, the right-hand side stays. Some articles, units, fonts and LaTeX spaces and all dollar signs are
    removed, `\frac12` becomes `\frac{1}{2}`, and a text of digits and commas loses its commas.
    """
    text = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    text = _FORMULA.sub(r"$\1$", text)
    for wrapper in _WRAPPERS:
        text = wrapper.sub(lambda match: match[0] if match[1] is None else match[1], text)
    text = _SHORT_ROOT.sub(r"sqrt{\1}", _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def _last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`; None if there is none or it is not closed."""
    _, box, content = text[-BOX_TAIL_CHARS:].rpartition(_BOX)
    depth = 1
    for brace in _BRACE.finditer(content if box else ""):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return content[: brace.start()]
    return None


def _last_number(numbers: Sequence[str]) -> str | None:
    """Return the last number; None if it is punctuation only, which verl's patterns read as a number."""
    return numbers[-1] if numbers and _DIGIT.search(numbers[-1]) else None


def _digits_of_reference(problem: Problem) -> str:
    """Return the reference without commas, as verl stores the references of GSM8K; raise ValueError for other texts."""
    if not _NUMBER.fullmatch(problem.answer) or not _DIGIT.search(problem.answer):
        raise ValueError(
            f"its answer {problem.answer!r:.60} is not a number in digits; use the grader 'math'"
        )
    return problem.answer.replace(",", "")


def _normal_reference(problem: Problem) -> str:
    """Return the normal form of the reference; raise ValueError above `MAX_REFERENCE_CHARS` characters."""
    if len(problem.answer) > MAX_REFERENCE_CHARS:
        raise ValueError(
            f"its answer has more than {MAX_REFERENCE_CHARS:,} characters; use the grader 'math'"
        )
    return normalize(problem.answer)


def _text_grader(
    vote: Callable[[str], str | None], reference: Callable[[Problem], str]
) -> Callable[[Problem, str], Grade]:
    """Return the grader for which the vote must be the reference; no vote, or an empty wrong one, is malformed."""

    def grade(problem: Problem, text: str) -> Grade:
        expected, answer = reference(problem), vote(text)
        if answer is not None and answer == expected:
            return CORRECT
        return WRONG if answer else MALFORMED

    return grade


grade_math_dapo = _text_grader(vote_math_dapo, _normal_reference)
grade_gsm8k = _text_grader(vote_gsm8k, _digits_of_reference)
grade_gsm8k_flexible = _text_grader(vote_gsm8k_flexible, _digits_of_reference)
_grade_box = _text_grader(_last_box, lambda problem: problem.answer)


def grade_math_dapo_boxed(problem: Problem, text: str) -> Grade:
    r"""Grade like `grade_math_dapo`; without an `Answer: ...` line, the last `\boxed{...}`, unchanged."""
    return (_grade_box if vote_math_dapo(text) is None else grade_math_dapo)(problem, text)
