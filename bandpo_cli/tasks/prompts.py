"""Prompts: the template, `task.template`, with the question in it. `datasets.TEMPLATES` has the known templates."""

from bandpo_cli.datasets import TEMPLATES
from bandpo_cli.types import Message, Prompt

_SLOT = "{question}"


def build_prompt(question: Prompt, template: str, system: str | None = None) -> Prompt:
    """Return the chat messages: the system message, if any, then the template filled with the question.

    The template is a name in `TEMPLATES` or a text with `{question}` in it. An instruction of a known template replaces
    one that came with the question; it is not added around it. The slot is replaced literally, because questions
    contain many braces. Chat messages are a complete prompt, and are returned unchanged.
    """
    if not isinstance(question, str):
        return question
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
