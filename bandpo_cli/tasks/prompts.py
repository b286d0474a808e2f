"""Prompts: the templates of the user message, and the chat messages built from a question."""

from __future__ import annotations

from bandpo_cli.types import Message, Prompt

_SLOT = "{question}"

TEMPLATES = {
    # The prompt of arXiv 2603.04918 and of DAPO.
    "answer-line": "Solve the following math problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    "{question}\n\n"
    'Remember to put your answer on its own line after "Answer:".',
    "boxed": "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
    # verl's prompt for GSM8K.
    "hashes": '{question} Let\'s think step by step and output the final answer after "####".',
    "plain": "{question}",
}
"""The known user messages by name. The slot is replaced literally, because questions contain many braces."""


def build_prompt(question: str, template: str, system: str | None = None) -> Prompt:
    """Return the chat messages: the system message, if any, then the template filled with the question.

    The template is a name in `TEMPLATES` or a text with `{question}` in it. An instruction of a known template replaces
    one that came with the question; it is not added around it.
    """
    text = TEMPLATES.get(template, template)
    if template in TEMPLATES and text != _SLOT:
        question = bare_question(question)
    user = Message("user", text.replace(_SLOT, question))
    return (user,) if system is None else (Message("system", system), user)


def bare_question(text: str) -> str:
    """Remove a known instruction around a question, because some data sets include it in their questions."""
    for template in TEMPLATES.values():
        before, _, after = template.partition(_SLOT)
        if (before or after) and text.startswith(before) and text.rstrip().endswith(after):
            return text.rstrip()[len(before) :].removesuffix(after)
    return text
