"""Completions of a small language model for a problem file, as input of graders.

    python -m scripts.answer_corpus --problems FILE --out FILE [--minutes 3] [--completions 10000] [--seed 0]

The problem file has one JSON object per line: `question` or `problem`, and a worked solution in `solution` or `answer`
that ends in its answer (as GSM8K and MATH have), or the answer alone. The script trains a small model on the solutions,
each with its answer in a random form of `lines.py`, and samples from it at several temperatures and lengths. Half of
the completions are what the model wrote. The other half are a beginning of that, followed by one of the lines with the
right answer or with a wrong one.

The output is read by `bandpo eval --samples FILE`: one row per problem with `question`, `answer` and `completions`.
`origins` describes each completion: `sampled` with the settings, or `right`, `wrong` or `unclear` (a line that is
hedged or truncated) with the index of the line.
The same seed and `--steps` give the same file on the same machine and number of threads.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from bandpo_cli.extract import final_answer
from scripts.answer_corpus.lines import LINES, fill_any, wrong_value
from scripts.answer_corpus.model import Shape, SolutionModel

SETTINGS = tuple(product((0.3, 0.7, 1.0, 1.5), (16, 48, 128)))
"""Temperatures and maximal numbers of tokens; the shorter ones truncate nearly all completions."""
SAMPLED_PER_PROBLEM = 4
"""Completions per problem that are kept as sampled; as many again end in an answer line."""


@dataclass(frozen=True)
class WorkedProblem:
    """A question with its worked solution, without the line of the answer, and the reference answer."""

    question: str
    solution: str
    answer: str


def read_problems(path: Path) -> list[WorkedProblem]:
    """Read a problem file.

    Raises:
        ValueError: If a row lacks a question or an answer; the message names the row.
    """
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        question = row.get("question", row.get("problem"))
        solution = str(row.get("solution", row.get("answer", "")))
        given = str(row.get("answer", solution))
        answer = final_answer(given) or given
        if not isinstance(question, str) or not answer or "\n" in answer:
            raise ValueError(f"{path}, row {number}: no question, or no answer")
        problems.append(WorkedProblem(question, solution.rpartition("\n####")[0] or solution, answer))
    return problems


def training_texts(problems: Sequence[WorkedProblem], seed: int) -> list[tuple[str, str]]:
    """Return (prompt, solution) of each problem; the solutions end in random answer lines with the right value."""
    rng = random.Random(seed)
    return [
        (prompt_of(problem), f"{problem.solution}\n{fill_any(problem.answer, rng)[1]}")
        for problem in problems
    ]


def prompt_of(problem: WorkedProblem) -> str:
    """Return the prompt of the small model."""
    return f"{problem.question}\n\n"


def sample_texts(
    model: SolutionModel, problems: Sequence[WorkedProblem], count: int, seed: int
) -> list[list[tuple[str, str]]]:
    """Return (origin, text) of the sampled completions of each problem, `count` in all; print the progress."""
    wanted = defaultdict(list)
    for index in range(count):
        problem, sample = divmod(index, SAMPLED_PER_PROBLEM)
        wanted[index % len(SETTINGS)].append((problem % len(problems), sample))
    texts: list[list[tuple[str, str]]] = [[] for _ in problems]
    done = 0
    for number, chosen in sorted(wanted.items()):
        temperature, max_tokens = SETTINGS[number]
        prompts = [prompt_of(problems[index]) for index, _ in chosen]
        sampled = model.sample(prompts, temperature, max_tokens, seed + number)
        for (index, _), text in zip(chosen, sampled, strict=True):
            texts[index].append((f"sampled T={temperature} max_tokens={max_tokens}", text))
        done += len(chosen)
        print(f"{done:,} of {count:,} completions sampled", flush=True)
    return texts


def with_answer_line(
    problem: WorkedProblem, text: str, others: Sequence[str], rng: random.Random
) -> tuple[str, str]:
    """Return (origin, text): a beginning of the text, then an answer line with the right or with a wrong value."""
    is_right = rng.random() < 0.5
    index, line = fill_any(problem.answer if is_right else wrong_value(problem.answer, others, rng), rng)
    kind = ("right" if is_right else "wrong") if LINES[index].answers else "unclear"
    return f"{kind} line={index}", f"{text[: rng.randrange(len(text) + 1)]}\n{line}"


def build_rows(
    model: SolutionModel, problems: Sequence[WorkedProblem], completions: int, seed: int
) -> list[dict[str, Any]]:
    """Return the rows of the output file, with `completions` completions in all."""
    filled = completions // 2
    sampled_P = sample_texts(model, problems, completions - filled, seed)
    rng = random.Random(seed + 1)
    others = sorted({problem.answer for problem in problems})
    rows = []
    for problem, sampled in zip(problems, sampled_P, strict=True):
        ended = [with_answer_line(problem, text, others, rng) for _, text in sampled][:filled]
        filled -= len(ended)
        if sampled:
            origins, texts = zip(*sampled, *ended, strict=True)
            rows.append(
                {
                    "question": problem.question,
                    "answer": problem.answer,
                    "completions": texts,
                    "origins": origins,
                }
            )
    return rows


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.answer_corpus",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--problems", type=Path, required=True, help="problem file, .jsonl")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .jsonl")
    parser.add_argument("--minutes", type=float, default=3.0, help="time for training, about (3)")
    parser.add_argument("--steps", type=int, help="training steps, instead of --minutes")
    parser.add_argument("--completions", type=int, default=10_000, help="completions in all (10000)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, order of the data and sampling (0)"
    )
    parser.add_argument("--hidden", type=int, default=Shape.hidden, help="width of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=Shape.layers, help="layers of the model (%(default)s)")
    options = parser.parse_args(arguments)
    if options.completions < 1 or (options.steps is not None and options.steps < 1) or options.minutes <= 0:
        parser.error("--completions, --steps and --minutes must be positive")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, sample, and write the file."""
    options = parse_arguments(arguments)
    problems = read_problems(options.problems)
    random.Random(options.seed).shuffle(problems)
    shape = Shape(hidden=options.hidden, layers=options.layers)
    model = SolutionModel(training_texts(problems, options.seed), shape, options.seed)
    steps = options.steps or model.steps_within(options.minutes)
    print(
        f"{len(problems):,} problems, {model.model.num_parameters():,} parameters, {steps:,} steps",
        flush=True,
    )
    model.train(steps)
    rows = build_rows(model, problems, options.completions, options.seed)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    written = sum(len(row["completions"]) for row in rows)
    print(f"{options.out}: {len(rows):,} problems, {written:,} completions")


if __name__ == "__main__":
    main()
