"""Data sets known by name: place on the Hugging Face hub, fields, splits and grader."""

from __future__ import annotations

from dataclasses import dataclass

from bandpo_cli.registries.registry import Entry, Registry


@dataclass(frozen=True)
class Dataset(Entry):
    """A data set known by name.

    Attributes:
        hub_id: its id on the Hugging Face hub, or a local folder in the layout of the hub.
        question: the field that holds the question.
        answer: the field that holds the reference answer, or a worked solution that ends in it.
        subset: its subset (configuration); None for the only one.
        train_split: the split to train on; None for a set that is made for evaluation only.
        eval_split: the split to evaluate on; None where the set has none.
        evaluation: the data sets that a run trained on this one is evaluated on by default.
        level: the field that holds the difficulty of a problem.
        grader: the default grader of its answers.
    """

    hub_id: str
    question: str
    answer: str
    subset: str | None = None
    train_split: str | None = None
    eval_split: str | None = None
    evaluation: tuple[str, ...] = ()
    level: str | None = None
    grader: str = "math"

    def evaluation_sets(self) -> tuple[str, ...]:
        """Return the names of the sets that stand for this one in an evaluation: itself if it has an evaluation split,
        else the sets that go with it."""
        return (self.name,) if self.eval_split is not None else self.evaluation


# fmt: off
# `math` grades the competitions with whole-number answers too: a run on DAPO's problems is then scored as it was
# trained, and 2^{10} is correct where 1024 is the reference. GSM8K's answers are plain numbers with a unit at most.
DATASETS = Registry("data set", [
    Dataset("gsm8k", "grade-school word problems", "openai/gsm8k", "question", "answer", subset="main",
            train_split="train", eval_split="test", evaluation=("gsm8k",), grader="number"),
    # MATH-500 is a sample of the test split, so the train split does not contain its problems.
    Dataset("math", "MATH, competition problems of five levels", "DigitalLearningGmbH/MATH-lighteval",
            "problem", "solution", train_split="train", eval_split="test", evaluation=("math500",), level="level"),
    # The processed copy: each problem once and without an instruction around it. BytedTsinghua-SIA's own copy
    # repeats each about a hundred times over 1.8 million rows.
    Dataset("dapo-math-17k", "competition problems with whole-number answers", "open-r1/DAPO-Math-17k-Processed",
            "prompt", "solution", subset="all", train_split="train", evaluation=("aime24", "aime25", "amc23")),
    Dataset("aime24", "AIME 2024", "HuggingFaceH4/aime_2024", "problem", "answer", eval_split="train"),
    Dataset("aime25", "AIME 2025", "math-ai/aime25", "problem", "answer", eval_split="test"),
    Dataset("amc23", "AMC 2023", "math-ai/amc23", "question", "answer", eval_split="test"),
    Dataset("math500", "MATH-500", "HuggingFaceH4/MATH-500", "problem", "answer", eval_split="test", level="level"),
    Dataset("minerva", "Minerva Math", "math-ai/minervamath", "question", "answer", eval_split="test"),
    Dataset("olympiadbench", "OlympiadBench", "math-ai/olympiadbench", "question", "final_answer",
            eval_split="test"),
])
# fmt: on
