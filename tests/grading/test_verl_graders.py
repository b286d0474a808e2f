r"""Graders of verl: verdicts computed by hand from the rules of `math_dapo.py` and `gsm8k.py` in verl.

`tests/integrations` compares the same graders with verl itself.
"""

import pytest

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.grading.answers import voted_answer
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.registries import GRADERS, load_attribute
from bandpo_cli.types import NOT_APPLICABLE, Problem


def verdict(grader: str, text: str, reference: str = "18") -> str:
    stage = load_attribute(GRADERS[grader].first_stage)
    return str(stage(Problem("p", "?", reference, "s", grader), text).verdict)


ANSWER_LINES = {
    "correct": [
        "Answer: 18", "answer :  18", "ANSWER:\n\n18", "Answer: 17\nAnswer: 18", "Answer: 18\n\nExplanation: 9 * 2",
        "Answer: 9 * 2 = 18", "Answer: 18 dollars", "Answer: $18.$", "Answer: $18 because 9 * 2 = 18",
        "Answer: the price is $18$ in all", "Answer: $18$ or $17$", "Answer: \\$18", "Answer: \\boxed{18}",
        "**Answer:** $\\boxed{18}$ eggs", "Answer: 18" + " " * 290,
    ],
    "wrong": [
        "Answer: 18\nAnswer: 17", "Answer: 18 dollars per day.", "Answer: 18.", "Answer: 18 (nine eggs at $2 each)",
        "**Answer:** 18", "Answer: eighteen", "Answer: 18 Answer: 18",
    ],
    "malformed": [
        "答案:18", "Answer：18", "The answer is 18.", "#### 18", "\\boxed{18}", "Answer:", "Answer: $$", "",
        "Answer: 18" + " " * 291,
    ],
}  # fmt: skip
"""The answer may be on a later line, the right-hand side of an equation counts, and a formula stands for its line."""


def test_math_dapo_reads_the_last_answer_line():
    for expected, texts in ANSWER_LINES.items():
        for text in texts:
            assert verdict("math-dapo", text) == expected, text
            boxed = "correct" if text == "\\boxed{18}" else expected
            assert verdict("math-dapo-boxed", text) == boxed, text


SAME_FORM = r"""
1,234 == 1234 | 1{,}234 == 1234 | \frac12 == \frac{1}{2} | \sqrt2 == \sqrt{2} | 90^\circ == 90 | 5\text{ cm} == 5
\text{Monday} == Monday | \textbf{(C)} == (C) | x = 5 == 5 | an apple == apple | 12 \mbox{ inches} == 12
3 \text{ and } 4 == 34
"""  # the last one: "and" becomes a comma, which is taken for a thousands separator
OTHER_FORM = r"""
0.5 == \frac{1}{2} | 18.0 == 18 | \dfrac{1}{2} == \frac{1}{2} | 1,2 == 1, 3 | 1,234.5 == 1234.5 | 2^{10} == 1024
monday == Monday
"""


@pytest.mark.parametrize(("pairs", "expected"), [(SAME_FORM, "correct"), (OTHER_FORM, "wrong")])
def test_math_dapo_compares_normal_forms_and_not_values(pairs, expected):
    for pair in pairs.strip().replace("\n", " | ").split(" | "):
        answer, reference = pair.split(" == ")
        assert verdict("math-dapo", f"Answer: {answer}", reference) == expected, pair
        assert verdict("math-dapo", f"Answer: {reference}", answer) == expected, pair


BOXES = {
    "correct": ["So it is \\boxed{18}.", "\\boxed{17} no, \\boxed{18}", "\\boxed{18}" + "." * 90],
    "wrong": ["\\boxed{\\frac{1}{2}}", "\\boxed{18 }", "\\boxed{18}\nAnswer: 17", "Answer: 17\n\\boxed{18}"],
    "malformed": ["\\boxed{18", "\\boxed{}", "\\boxed 18", "\\boxed{18}" + "." * 91],
}


