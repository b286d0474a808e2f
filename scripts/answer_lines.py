"""Answer lines as chat models write them, and what the graders make of them.

    python -m scripts.answer_lines table [--check]
    python -m scripts.answer_lines corpus SAMPLES --out FILE [--seed 0]
    python -m scripts.answer_lines score FILE [--grader number math]

`table` writes the verdict of each grader on each line into docs/grading.md; with --check it only compares, and the exit
code is 1 if the page has another table. `corpus` reads completions: the `samples.parquet` of an evaluation, or the
worked solutions of a problem file such as GSM8K's. To each completion it adds a copy that is cut off at random and ends
in a line with the right answer or with a wrong one. `bandpo eval --samples FILE` reads the result; its `origins`
describe each completion: `sampled`, or `right`, `wrong` or `unclear` (a hedged or truncated line) with the index of the
line. `score` runs that command with each grader and counts verdicts by origin; the exit code is 1 after a traceback, a
grader error, or a correct completion with a wrong value.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas

from bandpo_cli.config.batch_and_sampling import GradingConfig
from bandpo_cli.grading.answers import same_text
from bandpo_cli.grading.pool import GraderPool
from bandpo_cli.grading.quantities import equal, read_number
from bandpo_cli.registries import GRADERS
from bandpo_cli.types import Problem

PAGE = Path(__file__).resolve().parents[1] / "docs" / "grading.md"
BEGIN, END = "<!-- table of scripts/answer_lines.py -->", "<!-- end of the table -->"

VALUE, WORDS, CUT = "<value>", "<words>", "<cut>"
"""Placeholders of a template: the value, the value in words, and the first half of the characters of the value."""
_NUMBERS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip


_ANSWERS = (
    "Answer: <value>",
    "Answer: <value> dollars per day.",
    "Answer: **<value>** dollars",
    "**Answer:** $\\boxed{<value>}$ eggs",
    "Answer: $<value>$ dollars",
    "Answer: $\\$<value>$",
    "Answer: $\\mathbf{<value>}$",
    "Answer: \\(<value>\\) dollars.",
    "\\[ \\boxed{\\text{<value> dollars}} \\]",
    "#### <value>",
    "#### <value> dollars at the farmers' market",
    "Answer: <value> dollars every day at the farmers’ market.",
    "Answer: <value>\n\nExplanation: Nine eggs are sold at $2 each.",
    "Answer: $<value> because 9 * 2 = 18",
    "Answer: <value>, because 9 * 2 = 18",
    "Answer: <value> dollars, since she sells 9 eggs at $2 each",
    "Answer: <value> (nine eggs at $2 each)",
    "Answer: 9 * 2 = <value>",
    "Answer: $x = <value>$",
    "Answer: approximately <value>",
    "Answer: USD <value>",
    "Answer: <value>\nAnswer: <value>",
    "```\nAnswer: <value>\n```",
    "Answer：<value>。",
    "答案：<value>",
    "Answer: <value>元",
    "The answer is <value>.",
    "Final Answer: The final answer is $<value>$. I hope it is correct.",
    "Answer: She makes $<value> every day.",
    "Answer: <value> dollars for 9 eggs",
    "Answer:\n```\n<value>\n```",
    "**Answer:**\n<value>",
    "| Answer: | <value> |",
    "| Answer | <value> |",
    "<answer><value></answer>",
    "Answer: <words>",
)
_UNCLEAR = ("Answer: <value> or 20", "Answer: not <value>", "\\boxed{<value>", "Answer: <cut>", "The ans")

LINES = (*_ANSWERS, *_UNCLEAR)
"""Forms that models write, the instructed one first; the last ones are hedged or truncated, with no clear answer."""


def fill(template: str, value: str) -> str | None:
    """Return a line with this value; None for a value that cannot be written in the words of the template."""
    in_words = dict(zip(map(str, range(20)), _NUMBERS, strict=True)).get(value)
    if WORDS in template and in_words is None:
        return None
    return (
        template.replace(WORDS, str(in_words))
        .replace(VALUE, value)
        .replace(CUT, value[: max(1, len(value) // 2)])
    )


def wrong_value(reference: str, others: Sequence[str], rng: random.Random) -> str:
    """Return a value that differs from the reference: a near miss of a whole number, or another reference.

    Raise ValueError if another reference is needed and all of `others` equal this one.
    """
    if not reference.isdecimal() or rng.random() < 0.5:
        different = (other for other in rng.sample(others, len(others)) if not _same(reference, other))
        if (value := next(different, None)) is None:
            raise ValueError(f"no other answer than {reference!r:.60}: give samples of several problems")
        return value
    whole = int(reference)
    misses = [miss for miss in (whole + 1, abs(whole - 1), 10 * whole, -whole) if miss != whole]
    return str(rng.choice(misses))


def _same(first: str, second: str) -> bool:
    one, other = read_number(first), read_number(second)
    return equal(one, other) if one and other else same_text(first, second)


def read_texts(path: Path) -> pandas.DataFrame:
    """Return completions with `prompt`, `reference` and `text`, from a table of samples or a file like GSM8K's."""
    if path.suffix == ".parquet":
        return pandas.read_parquet(path)
    rows = pandas.read_json(path, lines=True)
    parts = rows["answer"].str.partition("\n#### ")
    return pandas.DataFrame({"prompt": rows["question"], "reference": parts[2].str.strip(), "text": parts[0]})


