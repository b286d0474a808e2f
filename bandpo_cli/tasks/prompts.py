"""From a question to what is put before the model."""

from __future__ import annotations

from bandpo_cli.types import Message, Prompt

_SLOT = "{question}"

TEMPLATES = {
    # arXiv 2603.04918 trains with this, as DAPO does.
    "answer-line": "Solve the following math problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    "{question}\n\n"
    'Remember to put your answer on its own line after "Answer:".',
    "boxed": "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "plain": "{question}",
}
"""The user messages known by name. The slot is filled in literally: questions are full of braces."""


def build_prompt(question: str, template: str, system: str | None = None) -> Prompt:
    """Return the chat messages: `system`, if any, then the template (a known name or a text) with the question.

    An instruction of the known templates is put in place of one that came with the question, not around it.
    """
    text = TEMPLATES.get(template, template)
    if template in TEMPLATES and text != _SLOT:
        question = bare_question(question)
    user = Message("user", text.replace(_SLOT, question))
    return (user,) if system is None else (Message("system", system), user)


def bare_question(text: str) -> str:
    """Take a known instruction off again, as data sets bring some with their questions."""
    for template in TEMPLATES.values():
        before, _, after = template.partition(_SLOT)
        if (before or after) and text.startswith(before) and text.rstrip().endswith(after):
            return text.rstrip()[len(before) :].removesuffix(after)
    return text
