r"""Final answers: extraction from a text, comparison as numbers and as text, and majority votes.

Three forms of a final answer are recognised, and the one that starts last in the text counts: a line `Answer: 18`, a
`\boxed{18}`, and GSM8K's line `#### 18`. The running time is linear in the last `MAX_CHARS` characters of the text.

`grade_number` is the complete grader `number`. `grade_math` is the first stage of the grader `math`: it decides what
plain numbers and equal texts can decide, and leaves the rest to `grading.symbolic`. `grade_tagged` is the first stage
of the grader `reasoning-gym`: it extracts the answer that `grading.gym_scores` scores.
"""

import re
from collections import deque
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.errors import plural
from bandpo_cli.grading.quantities import (
    DISPLAY_COMMANDS,
    FONT,
    equal,
    in_unit_of,
    read_plain_number,
    rounds_to,
)
from bandpo_cli.grading.rewrites import MAX_ANSWER_CHARS, tidy
from bandpo_cli.grading.workers import GraderWorkers
from bandpo_cli.registries import GRADERS, GraderEntry, load_attribute
from bandpo_cli.types import (
    ANSWER_GRADER,
    COIN,
    CORRECT,
    ENVIRONMENT_REWARD,
    MALFORMED,
    WRONG,
    Grade,
    Problem,
)

MAX_CHARS = 20_000  # Number of characters at the end of a text that are searched

_BOX = r"\\(?:boxed|fbox|framebox)(?![A-Za-z])(?=\s*\{|[ \t]+(?![A-Za-z]{2})[^\s\\{}$])"
_LABEL = r"(?<![A-Za-z])answer[ \t*_]*[:：]"
_HASHES = r"^[ \t]*####(?!#)"
_MARKER = re.compile(f"(?P<box>{_BOX})|(?i:{_LABEL})|{_HASHES}", re.MULTILINE)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is part of the content
_BARE = re.compile(r"[ \t]+([^\s\\{}$]+)")  # "\boxed 5", as in some solutions of MATH
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("'", "'"), ('"', '"'), ("“", "”"))
_THINKING, _END_OF_THINKING = "<think>", "</think>"
_LEADING = " \t\r\n*`"
_TRAILING = ".。,;*`" + "".join(char for char in map(chr, range(0x3001)) if char.isspace())

MAX_PARSED = 200
"""Different references that are parsed, evenly spaced among those that are neither numbers nor words."""
MAX_TAGGED_CHARS = 20_000
"""Longer answers in <answer> tags are malformed. The longest reference of reasoning-gym has about 4,000 characters."""

_SPACES = re.compile(r"\\(?:quad|qquad)(?![A-Za-z])|\\[,;:! ]|~")
_FRACTIONS = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_FREE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")
_EMPTY_SET = re.compile(r"\\varnothing(?![A-Za-z])|\\\{ *\\\}")
_REFERENCE_WORDS = re.compile(r"[A-Za-z .,;'()-]*")
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


def final_answer(text: str) -> str | None:
    r"""Return the answer in the last `Answer: ...` line, `\boxed{...}` or `#### ...` line of `text`, unwrapped.

    Text up to the last `</think>` is not searched. Return None if there is none of the forms, or if the last one is
    empty or a box without a closing brace, or if `<think>` is not closed.
    """
    text = text.rpartition(_END_OF_THINKING)[2]
    if _THINKING in text:
        return None
    tail = text[-MAX_CHARS:]
    marker = next(iter(deque(_MARKER.finditer(tail), maxlen=1)), None)
    if marker is None:
        return None
    if marker["box"]:
        return _box_content(tail, marker.end())
    line = tail[marker.end() :].partition("\n")[0].partition("</answer>")[0]
    if tail[tail.rfind("\n", 0, marker.start()) + 1 : marker.start()].lstrip().startswith("|"):
        line = line.strip("| \t\r")  # a row of a Markdown table; elsewhere |-18| is an absolute value
    return unwrap(line) or None


