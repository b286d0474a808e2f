"""Tasks: their interface, the task of a config, prompts from questions, and the stream of shuffled problems."""

import random
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

from bandpo_cli.config.task import TaskSettings, check_package
from bandpo_cli.registries import TASKS, TEMPLATES, load_attribute, task_kind
from bandpo_cli.types import Message, Problem, Prompt

_SLOT = "{question}"
_MAX_MARKS = 30  # combining characters in a row; no language uses more than four
_GRAPHEME_JOINER = "\u034f"


class Task(Protocol):
    """A source of training problems and evaluation sets, which share no problem id.

    The sequences are the same on every machine and in every process, and any prefix of one is a fair sample of it.
    """

    @property
    def name(self) -> str:
        """The name of the task in the config."""

    def train_problems(self) -> Sequence[Problem]:
        """Return the problems to train on."""

    def heldout_sets(self) -> Mapping[str, Sequence[Problem]]:
        """Return the evaluation sets by label, the `<task>` of the metric names `eval/<task>/...`."""

    def notes(self) -> list[str]:
        """Return lines for the user on the problems read so far: counts, and what was dropped and why."""


def build_task(config: TaskSettings) -> Task:
    """Return the task of these settings; raise ConfigError if they leave it no problems, or its package is missing.

    Files and data sets are read, and raise ConfigError, when their problems are first needed.
    """
    check_package(config.name)
    task: Task = load_attribute(TASKS[task_kind(config.name)].build)(config)
    return task


def text_hash(text: str) -> str:
    """Return a hash of a text (16 hex digits) that is the same on every machine, unlike the built-in hash()."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def hash_order(problems: Iterable[Problem]) -> list[Problem]:
    """Sort by a hash of the id, so that any prefix is a fair sample, independent of the order of the rows."""
    return sorted(problems, key=lambda problem: (text_hash(problem.id), problem.id))


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


def without_spaces(texts: Iterable[str]) -> list[str]:
    """Return texts without spaces and without different forms of a character, which tokenizers may change."""
    return ["".join(compatibility_form(text).split()) for text in [*texts]]


def compatibility_form(text: str) -> str:
    """Return the NFKC form of a text in time linear in its length.

    `unicodedata.normalize` sorts the marks after a letter by insertion, which takes minutes for 100,000 of them. So
    a joiner splits the marks after each 30th, as in the Stream-Safe Text Format of Unicode (UAX #15, section 13). Texts
    with fewer marks in a row are not changed.
    """
    if text.isascii():
        return text
    chars: list[str] = []
    marks = 0
    for char in "".join(unicodedata.normalize("NFKD", char) for char in text):
        marks = marks + 1 if unicodedata.combining(char) else 0
        if marks > _MAX_MARKS:
            chars.append(_GRAPHEME_JOINER)
            marks = 1
        chars.append(char)
    return unicodedata.normalize("NFKC", "".join(chars))


class ProblemStream:
    """An endless stream of shuffled epochs: the problem at position i is a pure function of (problems, seed, i).

    `position`, the number of problems returned so far, is the only state: a checkpoint stores it.
    """

    def __init__(self, problems: Sequence[Problem], seed: int, position: int = 0) -> None:
        """Create a stream; raise ValueError if `problems` is empty."""
        if not problems:
            raise ValueError("a stream needs at least one problem")
        self._problems, self._seed, self.position = problems, seed, position
        self._epoch, self._order = -1, [0]

    def next(self, count: int) -> list[Problem]:
        """Return the next `count` problems and advance the position; raise the same error as `take`."""
        problems = self.take(self.position, count)
        self.position += count
        return problems

    def take(self, position: int, count: int) -> list[Problem]:
        """Return the problems from `position` on, over epochs; raise ValueError for negative numbers."""
        if position < 0 or count < 0:
            raise ValueError(f"position {position} and count {count} must not be negative")
        problems = []
        for index in range(position, position + count):
            epoch, offset = divmod(index, len(self._problems))
            if epoch != self._epoch:
                # Python guarantees the same random() for a seed in every version, but not the same shuffle().
                rng = random.Random(f"{self._seed}/{epoch}")
                keys = [rng.random() for _ in self._problems]
                self._epoch, self._order = epoch, sorted(range(len(keys)), key=keys.__getitem__)
            problems.append(self._problems[self._order[offset]])
        return problems
