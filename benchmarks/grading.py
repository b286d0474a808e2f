"""Benchmark of grading: verdicts on real reference answers, answers per second, and hostile answers.

    python benchmarks/grading.py [--data FOLDER] [--workers N] [--deadline SECONDS]

FOLDER contains files of problems, one JSON object per line, with the reference in `answer` or at the end of
`solution`. Each reference is graded after its worked solution in two forms, and must be correct. Then the references
are shuffled among the problems, and must be wrong if Python reads the two as different numbers or texts.
"""

import json
import random
import time
from collections import Counter
from pathlib import Path

from hostile_answers import HOSTILE
from shared import command_line

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.grading.answers import final_answer
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.types import Problem

LINE, BOX = "%s\nAnswer: %s", "%s\nSo it is $\\boxed{%s}$."


def worked_answers(path: Path) -> list[tuple[str, str]]:
    """Return (solution, reference answer) of each row."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    solutions = [row.get("solution", str(row.get("answer", ""))) for row in rows]
    golds = [str(row.get("answer", solution)) for row, solution in zip(rows, solutions, strict=True)]
    return [(solution, final_answer(gold) or gold) for solution, gold in zip(solutions, golds, strict=True)]


def differ(first: str, second: str) -> bool:
    """Return True if two answers differ as Python numbers, or as texts if they are not numbers."""
    try:
        return float(first.replace(",", "")) != float(second.replace(",", ""))
    except ValueError:
        return first != second


def grade(pool: GraderPool, golds: list[str], texts: list[str]) -> tuple[Counter[str], float]:
    """Return the number of answers per verdict, and the answers per second."""
    problems = [Problem(str(index), "", gold, "benchmark", "math") for index, gold in enumerate(golds)]
    start = time.perf_counter()
    grades = pool.grade(problems, texts)
    return Counter(grade.verdict for grade in grades), len(texts) / (time.perf_counter() - start)


def real_answers(pool: GraderPool, path: Path) -> str:
    """Return the row of the table for one file."""
    rows = worked_answers(path)
    golds = [gold for _, gold in rows]
    line, line_rate = grade(pool, golds, [LINE % row for row in rows])
    box, _ = grade(pool, golds, [BOX % row for row in rows])
    others = random.Random(0).sample(golds, len(golds))
    pairs = [pair for pair in zip(golds, others, strict=True) if differ(*pair)]
    wrong, wrong_rate = grade(pool, [gold for gold, _ in pairs], [f"Answer: {other}" for _, other in pairs])
    counts = f"{len(rows):6} {line['correct']:10} {box['correct']:10} {wrong['wrong']:8} of {len(pairs):5}"
    return f"{path.stem:16} {counts} {line_rate:14,.0f} {wrong_rate:14,.0f}"


def main() -> None:
    """Print a table for the files in the folder, then a summary for hostile answers."""
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, help="folder with .jsonl files of problems")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=1.0, help="seconds per answer, for hostile answers")
    options = parser.parse_args()
    if options.data:
        columns = f"{'rows':>6} {'Answer:':>10} {'boxed':>10} {'shuffled, wrong':>17}"
        print(f"{'file':16} {columns} {'own, per s':>14} {'shuffled':>14}")
        with GraderPool(GradingConfig(workers=options.workers)) as pool:
            for path in sorted(options.data.glob("*.jsonl")):
                print(real_answers(pool, path), flush=True)
    texts = [text for hostile in HOSTILE for text in (hostile, "Answer: 2+3")]
    with GraderPool(GradingConfig(workers=options.workers, deadline=options.deadline)) as pool:
        start = time.perf_counter()
        verdicts = [
            grade.verdict for grade in pool.grade([Problem("5", "", "5", "b", "math")] * len(texts), texts)
        ]
        seconds = time.perf_counter() - start
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(verdicts[::2]).most_common())
    ordinary = f"{verdicts[1::2].count('correct')} of {len(HOSTILE)} ordinary answers between them correct"
    print(f"{len(HOSTILE)} hostile answers: {counts}; {ordinary}; {seconds:.0f} s")


if __name__ == "__main__":
    main()
