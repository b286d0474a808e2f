"""Data sets and templates by name, and the kinds of tasks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bandpo_cli.registries import Entry, Registry


# fmt: off
@dataclass(frozen=True)
class Dataset(Entry):
    """A data set known by name.

    Attributes:
        hub_id: its id on the Hugging Face hub, or a local folder in the layout of the hub.
        question, answer, level: the fields with the question, the reference answer or a worked solution that ends in
            it, and the difficulty.
        subset: its subset (configuration); None for the only one.
        train_split, eval_split: the splits to train and evaluate on; None where the set has none.
        evaluation: the data sets that a run trained on this one is evaluated on by default, and that stand for a set
            without an evaluation split in `eval --task`.
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

    def split(self, part: Literal["train", "heldout"]) -> str | None:
        """Return the split for a part of a task; None where the set has none."""
        return self.train_split if part == "train" else self.eval_split

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
    Dataset("deepscaler", "DeepScaleR, competition problems", "agentica-org/DeepScaleR-Preview-Dataset", "problem",
            "answer", train_split="train", evaluation=("aime24", "aime25", "amc23")),
    Dataset("aime24", "AIME 2024", "HuggingFaceH4/aime_2024", "problem", "answer", eval_split="train"),
    Dataset("aime25", "AIME 2025", "math-ai/aime25", "problem", "answer", eval_split="test"),
    Dataset("aime26", "AIME 2026", "MathArena/aime_2026", "problem", "answer", eval_split="train"),
    Dataset("amc23", "AMC 2023", "math-ai/amc23", "question", "answer", eval_split="test"),
    Dataset("hmmt25", "HMMT February 2025", "MathArena/hmmt_feb_2025", "problem", "answer", eval_split="train"),
    Dataset("brumo25", "BRUMO 2025", "MathArena/brumo_2025", "problem", "answer", eval_split="train"),
    Dataset("math500", "MATH-500", "HuggingFaceH4/MATH-500", "problem", "answer", eval_split="test", level="level"),
    Dataset("minerva", "Minerva Math", "math-ai/minervamath", "question", "answer", eval_split="test"),
    Dataset("olympiadbench", "OlympiadBench", "math-ai/olympiadbench", "question", "final_answer", eval_split="test"),
])

TEMPLATES = {
    # The prompt of arXiv 2603.04918 and of DAPO.
    "answer-line": "Solve the following math problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    "{question}\n\n"
    'Remember to put your answer on its own line after "Answer:".',
    "boxed": "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
    # verl's prompt for GSM8K.
    "hashes": '{question} Let\'s think step by step and output the final answer after "####".',
    "plain": "{question}",
}
"""The known user messages by name; any other value of `task.template` is the template itself."""

@dataclass(frozen=True)
class TaskEntry(Entry):
    """A kind of task (`task.name`).

    Attributes:
        settings: a subclass of `config.task.TaskSettings`.
        build: a function from these settings to a `tasks.base.Task`.
        defaults: settings by section that replace the general defaults for this task.
        bundled_model: the model of the package that was made for this task, its default; None for none.
        bundled_defaults: `defaults` for the bundled model.
        members: a function that returns a description of each member of the task, by name; `--task TASK:MEMBER`, the
            setting `names`, selects members. None for a task that is one set of problems.
        package, install: the optional package that the task needs, and how to install it.
    """

    settings: str
    build: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    bundled_model: str | None = None
    bundled_defaults: Mapping[str, Any] = field(default_factory=dict)
    members: str | None = None
    package: str | None = None
    install: str = ""

LANGUAGE_MODEL_DEFAULTS: dict[str, Any] = {
    "model": {"gradient_checkpointing": "auto"},
    # The logits of 2,048 sequences and vLLM's counts of their tokens take 6 GiB with a vocabulary of 152k.
    "sampling": {"max_tokens": 1024, "max_prompt_tokens": 1024, "max_sequences": 512},
    "optim": {"lr": 1e-6},  # the paper's, and usual for full fine-tuning of 0.5B to 8B parameters
    "evaluation": {"samples": 4},
}
"""Defaults for worked answers of a language model. Those of the settings classes are for countdown and a model of a
million parameters."""

COUNTDOWN_DEFAULTS = LANGUAGE_MODEL_DEFAULTS | {
    # An answer has 8 tokens without spaces, and twice as many with them.
    "sampling": {"max_tokens": 32, "max_sequences": 512},
    "evaluation": {},
}
"""Defaults for countdown with another model than the bundled one."""

CALCULATOR_DEFAULTS: dict[str, Any] = {
    "sampling": {"prompts": 32, "max_tokens": 48},
    "optim": {"lr": 1e-4},
}
"""Defaults for the calculator with its bundled model, with 22 tokens for a call, its result and the answer."""

DATA_TASK = "data"
"""The task of data sets and files. The name of a data set, as a task, stands for it."""

_CONFIG = "bandpo_cli.config.task"

TASKS = Registry("task", [
    TaskEntry("countdown", "reach a target with +, − and * from given numbers", f"{_CONFIG}:CountdownTask",
              "bandpo_cli.tasks.arithmetic:countdown", COUNTDOWN_DEFAULTS, bundled_model="embedded"),
    TaskEntry("calculator", "a product and a sum, with a calculator as a tool", f"{_CONFIG}:CalculatorTask",
              "bandpo_cli.tasks.arithmetic:calculator", LANGUAGE_MODEL_DEFAULTS,
              bundled_model="embedded-calculator", bundled_defaults=CALCULATOR_DEFAULTS),
    TaskEntry(DATA_TASK, "questions with reference answers from data sets and files", f"{_CONFIG}:DataTask",
              "bandpo_cli.tasks.question_answers:QuestionAnswerTask", LANGUAGE_MODEL_DEFAULTS),
    TaskEntry("reasoning-gym", "problems from the generators of the library reasoning-gym, scored by the library",
              f"{_CONFIG}:ReasoningGymTask", "bandpo_cli.tasks.reasoning_gym:ReasoningGym",
              LANGUAGE_MODEL_DEFAULTS, members="bandpo_cli.tasks.reasoning_gym:describe_generators",
              package="reasoning_gym", install='pip install "bandpo[gym]"'),
])

BUNDLED_MODELS = {entry.bundled_model: entry.name for entry in TASKS.values() if entry.bundled_model}
"""The models that the package ships, each with the task that it was made for."""

def task_kind(name: str) -> str:
    """Return the name of the entry of `TASKS` for a task's name: `data` for the name of a data set."""
    return DATA_TASK if name in DATASETS else name

def generated_tasks() -> list[str]:
    """Return the names of the tasks that need no data: all but `data`."""
    return [name for name in TASKS if name != DATA_TASK]

def split_member(text: str) -> tuple[str, str] | None:
    """Return the task and the member of `TASK:MEMBER`; None for any other text."""
    task, colon, member = text.partition(":")
    return (task, member) if colon and task in TASKS and TASKS[task].members else None

def tasks_text() -> str:
    """Return what `--task` accepts beside files, for a help text."""
    members = ":NAME (repeatable; {}:list prints the names)"
    generated = [name + (members.format(name) if TASKS[name].members else "") for name in generated_tasks()]
    return f"{', '.join(generated)}, a known data set ({', '.join(DATASETS)})"
