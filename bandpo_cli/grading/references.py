"""References that the grader `math` cannot parse: only an answer with the same text is correct for them."""

import re
from collections.abc import Iterable
from contextlib import closing

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.errors import plural
from bandpo_cli.grading.answers import FONT, read_plain_number, reference_of
from bandpo_cli.grading.workers import GraderWorkers
from bandpo_cli.types import Problem

MAX_PARSED = 200
"""Different references that are parsed, evenly spaced among those that are neither numbers nor words."""
_WORDS = re.compile(r"[A-Za-z .,;'()-]*")


def unparsed_references(problems: Iterable[Problem], config: GradingConfig) -> str | None:
    """Return a line with the number of references that the grader `math` cannot parse and the first three, or None.

    Plain numbers and words need no parser: without other references no worker process is spawned.
    """
    golds = {reference_of(problem): problem.answer for problem in problems}
    formulas = [
        gold for gold in golds if not (read_plain_number(gold) or _WORDS.fullmatch(FONT.sub(r"\1", gold)))
    ]
    sample = formulas[:: -(-len(formulas) // MAX_PARSED) or 1]
    if not sample:
        return None
    with closing(GraderWorkers("math", config, size=1)) as workers:
        batches = [[index] for index in range(len(sample))]
        keys = workers.submit([(gold, gold) for gold in sample], sample, batches)
        grades = workers.wait(keys, lambda graded, label: None)
    unparsed = [gold for gold, grade in zip(sample, grades, strict=True) if not grade.correct]
    if not unparsed:
        return None
    count = f"{len(unparsed):,} of {len(sample):,} references that are formulas cannot be parsed"
    of_all = "" if len(sample) == len(formulas) else f" (a sample of {plural(len(formulas), 'formula')})"
    first = ", ".join(f"{golds[gold]!r:.60}" for gold in unparsed[:3])
    return f"grader 'math': {count}{of_all}, so that only the same text is correct: {first}"
