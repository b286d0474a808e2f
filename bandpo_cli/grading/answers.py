r"""Final answers: plain numbers as people and LaTeX write them, comparison as numbers and as text, and majority votes.

`grade_number` is the complete grader `number`. `grade_math` is the first stage of the grader `math`: it decides what
plain numbers and equal texts can decide, and leaves the rest to `grading.symbolic`. `grade_tagged` is the first stage
of the grader `reasoning-gym`: it extracts the answer that `grading.reasoning_gym` scores. Any text is read in bounded
time: the only arithmetic is one division and one power of ten, both bounded.
"""

import re
from dataclasses import dataclass, replace
from fractions import Fraction

from bandpo_cli.extract import final_answer, unwrap
from bandpo_cli.grading.rewrites import MAX_ANSWER_CHARS, tidy
from bandpo_cli.grading.units import Unit, conversion, is_known, unit_of
from bandpo_cli.registries import GRADERS, GraderEntry, load_attribute
from bandpo_cli.types import CORRECT, ENVIRONMENT_REWARD, MALFORMED, WRONG, Grade, Problem

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]*)?|\.[0-9]+)"
_POWER = r"10 ?\^ ?(?:\{ ?[+-]?[0-9]{1,3} ?\}|[+-]?[0-9]{1,3})"
_SIGNED = rf"[+-]? ?{_DECIMAL}"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?) ?(?:"
    rf"(?:(?P<integer>{_INTEGER}) ?)?\\[dtc]?frac ?"
    rf"(?:\{{ ?(?P<numerator>{_SIGNED}) ?\}} ?\{{ ?(?P<denominator>{_SIGNED}) ?\}}"
    r"|(?P<numerator1>[0-9]) ?(?P<denominator1>[0-9]))"
    rf"|(?:(?P<integer1>{_INTEGER}) )?(?P<numerator2>{_DECIMAL}) ?/ ?(?P<denominator2>{_SIGNED})"
    rf"|(?P<power>{_POWER})"
    rf"|(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}})(?![0-9])"
    rf"| ?(?:\\times|\\cdot|\*|×|·|x) ?(?P<power1>{_POWER}))?)"
)
"""A number; the digit of a group distinguishes the alternatives, one of which matches."""
_SIGNS = ("€", "£", "¥", "₹", "¢")
_PARENTHESES = re.compile(r"^\(([^()]*)\)$")
_UNICODE_VARIANTS = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "’": "'"})
_GROUPED = re.compile(r"\{,\}|,\\!|(?<=[0-9])\\,(?=[0-9]{3})")  # 10{,}000, 10,\!000 and 10\,000
_LATEX_SPACING = re.compile(r"\\[,;:! ]|~|\\(?:left|right)(?![A-Za-z])")
_APPROXIMATELY = re.compile(r"^(?:\\approx|\\sim|≈|=|(?i:approximately|about)(?![A-Za-z])) ?")
_CURRENCY = re.compile(r"([+-]?) ?(?:\\|US)?(\$|USD|EUR|GBP|Rs|€|£|¥|₹)\.? ?(?=[-+.0-9])")

_POWERS = {"percent": -2, "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NON_UNIT_WORDS = re.compile(
    r"and|but|cosh?|cot|csc|cubed|det|exp|factorial|half|halves|inf|infinity|lim|log|minus|mod|not|or|over|pi|plus"
    r"|sinh?|sqrt|squared|tanh?",
    re.IGNORECASE,
)
"""Words that change the value of the number before them, or the statement about it."""
_SHORT_UNIT = re.compile(r"[msghlLAVWJNKCF]|[ap]m|AM|PM|a|an|of|to|US|sq|cu")
"""Letters that may be units, and words between units; other short words than units are variables, as in 5ab."""
_PREPOSITION = re.compile(r"at|by|on")
"""Accepted after a unit, as in "18 dollars at the market"; directly after a number they may be variables."""
FONT = re.compile(
    r"\\(?:text(?:bf|rm|it|normal|sf|tt)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}"
)
"""A font command of LaTeX; its group is the content."""
_DEGREES = re.compile(r"\^ ?(?:\\circ|\{ ?\\circ ?\})|\\degree|\\circ|°")
# One letter per repetition: with "[A-Za-z]+" here, a text that does not match takes time exponential in its letters.
_UNIT = re.compile(r"(?:[A-Za-z ./()'*²³€£¥₹¢-]|\^ ?(?:\{ ?-?[1-4] ?\}|-?[1-4]))*")


