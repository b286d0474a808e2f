"""Extraction of final answers in the forms of models and data sets, from any text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandpo_cli.grading.answers import MAX_CHARS, final_answer, unwrap

ANSWERS = [
    ("Answer: 18", "18"), ("so it is 18.\nAnswer: 18.", "18"), ("answer : $18$\nbye", "18"),
    ("So the result of 7 * 9 is answer: 63.", "63"), ("Then my_answer: 5 and Answers: 7", "5 and Answers: 7"),
    ("**Answer:** 18", "18"), ("**Answer**: $\\frac{1}{2}$.", "\\frac{1}{2}"), ("### Final Answer: \\(x^2\\)", "x^2"),
    ("Answer: **18**", "18"), ("ANSWER:18", "18"), ("Answer：18。", "18"), ("Answer: $5", "$5"),
    ("Answer: $3$ and $4$", "$3$ and $4$"), ("Answer: 1\nAnswer: 2", "2"), ("\\boxed{18}", "18"),
    ("is \\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"), ("\\fbox{7} or \\framebox{8}", "8"), ("\\boxed {7}", "7"),
    ("$\\boxed 7$", "7"), ("\\boxed{\\left\\{1, 2\\right.}", "\\left\\{1, 2\\right"),
    ("Answer: \\boxed{\\{1\\}} is it", "\\{1\\}"), ("\\boxed{1}\nAnswer: 2", "2"), ("Answer: 2\n\\boxed{1}", "1"),
    ("She makes $18.\n#### 18", "18"), ("#### 1,000\n", "1,000"), ("Answer: 2\n#### 3", "3"), ("#### Answer: 3", "3"),
    ("| Answer: | -18 |\n", "-18"), ("| x | 5 |\n | **Answer:** 18 dollars |", "18 dollars"),
    ("|x| = 2\nAnswer: |-2|", "|-2|"), ("It is \\boxed{5}. (I used \\boxed as asked.)", "5"),
    ("<answer>Answer: 18</answer>", "18"), ("Answer: 18,", "18"), ("Answer: '18';", "18"),
    ("Answer: 0.333...", "0.333..."), ("Answer: 18 ...", "18..."), ("Answer: Monday...", "Monday"),
    ("<think>\\boxed{4}?</think>\\boxed{5}", "5"), ("maybe \\boxed{4}</think>\nAnswer: 5", "5"),
]  # fmt: skip


NO_ANSWERS = [
    "", "18", "the answer is 18", "the answer is: 18", "Answers: 18", "Reanswer: 18", "Answer:", "Answer: **.**",
    "####", "x #### 3", "##### 3", "\\boxed", "\\boxed{18", "\\boxed{}", "\\boxed}1{", "\\boxedx{1}",
    "\\boxed 1 \\boxed{{1}", "Answer: 1 \\boxed{1", "<think>maybe \\boxed{5}, let me check",
    "<think>\\boxed{5}</think>It is five.", "\\boxed{5}</think>",
]  # fmt: skip


def test_final_answers_in_known_forms_and_texts_without_one():
    assert [(text, final_answer(text)) for text, _ in ANSWERS] == ANSWERS
    assert {final_answer(text) for text in NO_ANSWERS} == {None}


def test_only_the_end_of_a_text_is_searched():
    assert final_answer("Answer: 5\n" + "x" * (MAX_CHARS - 10)) == "5"
    assert final_answer("Answer: 5\n" + "x" * MAX_CHARS) is None


@given(st.text(alphabet="{}\\ab", max_size=30))
def test_braces_are_balanced_as_by_a_simple_counter(inside):
    def closes_at(text: str) -> int | None:
        depth, position = 1, 0
        while position < len(text):
            if text[position] == "\\":
                position += 1
            elif text[position] in "{}":
                depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return position
            position += 1
        return None

    end = closes_at(inside + "}")
    assert final_answer("\\boxed{" + inside + "}") == (None if not end else inside[:end])


@pytest.mark.slow
@given(st.text(), st.sampled_from(["", "Answer: ", "\\boxed{", "#### "]), st.text())
def test_any_text_is_accepted(before, marker, after):
    answer = final_answer(before + marker + after)
    assert answer is None or (answer and unwrap(answer) == answer)