def test_math_dapo_boxed_reads_a_box_if_there_is_no_answer_line():
    """Content and reference are compared unchanged."""
    for expected, texts in BOXES.items():
        assert {text: verdict("math-dapo-boxed", text) for text in texts} == dict.fromkeys(texts, expected)
    for box, reference in (("\\frac{1}{2}", "\\frac{1}{2}"), ("1,234", "1,234"), ("1234", "1,234")):
        expected = "correct" if box == reference else "wrong"
        assert verdict("math-dapo-boxed", f"\\boxed{{{box}}}", reference) == expected


GSM8K = {
    # 300 characters are read.
    ("correct", "correct"): ["#### 18", "#### 18 dollars at the farmers' market", "#### 17\n#### 18",
                             "#### 18" + " " * 293],
    ("correct", "wrong"): ["#### 18\nThat is 2 per egg"],
    ("wrong", "wrong"): ["#### 18.", "#### 18.0", "#### -18"],
    # A full stop alone is no number.
    ("malformed", "correct"): ["#### $18", "####18", "It costs 18 dollars.", "#### 18" + " " * 294],
    ("malformed", "wrong"): ["It costs 18.", "18, I think"],  # "18." and "18,"
    # The last match of "18 or so, I think" is the comma.
    ("malformed", "malformed"): ["#### eighteen", "#### ...", "18 or so, I think", "I do not know.", "",
                                 "18" + " " * 300],
}  # fmt: skip


def test_gsm8k_reads_the_last_hashes_or_the_last_number():
    for verdicts, texts in GSM8K.items():
        for text in texts:
            assert (verdict("gsm8k", text), verdict("gsm8k-flexible", text)) == verdicts, text


def test_a_reference_that_no_answer_can_equal_is_a_grader_error():
    references = ("\\frac{1}{2}", "eighteen", "...", "$18")
    for grader in ("gsm8k", "gsm8k-flexible"):
        with GraderPool(GradingConfig()) as pool:
            problems = [Problem("p", "?", reference, "s", grader) for reference in references]
            grades = pool.grade(problems, [f"#### {reference}" for reference in references])
            assert {grade.verdict for grade in grades} == {"grader-error"}
            assert "use the grader 'math'" in pool.uses[grader].error
            without = pool.grade([Problem("p", "?", "", "s", grader)], ["#### 18"])
            assert without == [NOT_APPLICABLE]
    assert verdict("math-dapo", "Answer: 18", "1" * 1000) == "wrong"
    with pytest.raises(ValueError, match="more than 1,000 characters"):
        verdict("math-dapo", "Answer: 18", "1" * 1001)


VOTES = [
    ("math-dapo", "Answer: $x = 1,234$ dollars", "1234"), ("math-dapo", "\\boxed{5}", None),
    ("math-dapo", "Answer: $$", None), ("math-dapo-boxed", "\\boxed{5}", "5"),
    ("math-dapo-boxed", "\\boxed{5}\nAnswer: 6", "6"), ("gsm8k", "9 eggs\n#### 1,234 dollars", "1234"),
    ("gsm8k", "1,234", None), ("gsm8k-flexible", "9 eggs, 1,234 dollars.", "1,234"),
    ("gsm8k-flexible", "nothing, really.", None),
]  # fmt: skip


def test_vote_is_the_text_that_is_compared():
    assert [(grader, text, voted_answer(text, grader) or None) for grader, text, _ in VOTES] == VOTES


UNITS = ["Answer:", "Answer: $", "\\boxed{", "\\text{", "#### ", "1,", "frac", "{", "\n", "-", "．", "\ud800"]


@pytest.mark.parametrize("grader", ["math-dapo", "math-dapo-boxed", "gsm8k", "gsm8k-flexible"])
def test_only_the_last_300_characters_are_graded(grader):
    """Each unit fills 10 million characters, so that a pattern that reads more of them does not end."""
    for unit in UNITS:
        tail = (unit * 300)[-290:] + "\nAnswer: 7"
        assert len(tail) == 300
        text = unit * (10**7 // len(unit)) + tail
        for reference in ("7", "18"):
            assert verdict(grader, text, reference) == verdict(grader, tail, reference)
        assert voted_answer(text, grader) == voted_answer(tail, grader)