def unwrap(answer: str) -> str:
    r"""Return the answer without its formatting: spaces, `$...$`, `\(...\)`, `**...**`, full stops, commas."""
    while True:  # at most five rounds: a wrapper is removed only if none of its kind is inside
        stripped = answer.rstrip(_TRAILING)
        goes_on = stripped[-1:].isdigit() and answer[len(stripped) :].lstrip().startswith("...")  # 0.333...
        answer = f"{stripped}..." if goes_on else stripped
        answer = answer.lstrip(_LEADING)
        for left, right in _WRAPPERS:
            inner = answer[len(left) : -len(right)]
            if answer.startswith(left) and answer.endswith(right) and inner and left not in inner:
                answer = inner
                break
        else:
            return answer


def _box_content(text: str, start: int) -> str | None:
    """Return the content of the braces that open at `start`, or the word there; None without a closing brace."""
    bare = _BARE.match(text, start)
    if bare:
        return unwrap(bare[1]) or None
    depth, content_start = 0, -1
    for brace in _BRACE.finditer(text, start):
        if content_start < 0 and (brace[0] != "{" or text[start : brace.start()].strip()):
            return None
        if brace[0] == "{":
            content_start = brace.end() if content_start < 0 else content_start
            depth += 1
        elif brace[0] == "}":
            depth -= 1
            if depth == 0:
                return unwrap(text[content_start : brace.start()]) or None
    return None


def grade_number(problem: Problem, text: str) -> Grade:
    """Compare the final answer, or the right-hand side of an equation in it, with the reference as exact numbers.

    Another answer than a plain number is malformed. Raise ValueError if the reference is not a plain number.
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
    """Return the reward of the environment as a grade, correct from 1 on; raise KeyError or ValueError without one."""
    reward = problem.extra[ENVIRONMENT_REWARD]
    if not isinstance(reward, float):
        raise ValueError(reward)
    return replace(CORRECT if reward >= 1 else WRONG, reward=reward)


def grade_by_coin(problem: Problem, text: str) -> Grade:
    """Return the reward by the coin of the completion, which `with_coins` tossed; raise KeyError without one."""
    return CORRECT if problem.extra[COIN] else WRONG


def grade_form(problem: Problem, text: str) -> Grade:
    """Return reward 1 if the grader of the answers can read an answer in the text, correct or not.

    An answer for a custom grader is what majority votes take as the answer.
    """
    name = str(problem.extra[ANSWER_GRADER])
    if name not in GRADERS:
        return CORRECT if voted_answer(text, name) is not None else MALFORMED
    answered = replace(problem, answer=problem.answer or "1")  # any reference: it is not compared
    first = load_attribute(GRADERS[name].first_stage)(answered, text)
    return MALFORMED if first == MALFORMED else CORRECT


def grade_tagged(problem: Problem, text: str) -> Grade | tuple[str, str, str, str]:
    """Return the arguments of `gym_scores.score`, or `malformed` without an answer."""
    name, options, entry = (str(problem.extra[field]) for field in ("generator", "options", "entry"))
    answer = tagged_answer(text)
    return MALFORMED if answer is None else (name, options, entry, answer)


def without_remark(answer: str) -> str:
    """Remove a remark after a plain number: "18 because 9 * 2 = 18", "18 dollars (nine eggs at $2 each)".

    A remark begins with "because" or "since", or is a phrase in parentheses at the end.
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
    text = FONT.sub(r" \1 ", _FRACTIONS.sub(r"\\frac", _SPACES.sub(" ", DISPLAY_COMMANDS.sub(" ", answer))))
    text = _EMPTY_SET.sub(r"\\emptyset", text.replace(r"\%", "%"))
    text = _FREE_SPACE.sub("", " ".join(text.split())).removesuffix(".")
    if choice := _CHOICE.fullmatch(text):
        return choice[1] or choice[2]
    return text.casefold() if _WORDS.fullmatch(text) else text