@dataclass(frozen=True)
class Number:
    """A number and the form it was written in."""

    value: Fraction
    scale: Fraction
    """1/100 after a percent sign, 10**6 after "million", else 1. "50%" is equal to 50 and to 0.5."""
    places: int | None
    """The number of digits after the decimal point of a plain decimal, else None."""
    is_fraction: bool
    has_letter: bool
    """A single letter follows, which is a unit (5 m) or a variable."""
    unit: Unit = ()
    """The unit of measurement, if it is a known one."""

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
    text = _APPROXIMATELY.sub("", _PARENTHESES.sub(r"\1", text))
    currency = _CURRENCY.match(text)
    text = _CURRENCY.sub(r"\1", text, count=1)
    match = _NUMBER.match(text)
    unit = read_unit(text[match.end() :]) if match else None
    if match is None or unit is None:
        return None
    groups = match.groupdict("").items()
    parts = {name.rstrip("12"): re.sub("[ ,]", "", part) for name, part in groups if part}
    places = None
    if is_fraction := "numerator" in parts:
        if (denominator := Fraction(parts["denominator"])) == 0:
            return None
        value = Fraction(parts.get("integer", 0)) + Fraction(parts["numerator"]) / denominator
    else:
        decimal, power = parts.get("decimal", "1"), parts.get("power", "10^0").partition("^")[2].strip("{}")
        value = Fraction(f"{decimal}e{parts.get('exponent', power)}")
        if parts.keys() <= {"sign", "decimal"}:
            places = len(decimal.partition(".")[2])
    scale, has_letter = unit
    known = unit_of(_without_fonts(text[match.end() :])) or unit_of(currency[2] if currency else "")
    return Number(-value if match["sign"] == "-" else value, scale, places, is_fraction, has_letter, known)


def in_unit_of(gold: Number, number: Number) -> Number | None:
    """Return the number converted to the unit of `gold`; None if the two have units of different kinds."""
    factor = conversion(gold.unit, number.unit)
    if factor is None or factor == 1:
        return None if factor is None else number
    return replace(number, value=number.value * factor, unit=gold.unit)


