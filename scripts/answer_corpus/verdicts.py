"""Table of the verdicts of all graders on the answer lines, for docs/grading.md.

    python -m scripts.answer_corpus.verdicts            # writes the table into docs/grading.md
    python -m scripts.answer_corpus.verdicts --check    # exit code 1 if the page has another table

The columns are the graders of the registry that find at least one of the lines correct.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bandpo_cli.config.run import GradingConfig
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.registries import GRADERS
from bandpo_cli.types import Problem
from scripts.answer_corpus.lines import LINES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "grading.md"
BEGIN, END = (
    "<!-- table of scripts/answer_corpus/verdicts.py -->",
    "<!-- end of the table -->",
)
REFERENCE = "18"
WORK = "She sells 9 eggs at $2 each."
"""The completion before its answer line; the reference does not occur in it."""


def verdicts(pool: GraderPool, grader: str, value: str) -> list[str]:
    """Return the verdict of a grader on each of the lines filled with `value`; the reference is 18."""
    texts = [f"{WORK}\n{line.fill(value)}" for line in LINES]
    return [grade.verdict for grade in pool.grade([_problem(grader)] * len(texts), texts)]


def table() -> str:
    """Return the table in Markdown."""
    with GraderPool(GradingConfig(workers=1, deadline=60)) as pool:
        columns = {grader: verdicts(pool, grader, REFERENCE) for grader in GRADERS}
    columns = {grader: given for grader, given in columns.items() if "correct" in given}
    rows = [["end of the completion", *map("`{}`".format, columns)], ["---"] * (len(columns) + 1)]
    rows += [
        [_code(str(line.fill(REFERENCE))), *given]
        for line, *given in zip(LINES, *columns.values(), strict=True)
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_table(page: str, new: str) -> str:
    """Return the text of the page with the new table between the two comments.

    Raises:
        ValueError: If the page does not have both comments.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN} and {END}")
    return f"{before}{begin}\n\n{new}\n{end}{after}"


def _problem(grader: str) -> Problem:
    return Problem("p", "How much does she make?", REFERENCE, "docs", grader)


def _code(text: str) -> str:
    """Return a code span for a cell of a table, with ⏎ for line breaks; double backticks where it has backticks."""
    fence = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{fence}{space}{text.replace(chr(10), '⏎').replace('|', chr(92) + '|')}{space}{fence}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the table; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.answer_corpus.verdicts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page with the table (docs/grading.md)")
    options = parser.parse_args(arguments)
    old = options.page.read_text(encoding="utf-8")
    new = with_table(old, table())
    if new == old:
        return 0
    if options.check:
        print(f"{options.page}: another table; run python -m scripts.answer_corpus.verdicts", file=sys.stderr)
        return 1
    options.page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
