"""Benchmark of `bandpo eval --samples`: stored completions of real mathematics scored per second.

    python benchmarks/rescoring.py --data FOLDER [--completions N] [--candidates C]

FOLDER contains files of problems, one JSON object per line, with the reference in `answer` or at the end of
`solution`. Every file gives the same number of completions, similar to those of a model: each begins with the worked
solution of its problem; 4 of 10 end in the reference in another form, 5 in one of C wrong answers (references of other
problems), 1 in no answer. The command runs in a subprocess; the rate that it prints excludes the start, and the wall
time includes it.
"""

import json
import random
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from grading import worked_answers
from shared import bandpo, command_line

FORMATS = (
    "%s\n\nAnswer: %s",
    "%s\n\nThe final answer is $\\boxed{%s}$.",
    "%s\n\nAnswer: $%s$.",
    "%s\n\n\\[\\boxed{ %s }\\]",
    "%s\n\n**Answer:** %s",
)


def rewritten(answer: str, rng: random.Random) -> str:
    """Return the answer in a random equivalent form."""
    forms = [answer, answer.replace(r"\frac", r"\dfrac")]
    if re.fullmatch(r"\d{4,}", answer):
        forms.append(f"{int(answer):,}")
    return rng.choice(forms)


def completions(path: Path, count: int, candidates: int, rng: random.Random) -> Iterator[dict[str, object]]:
    """Yield rows for one file with `count` completions in total."""
    rows = worked_answers(path)
    golds = [gold for _, gold in rows]
    share, extra = divmod(count, len(rows))
    for index, (solution, gold) in enumerate(rows):
        wrong = rng.sample(golds, min(candidates, len(golds)))
        texts = []
        for _ in range(share + (index < extra)):
            kind = rng.random()
            answer = rewritten(gold, rng) if kind < 0.4 else rng.choice(wrong)
            texts.append(
                solution[: len(solution) // 2] if kind > 0.9 else rng.choice(FORMATS) % (solution, answer)
            )
        if texts:
            yield {"question": f"{path.stem} {index}", "answer": gold, "completions": texts}


def main() -> None:
    """Write the file, score it, and print the rates."""
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--completions", type=int, default=10_000)
    parser.add_argument("--candidates", type=int, default=6)
    arguments = parser.parse_args()
    files = [path for path in sorted(arguments.data.glob("*.jsonl")) if "train" not in path.stem]
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        stored = Path(scratch) / "stored.jsonl"
        share = arguments.completions // len(files)
        rows = [row for path in files for row in completions(path, share, arguments.candidates, rng)]
        stored.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        latex = sum("\\" in str(row["answer"]) for row in rows)
        print(f"{len(files)} files, {len(rows):,} problems, {latex:,} with LaTeX in the reference")
        start = time.perf_counter()
        output = bandpo("eval", "--samples", str(stored), "--no-mlflow", "--k", "1")
        wall = time.perf_counter() - start
    print(next(line for line in output.splitlines() if "per second" in line))
    total = share * len(files)
    print(f"{wall:.1f} s in total, including start, reading and intervals: {total / wall:,.0f} per second")
    print("\n".join(line for line in output.splitlines() if line.startswith(("mean", "answer", "timeout"))))


if __name__ == "__main__":
    main()