def equal(first: Number, second: Number) -> bool:
    """Return True if the values are exactly equal; units are not compared.

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
    text = _without_fonts(text)
    words = re.findall(r"[A-Za-z]+", text)
    is_known_unit = is_known(words[0]) if words else text.strip() in _SIGNS
    if not (words or is_known_unit) or not _UNIT.fullmatch(text):
        return None
    if is_attached and not (_SHORT_UNIT.fullmatch(words[0]) or is_known_unit):
        return None
    for index, word in enumerate(words):
        is_short = is_known(word) or _SHORT_UNIT.fullmatch(word)
        is_unit = is_short or (len(word) > 2 and not _NON_UNIT_WORDS.fullmatch(word))
        if not is_unit and (index == 0 or not _PREPOSITION.fullmatch(word)):
            return None
    return Fraction(10) ** _POWERS.get(words[0].lower() if words else "", 0), is_letter


def _without_fonts(text: str) -> str:
    """Return the text after a number with the content of fonts, and with degree and percent signs as words."""
    return FONT.sub(r" \1 ", _DEGREES.sub(" degrees ", text).replace("\\%", "%").replace("%", " percent "))


MAX_TAGGED_CHARS = 20_000
"""Longer answers in <answer> tags are malformed. The longest reference of reasoning-gym has about 4,000 characters."""

_DISPLAY_COMMANDS = re.compile(
    r"\\(?:left|right|big|Big|bigl|bigr|Bigl|Bigr|displaystyle|textstyle|limits)(?![A-Za-z])|\$|\\[()\[\]]"
)
_SPACES = re.compile(r"\\(?:quad|qquad)(?![A-Za-z])|\\[,;:! ]|~")
_FRACTIONS = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_FREE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")
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
    gold = read_plain_number(reference_of(problem))
    if gold is None:
        raise ValueError(f"its answer {problem.answer!r:.60} is not a plain number; use the grader 'math'")
    number = read_plain_number(right_hand_side(_final_answer(text)))
    if number is None:
        return MALFORMED
    number = in_unit_of(gold, number)
    return CORRECT if number and equal(gold, number) else WRONG


def grade_math(problem: Problem, text: str) -> Grade | tuple[str, str]:
    """Return the grade of a completion if plain numbers or equal texts decide, else the arguments of `is_equal`."""
    reference, answer = reference_of(problem), _final_answer(text)
    if not answer:
        return MALFORMED
    left, *right = _EQUALS.split(answer)  # the value is on the right of "x = 1,234" and "9 * 2 = 18"
    stated = right[0] if len(right) == 1 and _NAME_OR_ARITHMETIC.fullmatch(unwrap(left)) else answer
    gold, number = read_plain_number(reference), read_plain_number(stated)
    if gold and number and not gold.has_letter:  # "3 m" may be three masses
        number = in_unit_of(gold, number)
        is_right = number and (equal(gold, number) or rounds_to(gold, number) or rounds_to(number, gold))
        return CORRECT if is_right else WRONG
    return CORRECT if same_text(reference, answer) else (reference, answer)


def grade_environment(problem: Problem, text: str) -> Grade:
    """Return the reward of the environment as a grade; the answer is correct from a reward of 1 on.

    Raises:
        KeyError, ValueError: the problem has no such reward, or the environment has failed.
    """
    reward = problem.extra[ENVIRONMENT_REWARD]
    if not isinstance(reward, float):
        raise ValueError(reward)
    return replace(CORRECT if reward >= 1 else WRONG, reward=reward)


def grade_tagged(problem: Problem, text: str) -> Grade | tuple[str, str, str, str]:
    """Return the arguments of `reasoning_gym.score` for a completion, or `malformed` if it has no answer to score.

    Raise KeyError if the problem was not made by the task reasoning-gym.
    """
    name, options, entry = (str(problem.extra[field]) for field in ("generator", "options", "entry"))
    answer = tagged_answer(text)
    return MALFORMED if answer is None else (name, options, entry, answer)


def read_plain_number(answer: str) -> Number | None:
    r"""Read a number as `read_number` does, also one in math delimiters or fonts: `$18$ dollars`, `\mathbf{18}`."""
    return read_number(answer) or read_number(FONT.sub(r" \1 ", _DISPLAY_COMMANDS.sub(" ", answer)))


def without_remark(answer: str) -> str:
    """Remove a remark after a plain number: "18 because 9 * 2 = 18", "18 dollars (nine eggs at $2 each)".

    A remark begins with "because" or "since", or is a phrase in parentheses at the end. The value
    before the remark counts, so that an equation in a remark is not taken for the answer.
    """
    remark = _REMARK.search(answer)
    if remark is None:
        return answer
    text = remark["text"]
    if text is not None and (not _PROSE.search(text) or _NOT_A_REMARK.search(text)):
        return answer
    stated = unwrap(answer[: remark.start()])
    return stated if read_plain_number(right_hand_side(stated)) else answer


def right_hand_side(answer: str) -> str:
    """Return the text to the right of the last equals sign, or all of `answer` if there is none."""
    return _EQUALS.split(answer)[-1].strip()


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
    if choice := _CHOICE.fullmatch(text):
        return choice[1] or choice[2]
    return text.casefold() if _WORDS.fullmatch(text) else text


def tagged_answer(text: str) -> str | None:
    """Return the content of the last <answer>...</answer> pair without surrounding space.

    The pairs are those of `reasoning_gym.utils.extract_answer`: from left to right, an opening tag and the first
    closing tag after it. Its regular expression takes quadratic time for many opening tags, this function linear time.
    Return None if there is no pair, and for an answer of more than `MAX_TAGGED_CHARS` characters.
    """
    *beginnings, _ = text.split("</answer>")
    for beginning in reversed(beginnings):
        _, tag, content = beginning.partition("<answer>")
        if tag:
            answer = content.strip()
            return answer if len(answer) <= MAX_TAGGED_CHARS else None
    return None


def voted_answer(text: str, grader: str) -> str | None:
    r"""Return the final answer of a completion in canonical form, for majority votes.

    Plain numbers vote by value (0.50 votes with 1/2; 50% does not vote with 0.5, because either value may be meant).
    Other answers vote by their text without LaTeX commands that only change the appearance. Expressions that are equal
    in value alone (2\sqrt{2} and \sqrt{8}) are different votes. For the grader `number`, an answer that is not a plain
    number does not vote, and the right-hand side of an equation votes. For `countdown`, the complete text votes,
    without its spaces.

    Equal votes get equal grades, with two exceptions. Votes ignore units: 5 cm votes with 5 km. A decimal may stand for
    a fraction: for the reference 1/3, `math` accepts 0.333333, and neither 0.3333330 nor 333333/1000000. A custom
    grader votes like `math`.

    Returns:
        The canonical form, or None if the completion has no answer of at most `MAX_ANSWER_CHARS` characters.
    """
    path = GRADERS[grader].vote if grader in GRADERS else GraderEntry.vote
    answer: str | None = load_attribute(path)(text)
    return answer


def vote_expression(text: str) -> str | None:
    """Return the vote of a completion for the grader `math` and for custom graders."""
    answer = _final_answer(text)
    number = read_plain_number(answer)
    return str(number) if number and not number.has_letter else canonical_text(answer) or None


def vote_number(text: str) -> str | None:
    """Return the vote of a completion for the grader `number`."""
    number = read_plain_number(right_hand_side(_final_answer(text)))
    return None if number is None else str(number)


def vote_countdown(text: str) -> str | None:
    """Return the vote of a completion for the grader `countdown`: the complete text without spaces."""
    answer = text.strip()
    return _FREE_SPACES.sub("", answer) or None if len(answer) <= MAX_ANSWER_CHARS else None


def vote_tagged(text: str) -> str | None:
    """Return the vote of a completion: its answer in tags with single spaces."""
    return " ".join((tagged_answer(text) or "").split()) or None


def _final_answer(text: str) -> str:
    """Return the final answer without a remark; '' if there is none or it is too long."""
    answer = final_answer(text) or ""
    return without_remark(unwrap(tidy(answer))) if len(answer) <= MAX_ANSWER_CHARS else ""


def reference_of(problem: Problem) -> str:
    """Return the reference in the form of a final answer."""
    return without_remark(unwrap(tidy(unwrap(problem.answer))))
