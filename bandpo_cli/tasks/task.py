"""Tasks: their interface, prompts from questions, the stream of shuffled problems, and the generated arithmetic."""

import random
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import combinations, combinations_with_replacement, product
from math import prod
from operator import itemgetter

from bandpo_cli.config.task import CalculatorTask, CountdownTask, TaskSettings, check_package
from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import TASKS, TEMPLATES, load_attribute, task_kind
from bandpo_cli.types import Message, Problem, Prompt

_SLOT = "{question}"
_MAX_MARKS = 30  # combining characters in a row; no language uses more than four
_GRAPHEME_JOINER = "\u034f"


class Task:
    """A source of training problems and evaluation sets, which share no problem id.

    The sequences are the same on every machine and in every process, and any prefix of one is a fair sample of it.
    """

    def __init__(
        self,
        name: str,
        train: Callable[[], Sequence[Problem]],
        heldout: Callable[[], Mapping[str, Sequence[Problem]]],
    ) -> None:
        self.name = name  # in the config
        self.notes: list[str] = []  # for the user: counts, and what was dropped and why
        self.train_problems = cache(train)  # the first call makes them, and may raise ConfigError
        self.heldout_sets = cache(heldout)  # by label, the `<task>` of the metric names `eval/<task>/...`


def build_task(config: TaskSettings) -> Task:
    """Return the task of these settings; raise ConfigError if they leave it no problems, or its package is missing.

    Files and data sets are read, and raise ConfigError, when their problems are first needed.
    """
    entry = TASKS[task_kind(config.name)]
    check_package(entry)
    task: Task = load_attribute(entry.build)(config)
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
    contain many braces. Chat messages get no template, and the system message only if they have none.
    """
    first = () if system is None else (Message("system", system),)
    if not isinstance(question, str):
        return question if question[0].role == "system" else (*first, *question)
    text = TEMPLATES.get(template, template)
    if template in TEMPLATES and text != _SLOT:
        question = bare_question(question)
    return (*first, Message("user", text.replace(_SLOT, question)))


def bare_question(text: str) -> str:
    """Remove a known instruction around a question, because some data sets include it in their questions."""
    for template in TEMPLATES.values():
        before, _, after = template.partition(_SLOT)
        if (before or after) and text.startswith(before) and text.rstrip().endswith(after):
            return text.rstrip()[len(before) :].removesuffix(after)
    return text


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


@dataclass
class ProblemStream:
    """An endless stream of shuffled epochs: the problem at position i depends on (problems, seed, i) alone."""

    problems: Sequence[Problem]
    seed: int
    position: int = 0  # the number of problems returned so far, the only state, which a checkpoint stores
    _epoch: int = -1
    _order: Sequence[int] = ()

    def next(self, count: int) -> list[Problem]:
        """Return the next `count` problems and advance the position."""
        problems = self.take(self.position, count)
        self.position += count
        return problems

    def take(self, position: int, count: int) -> list[Problem]:
        """Return the problems from `position` on, over epochs."""
        problems = []
        for index in range(position, position + count):
            epoch, offset = divmod(index, len(self.problems))
            if epoch != self._epoch:
                # Python guarantees the same random() for a seed in every version, but not the same shuffle().
                rng = random.Random(f"{self.seed}/{epoch}")
                keys = [rng.random() for _ in self.problems]
                self._epoch, self._order = epoch, sorted(range(len(keys)), key=keys.__getitem__)
            problems.append(self.problems[self._order[offset]])
        return problems


CALCULATOR_FACTORS = range(11, 100)  # The factors of a product in the task `calculator`
CALCULATOR_HELDOUT = 0.1  # Share of the problems of `calculator` that are held out


def _split(name: str, ranked: list[tuple[float, Problem]], heldout_fraction: float) -> Task:
    """Return a task that holds out the problems with a hash below `heldout_fraction`, of `ranked` hashes in [0, 1).

    A hash of a problem alone decides whether it is held out, so that it is on the same side in every run, on every
    machine and under all other settings, and no training (including a warm start) can use a held-out problem.
    """
    ranked = sorted(ranked, key=itemgetter(0))
    split = sum(rank < heldout_fraction for rank, _ in ranked)
    problems = [problem for _, problem in ranked]
    return Task(name, lambda: problems[split:], lambda: {name: problems[:split]})


def countdown(config: CountdownTask) -> Task:
    """Return the task whose answer to "1 3 7 8=28:" is an expression that uses each number once, as "3*7+8-1".

    Raise ConfigError if the settings leave no training or no held-out problem.
    """
    ranked = []
    for chosen in combinations_with_replacement(range(1, config.max_number + 1), config.numbers):
        numbers = " ".join(map(str, chosen))
        # Each target has an answer without parentheses, which has 2·numbers − 1 symbols.
        for target in sorted({value for value, has_plus in _signed_sums(chosen) if has_plus}):
            if config.min_target <= target <= config.max_target:
                key, extra = f"{numbers}={target}", {"numbers": numbers}
                problem = Problem(f"countdown/{key}", f"{key}:", str(target), "countdown", "countdown", extra)
                digest = blake2b(key.encode(), digest_size=6).digest()
                ranked.append((int.from_bytes(digest) / 2**48, problem))
    task = _split("countdown", ranked, config.heldout_fraction)
    heldout = task.heldout_sets()["countdown"]
    if not heldout or not task.train_problems():
        raise ConfigError(
            f"task: numbers={config.numbers}, max_number={config.max_number}, min_target={config.min_target}, "
            f"max_target={config.max_target} allow {len(ranked)} problems, of which heldout_fraction="
            f"{config.heldout_fraction} holds out {len(heldout)}; training and evaluation need at least one each"
        )
    return task


def calculator(config: CalculatorTask) -> Task:
    """Return the task whose answer to `37*58+9=` is 2155, which a model of any size can get from its tool.

    There is a problem for every pair of factors. The hash of the pair also decides on the third number.
    """
    ranked = []
    for first, second in product(CALCULATOR_FACTORS, CALCULATOR_FACTORS):
        digest = blake2b(f"{first}*{second}".encode(), digest_size=8).digest()
        third, is_plus = 1 + digest[6] % 99, digest[7] % 2 == 0
        expression = f"{first}*{second}{'+' if is_plus else '-'}{third}"
        answer = first * second + (third if is_plus else -third)
        prompt = (Message("user", f"{expression}="),)
        problem = Problem(f"calculator/{expression}", prompt, str(answer), "calculator", "gsm8k-flexible")
        ranked.append((int.from_bytes(digest[:6]) / 2**48, problem))
    return _split("calculator", ranked, CALCULATOR_HELDOUT)


@cache
def _signed_sums(numbers: tuple[int, ...]) -> frozenset[tuple[int, bool]]:
    """Return all values of ±product ±product ..., each number in one product, and whether a product has a plus.

    An expression without parentheses is such a sum with at least one plus, because its first product has no sign. The
    function chooses the product with the first number, and recursion does the rest.
    """
    if not numbers:
        return frozenset({(0, False)})
    first, others = numbers[0], range(1, len(numbers))
    sums = set()
    for size in range(len(numbers)):
        for chosen in combinations(others, size):
            term = first * prod(numbers[i] for i in chosen)
            rest = tuple(numbers[i] for i in others if i not in chosen)
            for value, has_plus in _signed_sums(rest):
                sums.add((value + term, True))
                sums.add((value - term, has_plus))
    return frozenset(sums)
