"""Scores of a corpus by `bandpo eval --samples`: verdicts by origin of the completions, rate, errors.

    python -m scripts.answer_corpus.score FILE [--grader math number]

FILE was written by `python -m scripts.answer_corpus`. Exit code 1: the command failed or printed a traceback, a
completion got no verdict for another reason than the time limit, or one with a wrong value is correct.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas


@dataclass(frozen=True)
class Score:
    """The outcome of one command.

    Attributes:
        verdicts: number of completions by origin (`sampled`, `right`, `wrong`, `unclear`) and verdict.
        false_positives: completions with a wrong value that are correct.
        summary: the line of the command with its rate.
        tracebacks: number of tracebacks in its output.
    """

    verdicts: Counter[tuple[str, str]]
    false_positives: tuple[str, ...]
    summary: str
    tracebacks: int

    @property
    def passed(self) -> bool:
        """Whether there are neither tracebacks nor grader errors nor false positives."""
        errors = sum(n for (_, verdict), n in self.verdicts.items() if verdict == "grader-error")
        return not (self.tracebacks or errors or self.false_positives)

    def table(self) -> str:
        """Return the number of completions per verdict, one line per origin and a line for all of them."""
        names = sorted({verdict for _, verdict in self.verdicts})
        lines = ["".join(f"{name:>12}" for name in ("origin", *names, "all"))]
        for origin in (*sorted({origin for origin, _ in self.verdicts}), "all"):
            counts = [
                sum(n for (o, v), n in self.verdicts.items() if v == name and origin in (o, "all"))
                for name in names
            ]
            lines.append(f"{origin:>12}" + "".join(f"{count:12,}" for count in (*counts, sum(counts))))
        return "\n".join(lines)


def score(corpus: Path, grader: str) -> Score:
    """Run the command on the corpus and compare its verdicts with the origins of the completions.

    Raises:
        subprocess.CalledProcessError: If the command fails; its output is printed.
    """
    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        command = [sys.executable, "-m", "bandpo_cli", "eval", "--samples", str(corpus.resolve())]
        command += ["--grader", grader, "--name", "scored", "--no-mlflow"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        output = done.stdout + done.stderr
        if done.returncode:
            print(output, file=sys.stderr)
            done.check_returncode()
        table = pandas.read_parquet(Path(folder) / "runs" / "scored" / "samples.parquet")
    summary = re.search(r"[^\n]*completions in [^\n]*", output)
    counts, false_positives = by_origin(corpus, table)
    return Score(counts, false_positives, summary[0].strip() if summary else "", output.count("Traceback"))


def by_origin(corpus: Path, table: pandas.DataFrame) -> tuple[Counter[tuple[str, str]], tuple[str, ...]]:
    """Return the number of completions by origin and verdict, and the correct ones with a wrong value.

    Args:
        corpus: The file of completions.
        table: Its `samples.parquet`, with `prompt`, `reference`, `text` and `verdict`.
    """
    # Equal completions of a problem get equal verdicts, so that the text identifies the verdict.
    columns = (table[name] for name in ("prompt", "reference", "text", "verdict"))
    verdicts = {(prompt, gold, text): verdict for prompt, gold, text, verdict in zip(*columns, strict=True)}
    counts: Counter[tuple[str, str]] = Counter()
    false_positives = []
    for row in map(json.loads, corpus.read_text(encoding="utf-8").splitlines()):
        for text, origin in zip(row["completions"], row["origins"], strict=True):
            kind = origin.split()[0]
            verdict = verdicts[row["question"], row["answer"], text]
            counts[kind, verdict] += 1
            if kind == "wrong" and verdict == "correct":
                false_positives.append(f"reference {row['answer']!r}, {origin}: {text[-80:]!r}")
    return counts, tuple(false_positives)


def main(arguments: Sequence[str] | None = None) -> int:
    """Score the corpus with each grader and print the tables; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.answer_corpus.score",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("corpus", type=Path, metavar="FILE")
    parser.add_argument("--grader", nargs="+", default=["number", "math"], metavar="NAME")
    options = parser.parse_args(arguments)
    passed = True
    for grader in options.grader:
        result = score(options.corpus, grader)
        print(f"{grader}: {result.summary}; tracebacks: {result.tracebacks}\n{result.table()}", flush=True)
        for line in result.false_positives:
            print(f"  correct in spite of a wrong value: {line}")
        passed &= result.passed
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
