r"""Final answers: plain numbers as people and LaTeX write them, comparison as numbers and as text, and majority votes.

`grade_number` is the complete grader `number`. `grade_math` is the first stage of the grader `math`: it decides what
plain numbers and equal texts can decide, and leaves the rest to `grading.symbolic`. `grade_tagged` is the first stage
of the grader `reasoning-gym`: it extracts the answer that `grading.reasoning_gym` scores. Any text is read in bounded
time: the only arithmetic is one division and one power of ten, both bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from bandpo_cli.extract import final_answer, unwrap
from bandpo_cli.registries import GRADERS, GraderEntry, load_attribute
from bandpo_cli.types import CORRECT, MALFORMED, WRONG, Grade, Problem

MAX_ANSWER_CHARS = 1000
"""Longer final answers are malformed. This bounds the work per answer before any deadline applies."""

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_POWER = r"10 ?\^ ?(?:\{ ?[+-]?[0-9]{1,3} ?\}|[+-]?[0-9]{1,3})"
_SIGNED = rf"[+-]? ?{_DECIMAL}"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?) ?(?:"
    rf"(?:(?P<integer>{_INTEGER}) ?)?\\[dtc]?frac ?"
    rf"(?:\{{ ?(?P<numerator>{_SIGNED}) ?\}} ?\{{ ?(?P<denominator>{_SIGNED}) ?\}}"
    r"|(?P<numerator1>[0-9]) ?(?P<denominator1>[0-9]))"
    rf"|(?:(?P<integer2>{_INTEGER}) )?(?P<numerator2>{_DECIMAL}) ?/ ?(?P<denominator2>{_SIGNED})"
    rf"|(?P<power>{_POWER})"
    rf"|(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}})(?![0-9])"
    rf"| ?(?:\\times|\\cdot|\*|×|·|x) ?(?P<times>{_POWER}))?)"
)
_UNICODE_VARIANTS = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "’": "'"})
_GROUPED = re.compile(r"\{,\}|,\\!|(?<=[0-9])\\,(?=[0-9]{3})")  # 10{,}000, 10,\!000 and 10\,000
_LATEX_SPACING = re.compile(r"\\[,;:! ]|~|\\(?:left|right)(?![A-Za-z])")
_APPROXIMATELY = re.compile(r"(?:\\approx|\\sim|≈|=|(?i:approximately|about)(?![A-Za-z])) ?")
_CURRENCY = re.compile(r"([+-]?) ?(?:\\?\$|US\$|USD|EUR|GBP|Rs\.?|€|£|¥|₹) ?(?=[-+.0-9])")

_POWERS = {"percent": -2, "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NON_UNIT_WORDS = re.compile(
    r"and|but|cosh?|cot|csc|cubed|det|exp|factorial|half|halves|inf|infinity|lim|log|minus|mod|not|or|over|pi|plus"
    r"|sinh?|sqrt|squared|tanh?",
    re.IGNORECASE,
)
"""Words that change the value of the number before them, or the statement about it."""
_SHORT_UNIT = re.compile(
    r"[msghlLAVWJNKCF]|[cmkn]m|k?g|mg|in|ft|yd|mi|m[lL]|lb|oz|hr|Hz|k[WJ]|eV|[ap]m|AM|PM|a|an|of|to|US"
)
"""Units of one or two letters, and words between units; any others are variables, as in 5ab."""
_PREPOSITION = re.compile(r"at|by|on")
"""Accepted after a unit, as in "18 dollars at the market"; directly after a number they may be variables."""
FONT = re.compile(
    r"\\(?:text(?:bf|rm|it|normal|sf|tt)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}"
)
"""A font command of LaTeX; its group is the content."""
_DEGREES = re.compile(r"\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree|\\circ|°")
# One letter per repetition: with "[A-Za-z]+" here, a text that does not match takes time exponential in its letters.
_UNIT = re.compile(r"(?:[A-Za-z ./()'*²³-]|\^ ?(?:\{ ?-?[1-4] ?\}|-?[1-4]))*")


@dataclass(frozen=True)
class Number:
    """A number and the form it was written in.

    Attributes:
        value: The value of the digits.
        scale: 1/100 after a percent sign, 10**6 after "million", else 1. "50%" is equal to 50 and to 0.5.
        places: The number of digits after the decimal point of a plain decimal, else None.
        is_fraction: Whether it was written as a fraction.
        has_letter: Whether a single letter follows, which is a unit (5 m) or else a variable.
    """

    value: Fraction
    scale: Fraction
    places: int | None
    is_fraction: bool
    has_letter: bool

    def __str__(self) -> str:
        """Return the value, and the scale if it is not 1: `50 × 1/100`."""
        return f"{self.value}" + ("" if self.scale == 1 else f" × {self.scale}")


def read_number(text: str) -> Number | None:
    """Read a number with an optional currency sign before it and an optional unit after it.

    Return None for anything else and for texts longer than `MAX_ANSWER_CHARS` characters.
    """
    if len(text) > MAX_ANSWER_CHARS:
        return None
    text = " ".join(_LATEX_SPACING.sub(" ", _GROUPED.sub(",", text.translate(_UNICODE_VARIANTS))).split())
    if approximately := _APPROXIMATELY.match(text):
        text = text[approximately.end() :]
    text = _CURRENCY.sub(r"\1", text, count=1)
    match = _NUMBER.match(text)
    unit = read_unit(text[match.end() :]) if match else None
    if match is None or unit is None:
        return None
    try:
        value = _value(match)
    except ZeroDivisionError:
        return None
    is_fraction = not (match["power"] or match["decimal"])
    is_plain = match["decimal"] and not (match["exponent"] or match["times"])
    places = len(match["decimal"].partition(".")[2]) if is_plain else None
    scale, has_letter = unit
    return Number(-value if match["sign"] == "-" else value, scale, places, is_fraction, has_letter)


def equal(first: Number, second: Number) -> bool:
    """Return True if the values are exactly equal.

    If only one of the two has a percent sign or a word like "million", the values with and without it are compared.
    """
    if first.scale == second.scale:
        return first.value == second.value
    scaled = first.value * first.scale == second.value * second.scale
    return scaled or (1 in (first.scale, second.scale) and first.value == second.value)


def rounds_to(exact: Number, decimal: Number) -> bool:
    """Return True if `exact` is a fraction and `decimal` its value to six digits or more, as 1/3 and 0.333333."""
    if not exact.is_fraction or not decimal.places or exact.scale != decimal.scale:
        return False
    digits = abs(decimal.value) * 10**decimal.places
    return digits >= 10**5 and round(exact.value, decimal.places) == decimal.value


def read_unit(text: str) -> tuple[Fraction, bool] | None:
    r"""Read the text after a number: words, `\text{...}`, degree signs; None if it is neither empty nor a unit.

    Returns:
        The scale (1/100 for percent, 10**6 for million, else 1), and whether the text is a single letter, which may be
        a variable.
    """
    if not text.strip():
        return Fraction(1), False
    is_letter = len(text.strip()) == 1 and text.strip().isalpha()
    is_attached = text[0].isascii() and text[0].isalpha()
    text = FONT.sub(r" \1 ", _DEGREES.sub(" degrees ", text).replace("\\%", "%").replace("%", " percent "))
    words = re.findall(r"[A-Za-z]+", text)
    if not words or not _UNIT.fullmatch(text) or not _is_unit(words[0]):
        return None
    if not all(_is_unit(word) or _PREPOSITION.fullmatch(word) for word in words[1:]):
        return None
    if is_attached and not _SHORT_UNIT.fullmatch(words[0]):
        return None
    return Fraction(10) ** _POWERS.get(words[0].lower(), 0), is_letter


def _is_unit(word: str) -> bool:
    return bool(_SHORT_UNIT.fullmatch(word)) or (len(word) > 2 and not _NON_UNIT_WORDS.fullmatch(word))


def _value(match: re.Match[str]) -> Fraction:
    """Return the value of the matched number without its sign."""
    if match["power"]:
        return _power_of_ten(match["power"])
    if match["decimal"]:
        exponent = match["exponent"]
        factor = _power_of_ten(match["times"]) if match["times"] else Fraction(10) ** int(exponent or 0)
        return _decimal(match["decimal"]) * factor
    numerator, denominator = (
        _decimal(match[name] or match[f"{name}1"] or match[f"{name}2"])
        for name in ("numerator", "denominator")
    )
    return _decimal(match["integer"] or match["integer2"] or "0") + numerator / denominator


def _power_of_ten(text: str) -> Fraction:
    return Fraction(10) ** int(text.partition("^")[2].strip(" {}"))


def _decimal(text: str) -> Fraction:
    integer, _, places = text.replace(",", "").replace(" ", "").partition(".")
    return Fraction(int(integer + places), 10 ** len(places))


MAX_TAGGED_CHARS = 20_000
"""Longer answers in <answer> tags are malformed. The longest reference of reasoning-gym with default options, of
tower_of_hanoi, has about 4,000 characters."""

_DISPLAY_COMMANDS = re.compile(
    r"\\(?:left|right|big|Big|bigl|bigr|Bigl|Bigr|displaystyle|textstyle|limits)(?![A-Za-z])|\$|\\[()\[\]]"
)
_SPACES = re.compile(r"\\(?:quad|qquad)(?![A-Za-z])|\\[,;:! ]|~")
_FRACTIONS = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_FREE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")
_OPEN, _CLOSE = "<answer>", "</answer>"
_EMPTY_SET = re.compile(r"\\varnothing(?![A-Za-z])|\\\{ *\\\}")
_CHOICE = re.compile(r"(?:(?i:option|choice) ?)?\(?([A-Za-z])\)|(?i:option|choice) ([A-Za-z])")
_WORDS = re.compile(r"[A-Za-z]{2,}(?: [A-Za-z]+)*")
_EQUALS = re.compile(r"(?<![\\<>!:=])=(?!=)")
_FREE_SPACES = re.compile(r"(?<![0-9 ]) ++|(?<! ) ++(?![0-9])")  # the space in "1 2" stays: it is not 12
_NAME_OR_ARITHMETIC = re.compile(r"[A-Za-z]|[0-9 .,+*/()$×-]+")
_REMARK = re.compile(r"[,;.]? (?i:because|since)(?![A-Za-z])| \((?P<text>[^()]*)\)$")
_PROSE = re.compile(r"[A-Za-z]{3} [A-Za-z]{2}")
_NOT_A_REMARK = re.compile(
    r"(?i)[\\^]|(?<![A-Za-z])(?:and|base|but|cosh?|else|exp|if|ln|log|minus|mod|modulo|nor|not|or|otherwise|over|pi"
    r"|plus|sinh?|sqrt|tanh?|times|unless)(?![A-Za-z])"
)
"""Words in parentheses that may change the number before them, or the statement about it: "(mod 7)", "(or 19)"."""


def grade_number(problem: Problem, text: str) -> Grade:
    """Compare the final answer of a completion with the reference as exact numbers.

    The verdict is `malformed` if the final answer is not a plain number. Of an equation ("3 * 6 = 18") the right-hand
    side is compared. Raise ValueError if the reference is not a plain number.
    """
    gold = read_plain_number(_reference(problem))
    if gold is None:
        raise ValueError(f"its answer {problem.answer!r:.60} is not a plain number; use the grader 'math'")
    number = _stated_number(text)
    if number is None:
        return MALFORMED
    return CORRECT if equal(gold, number) else WRONG


def grade_math(problem: Problem, text: str) -> Grade | tuple[str, str]:
    """Grade a completion if plain numbers or equal texts decide.

    Returns:
        A grade, or else the pair (reference, final answer), the arguments of `symbolic.is_equal`.
    """
    answer = _final_answer(text)
    if answer is None:
        return MALFORMED
    reference = _reference(problem)
    left, *right = _EQUALS.split(answer)  # the value is on the right of "x = 1,234" and "9 * 2 = 18"
    stated = right[0] if len(right) == 1 and _NAME_OR_ARITHMETIC.fullmatch(unwrap(left)) else answer
    gold, number = read_plain_number(reference), read_plain_number(stated)
    if gold is not None and number is not None and not gold.has_letter:  # "3 m" may be three masses
        is_right = equal(gold, number) or rounds_to(gold, number) or rounds_to(number, gold)
        return CORRECT if is_right else WRONG
    return CORRECT if same_text(reference, answer) else (reference, answer)


def read_plain_number(answer: str) -> Number | None:
    r"""Read a number as `read_number` does, also one in math delimiters or fonts: `$18$ dollars`, `\mathbf{18}`."""
    return read_number(answer) or read_number(FONT.sub(r" \1 ", _DISPLAY_COMMANDS.sub(" ", answer)))


def without_remark(answer: str) -> str:
    """Remove a remark after a plain number: "18 because 9 * 2 = 18", "18 dollars (nine eggs at $2 each)".

    A remark begins with "because" or "since", or is a phrase in parentheses at the end. The value
    before the remark counts, so that an equation in a remark is not taken for the answer.
    """
    remark = _REMARK.search(answer)
    text = remark and remark["text"]
    if remark is None or (text is not None and (not _PROSE.search(text) or _NOT_A_REMARK.search(text))):
        return answer
    stated = unwrap(answer[: remark.start()])
    return stated if read_plain_number(right_hand_side(stated)) else answer


def same_text(gold: str, answer: str) -> bool:
    """Return True if both texts have the same canonical form; an empty canonical form equals nothing."""
    return canonical_text(gold) == canonical_text(answer) != ""


def canonical_text(answer: str) -> str:
    r"""Remove what does not change the meaning: fonts, spacing, `\left`, the size of fractions, the case of words.

    The choices `(C)`, `C)` and `Option C` become C. A space between two letters or digits stays: "5 5" is not 55.
    """
    text = FONT.sub(r" \1 ", _FRACTIONS.sub(r"\\frac", _SPACES.sub(" ", _DISPLAY_COMMANDS.sub(" ", answer))))
    text = _EMPTY_SET.sub(r"\\emptyset", text.replace(r"\%", "%"))
    text = _FREE_SPACE.sub("", " ".join(text.split())).removesuffix(".")
    choice = _CHOICE.fullmatch(text)
    if choice:
        return choice[1] or choice[2]
    return text.casefold() if _WORDS.fullmatch(text) else text


def right_hand_side(answer: str) -> str:
    """Return the text to the right of the last equals sign, or all of `answer` if there is none."""
    return _EQUALS.split(answer)[-1].strip()


def voted_answer(text: str, grader: str) -> str | None:
    r"""Return the final answer of a completion in canonical form, for majority votes.

    Plain numbers vote by value (0.50 votes with 1/2; 50% does not vote with 0.5, because either value may be meant).
    Other answers vote by their text without LaTeX commands that only change the appearance. Expressions that are equal
    in value alone (2\sqrt{2} and \sqrt{8}) are different votes. For the grader `number`, an answer that is not a plain
    number does not vote, and the right-hand side of an equation votes. For `countdown`, the complete text votes,
    without its spaces.

    Equal votes get equal grades, except decimals that stand for a fraction: for the reference 1/3, `math` accepts
    0.333333, and neither 0.3333330 nor 333333/1000000. A custom grader votes like `math`.

    Returns:
        The canonical form, or None if the completion has no answer of at most `MAX_ANSWER_CHARS` characters.
    """
    path = GRADERS[grader].vote if grader in GRADERS else GraderEntry.vote
    answer: str | None = load_attribute(path)(text)
    return answer


def vote_expression(text: str) -> str | None:
    """Return the vote of a completion for the grader `math` and for custom graders."""
    answer = _final_answer(text)
    if answer is None:
        return None
    number = read_plain_number(answer)
    if number is None or number.has_letter:  # "3 m" may be three masses
        return canonical_text(answer) or None
    return str(number)


def vote_number(text: str) -> str | None:
    """Return the vote of a completion for the grader `number`."""
    number = _stated_number(text)
    return None if number is None else str(number)


def vote_countdown(text: str) -> str | None:
    """Return the vote of a completion for the grader `countdown`: the complete text without spaces."""
    answer = text.strip()
    return _FREE_SPACES.sub("", answer) or None if len(answer) <= MAX_ANSWER_CHARS else None


def tagged_answer(text: str) -> str | None:
    """Return the content of the last <answer>...</answer> pair without surrounding space; None if there is no pair.

    The pairs are those of `reasoning_gym.utils.extract_answer`: from left to right, an opening tag and the first
    closing tag after it. Its regular expression takes quadratic time for many opening tags, this function linear time.
    """
    answer, position = None, 0
    while (start := text.find(_OPEN, position)) >= 0:
        start += len(_OPEN)
        end = text.find(_CLOSE, start)
        if end < 0:
            break
        answer, position = text[start:end], end + len(_CLOSE)
    return None if answer is None else answer.strip()


def grade_tagged(problem: Problem, text: str) -> Grade | tuple[str, str, str, str]:
    """Return the arguments of `reasoning_gym.score` for a completion, or `malformed` if it has no answer to score.

    Raise KeyError if the problem was not made by the task reasoning-gym.
    """
    extra = problem.extra
    name, options, entry = (str(extra[field]) for field in ("generator", "options", "entry"))
    answer = tagged_answer(text)
    if answer is None or len(answer) > MAX_TAGGED_CHARS:
        return MALFORMED
    return (name, options, entry, answer)


def vote_tagged(text: str) -> str | None:
    """Return the vote of a completion: its answer in tags with single spaces; None if it has no such answer."""
    answer = tagged_answer(text)
    return None if answer is None or len(answer) > MAX_TAGGED_CHARS else " ".join(answer.split()) or None


def _final_answer(text: str) -> str | None:
    answer = final_answer(text)
    return None if answer is None or len(answer) > MAX_ANSWER_CHARS else without_remark(answer)


def _stated_number(text: str) -> Number | None:
    answer = _final_answer(text)
    return None if answer is None else read_plain_number(right_hand_side(answer))


def _reference(problem: Problem) -> str:
    return without_remark(unwrap(problem.answer))
