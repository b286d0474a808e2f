"""The data sets known by name: where they lie on the Hugging Face hub and how their rows are read."""

from __future__ import annotations

from dataclasses import dataclass

from bandpo_cli.config.data import DatasetName


@dataclass(frozen=True)
class Dataset:
    """One data set.

    Attributes:
        hub_id: its id on the Hugging Face hub.
        question: the field that holds the question.
        answer: the field that holds the reference answer, or a worked solution that ends in it.
        subset: its subset (configuration); None for the only one.
        train_split: the split to train on; None for a set that is made for evaluation only.
        eval_split: the split to evaluate on; None where the set has none.
        evaluation: the known sets that a run trained on this one is evaluated on by default.
        level: the field that says how hard a problem is.
        grader: who judges its answers by default.
    """

    hub_id: str
    question: str
    answer: str
    subset: str | None = None
    train_split: str | None = None
    eval_split: str | None = None
    evaluation: tuple[DatasetName, ...] = ()
    level: str | None = None
    grader: str = "math"


KNOWN: dict[DatasetName, Dataset] = {
    "gsm8k": Dataset(
        "openai/gsm8k",
        "question",
        "answer",
        subset="main",
        train_split="train",
        eval_split="test",
        evaluation=("gsm8k",),
        grader="number",
    ),
    # MATH-500 is drawn from the test split, so the train split is clean of it.
    "math": Dataset(
        "DigitalLearningGmbH/MATH-lighteval",
        "problem",
        "solution",
        train_split="train",
        eval_split="test",
        evaluation=("math500",),
        level="level",
    ),
    # The processed copy: each problem once and without an instruction around it, which BytedTsinghua-SIA's own
    # repeats about a hundred times over 1.8 million rows.
    "dapo-math-17k": Dataset(
        "open-r1/DAPO-Math-17k-Processed",
        "prompt",
        "solution",
        subset="all",
        train_split="train",
        evaluation=("aime24", "aime25", "amc23"),
    ),
    "aime24": Dataset("HuggingFaceH4/aime_2024", "problem", "answer", eval_split="train"),
    "aime25": Dataset("math-ai/aime25", "problem", "answer", eval_split="test"),
    "amc23": Dataset("math-ai/amc23", "question", "answer", eval_split="test"),
    "math500": Dataset("HuggingFaceH4/MATH-500", "problem", "answer", eval_split="test", level="level"),
    "minerva": Dataset("math-ai/minervamath", "question", "answer", eval_split="test"),
    "olympiadbench": Dataset("math-ai/olympiadbench", "question", "final_answer", eval_split="test"),
}
"""`math` judges the competitions with whole-number answers too: a run on DAPO's problems is then scored as it was
trained, and 2^{10} is right where 1024 is asked for. GSM8K's answers are plain numbers with a unit at most."""


def evaluation_sources(name: str) -> tuple[str, ...]:
    """Return what the known set `name` is evaluated on: its own evaluation part, else the sets that go with it."""
    known = next(known for each, known in KNOWN.items() if each == name)
    return (name,) if known.eval_split is not None else known.evaluation