def tagged_answer(text: str) -> str | None:
    """Return the content of the last <answer>...</answer> pair; None if there is none, or a longer one than the limit.

    The pairs are those of `reasoning_gym.utils.extract_answer`: from left to right, an opening tag and the first
    closing tag after it. Its regular expression takes quadratic time for many opening tags, this function linear time.
    """
    *beginnings, _ = text.split("</answer>")
    for beginning in reversed(beginnings):
        _, tag, content = beginning.partition("<answer>")
        if tag:
            answer = content.strip()
            return answer if len(answer) <= MAX_TAGGED_CHARS else None
    return None


def voted_answer(text: str, grader: str) -> str | None:
    r"""Return the final answer of a completion in canonical form, for majority votes; None if it has no short answer.

    Plain numbers vote by value (0.50 votes with 1/2, and not with 50%, because either value may be meant), other
    answers by their text: 2\sqrt{2} and \sqrt{8} are different votes. A custom grader votes like `math`. Equal votes
    get equal grades, with two exceptions. Votes ignore units: 5 cm votes with 5 km. For the reference 1/3, `math`
    accepts 0.333333, and neither 0.3333330 nor 333333/1000000.
    """
    path = GRADERS[grader].vote if grader in GRADERS else GraderEntry.vote
    answer: str | None = load_attribute(path)(text)
    return answer


def vote_expression(text: str) -> str | None:
    """Return the vote for the grader `math` and for custom graders."""
    answer = _final_answer(text)
    number = read_plain_number(answer)
    return str(number) if number and not number.has_letter else canonical_text(answer) or None


def vote_number(text: str) -> str | None:
    """Return the vote for the grader `number`: a plain number, which may be the right-hand side of an equation."""
    number = read_plain_number(right_hand_side(_final_answer(text)))
    return None if number is None else str(number)


def vote_countdown(text: str) -> str | None:
    """Return the vote for the grader `countdown`: the complete text without spaces."""
    answer = text.strip()
    return _FREE_SPACES.sub("", answer) or None if len(answer) <= MAX_ANSWER_CHARS else None


def vote_tagged(text: str) -> str | None:
    """Return the vote for the grader `reasoning-gym`: the answer in tags with single spaces."""
    return " ".join((tagged_answer(text) or "").split()) or None


def _final_answer(text: str) -> str:
    """Return the final answer without a remark; '' if there is none or it is too long."""
    answer = final_answer(text) or ""
    return without_remark(unwrap(tidy(answer))) if len(answer) <= MAX_ANSWER_CHARS else ""


def reference_of(problem: Problem) -> str:
    """Return the reference in the form of a final answer."""
    return without_remark(unwrap(tidy(unwrap(problem.answer))))


def unparsed_references(problems: Iterable[Problem], config: GradingConfig) -> str | None:
    """Return a line with the number of references that the grader `math` cannot parse and the first three, or None.

    Only an answer with the same text is correct for them. Plain numbers and words need no worker process.
    """
    golds = {reference_of(problem): problem.answer for problem in problems}
    formulas = [
        gold
        for gold in golds
        if not (read_plain_number(gold) or _REFERENCE_WORDS.fullmatch(FONT.sub(r"\1", gold)))
    ]
    sample = formulas[:: -(-len(formulas) // MAX_PARSED) or 1]
    if not sample:
        return None
    with closing(GraderWorkers("math", config, size=1)) as workers:
        batches = [[index] for index in range(len(sample))]
        grades = workers.wait(workers.submit([(gold, gold) for gold in sample], sample, batches))
    unparsed = [gold for gold, grade in zip(sample, grades, strict=True) if not grade.correct]
    if not unparsed:
        return None
    count = f"{len(unparsed):,} of {len(sample):,} references that are formulas cannot be parsed"
    of_all = "" if len(sample) == len(formulas) else f" (a sample of {plural(len(formulas), 'formula')})"
    first = ", ".join(f"{golds[gold]!r:.60}" for gold in unparsed[:3])
    return f"grader 'math': {count}{of_all}, so that only the same text is correct: {first}"