def build_corpus(samples: pandas.DataFrame, seed: int) -> pandas.DataFrame:
    """Return one row per problem with `question`, `answer`, `completions` and `origins`.

    Args:
        samples: completions with the columns `prompt`, `reference` and `text`.
        seed: seed of the lines, the values and the places at which the completions are cut off.
    """
    rng = random.Random(seed)
    references = sorted(set(samples["reference"]))
    rows = []
    for (prompt, reference), group in samples.groupby(["prompt", "reference"], sort=False):
        completions = [(text, "sampled") for text in group["text"]]
        for text in group["text"]:
            is_right = rng.random() < 0.5
            value = reference if is_right else wrong_value(reference, references, rng)
            lines = [fill(line, value) for line in LINES]
            index = rng.choice([index for index, line in enumerate(lines) if line is not None])
            kind = "unclear" if index >= len(_ANSWERS) else "right" if is_right else "wrong"
            beginning = text[: rng.randrange(len(text) + 1)]
            completions.append((f"{beginning}\n{lines[index]}", f"{kind} line={index}"))
        rows.append((prompt, reference, *zip(*completions, strict=True)))
    return pandas.DataFrame(rows, columns=["question", "answer", "completions", "origins"])


def score(corpus: Path, grader: str) -> tuple[pandas.DataFrame, str]:
    """Grade a corpus with `bandpo eval --samples`.

    Returns:
        The completions with `question`, `answer`, `completions`, `origins` (without the line) and `verdict`, and the
        line of the command with its rate.

    Raises:
        RuntimeError: the command failed or printed a traceback; the message is its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bandpo_cli", "eval", "--samples", str(corpus.resolve())]
        command += ["--grader", grader, "--name", "scored", "--no-mlflow"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        output = done.stdout + done.stderr
        if done.returncode or "Traceback" in output:
            raise RuntimeError(output)
        graded = pandas.read_parquet(Path(folder, "runs", "scored", "samples.parquet"))
    # Equal completions of a problem get equal verdicts, so the text identifies the verdict.
    key = ["question", "answer", "completions"]
    graded = graded[["prompt", "reference", "text", "verdict"]].set_axis([*key, "verdict"], axis="columns")
    stored = pandas.read_json(corpus, lines=True, dtype=False).explode(["completions", "origins"])
    stored["origins"] = stored["origins"].str.split().str[0]
    rate = next((line.strip() for line in output.splitlines() if "completions in" in line), "")
    return stored.merge(graded.drop_duplicates(key), on=key, validate="many_to_one"), rate


def failures(scored: pandas.DataFrame) -> pandas.DataFrame:
    """Return the completions with a grader error, and the correct completions with a wrong value."""
    is_false = (scored["origins"] == "wrong") & (scored["verdict"] == "correct")
    return scored[is_false | (scored["verdict"] == "grader-error")]


def verdict_table() -> str:
    """Return the verdict of each grader on each line with the right value 18, in Markdown.

    The columns are the graders of the registry that grade at least one of the lines correct.
    """
    texts = [f"She sells 9 eggs at $2 each.\n{fill(line, '18')}" for line in LINES]
    columns = {}
    with GraderPool(GradingConfig(workers=1, deadline=60)) as pool:
        for grader in GRADERS:
            problem = Problem("p", "How much does she make?", "18", "docs", grader)
            columns[grader] = [grade.verdict for grade in pool.grade([problem] * len(texts), texts)]
    columns = {f"`{grader}`": verdicts for grader, verdicts in columns.items() if "correct" in verdicts}
    rows = [["end of the completion", *columns], ["---"] * (len(columns) + 1)]
    for line, *verdicts in zip(LINES, *columns.values(), strict=True):
        code = str(fill(line, "18")).replace("\n", "⏎").replace("|", "\\|")
        rows.append([f"`` {code} ``" if "`" in code else f"`{code}`", *verdicts])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def write_table(check: bool) -> int:
    """Write the table into the page, or only compare; return the exit code."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    new = f"{before}{BEGIN}\n\n{verdict_table()}\n{END}{rest.partition(END)[2]}"
    if check and new != page:
        print(f"{PAGE}: the table differs; run python -m scripts.answer_lines table", file=sys.stderr)
    elif not check:
        PAGE.write_text(new, encoding="utf-8")
    return int(check and new != page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the three commands and return the exit code."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table").add_argument("--check", action="store_true")
    corpus = commands.add_parser("corpus")
    corpus.add_argument("samples", type=Path)
    corpus.add_argument("--out", type=Path, required=True)
    corpus.add_argument("--seed", type=int, default=0)
    scoring = commands.add_parser("score")
    scoring.add_argument("corpus", type=Path)
    scoring.add_argument("--grader", nargs="+", default=["number", "math"])
    options = parser.parse_args(arguments)
    if options.command == "table":
        return write_table(options.check)
    if options.command == "corpus":
        rows = build_corpus(read_texts(options.samples), options.seed)
        rows.to_json(options.out, orient="records", lines=True, force_ascii=False)
        print(f"{options.out}: {len(rows):,} problems, {rows['completions'].str.len().sum():,} completions")
        return 0
    failed = False
    for grader in options.grader:
        scored, rate = score(options.corpus, grader)
        print(f"{grader}: {rate}\n{pandas.crosstab(scored['origins'], scored['verdict'], margins=True)}")
        for row in failures(scored).itertuples():
            failed = True
            print(f"  {row.verdict}, {row.origins}: reference {row.answer!r}, {row.completions[-80:]!r}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
