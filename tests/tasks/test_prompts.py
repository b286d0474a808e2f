"""Prompts: the known templates, custom templates and instructions around a question."""

from __future__ import annotations

from bandpo_cli.tasks.questions import build_prompt
from bandpo_cli.types import Message

PAPER = """Solve the following math problem step by step. The last line of your response should be of the form \
Answer: $Answer (without quotes) where $Answer is the answer to the problem.

What is $1+1$?

Remember to put your answer on its own line after "Answer:"."""


def test_prompt_of_the_paper_is_reproduced_exactly() -> None:
    assert build_prompt("What is $1+1$?", "answer-line") == (Message("user", PAPER),)


def test_boxed_plain_and_a_system_message() -> None:
    assert build_prompt("q", "boxed", "Be brief.") == (
        Message("system", "Be brief."),
        Message("user", "q\n\nPlease reason step by step, and put your final answer within \\boxed{}."),
    )
    assert build_prompt("q", "plain") == (Message("user", "q"),)


def test_hashes_is_the_prompt_of_verl_for_gsm8k() -> None:
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    assert build_prompt("q", "hashes") == (Message("user", f"q {instruction}"),)
    assert build_prompt(f"q {instruction}", "boxed") == build_prompt("q", "boxed")


def test_custom_template_is_filled_literally() -> None:
    (message,) = build_prompt("{x} \\1 {question} %s", "<{a}> {question} {0} %d")
    assert message.content == "<{a}> {x} \\1 {question} %s {0} %d"


def test_instruction_around_the_question_is_replaced() -> None:
    assert build_prompt(PAPER, "answer-line") == (Message("user", PAPER),)
    for end in ("", "\n", "  ", "\n\n \t"):
        assert build_prompt(PAPER + end, "boxed") == build_prompt("What is $1+1$?", "boxed")
    assert build_prompt(PAPER, "plain") == (Message("user", PAPER),)
    assert build_prompt(PAPER, "Q: {question}") == (Message("user", f"Q: {PAPER}"),)
