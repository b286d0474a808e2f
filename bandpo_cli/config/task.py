"""Settings of the tasks (`task:` in a config file) and of the sources of questions and answers.

There is one class per kind of task, chosen by `name`. A new kind of task needs a class here, a class in `tasks` and an
entry in `registries.TASKS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from bandpo_cli.config.batch_and_sampling import (
    AnswerGraderName,
    Label,
    RewardComponent,
    check_answer_grader,
    is_installed,
)
from bandpo_cli.custom_code import is_function_path
from bandpo_cli.errors import ConfigError, nearest
from bandpo_cli.paths import nearest_file, path_exists, user_path
from bandpo_cli.registries import (
    DATA_TASK,
    DATASETS,
    ENVIRONMENT_GRADER,
    TASKS,
    TEMPLATES,
    TaskEntry,
    generated_tasks,
    load_attribute,
    split_member,
    task_kind,
)
from bandpo_cli.settings_validation import AsList, NotEmpty, Section, TaggedSection, require

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")  # the suffixes of the local files that can be read


def _check_function_path(name: str) -> str:
    require(is_function_path(name), f"'{name}': write it as module:name")
    return name


FunctionPath = Annotated[str, AfterValidator(_check_function_path)]
"""A custom function or class, as module:name."""


class Fields(Section):
    """Names of the fields of a row; a dot selects a nested field (`reward_model.ground_truth`).

    A name that is not given is detected: first the verl layout (`prompt` as chat messages,
    `reward_model.ground_truth`), then the usual names.
    """

    question: str | None = None
    """The question as text, or the complete prompt as chat messages."""
    answer: str | None = None
    """The reference answer; the final answer of a worked solution (`#### 18`, a last \\boxed{}) is extracted. The name
    of the field with the chat messages stands for the assistant message at their end."""
    level: str | None = None
    """The difficulty of the problem, for `levels`."""
    id: str | None = None
    """The identifier of the problem; without one it is a hash of the prompt and the answer."""


class Source(Section):
    """One source of problems. A plain string instead of a section is the name of a known data set or a path."""

    name: Annotated[str, AfterValidator(DATASETS.check_name)] | None = None
    """A known data set: its hub id, its fields and the form of its answers are known. With `path` as well, that
    file is read instead (a local copy)."""
    path: NotEmpty | None = None
    """A local .jsonl, .json, .csv or .parquet file, or a data set's id on the Hugging Face hub."""
    subset: str | None = None
    """The subset (configuration) of a data set on the hub."""
    split: str | None = None
    """The split of a data set on the hub; by default `train` for training and `test` for evaluation."""
    fields: Fields = Fields()
    levels: tuple[int, ...] | None = None
    """Keep problems of these levels only (MATH: 1 to 5)."""
    limit: PositiveInt | None = None
    """Keep at most this many problems, evenly spread over the file."""
    grader: AnswerGraderName | None = None
    """Grader of this source's answers; null: the data set's own, `math` for any other source."""
    label: Label | None = None
    """Its name in metrics; by default the name of the data set, or of the file without its suffix."""

    @model_validator(mode="before")
    @classmethod
    def _read_plain_string(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value} if value in DATASETS else {"path": value}
        return value

    @property
    def answer_grader(self) -> str:
        """The grader of its answers where the task names none for all."""
        return self.grader or (DATASETS[self.name].grader if self.name else "math")

    @model_validator(mode="after")
    def _check_has_location(self) -> Source:
        require(self.name or self.path, f"give it a name ({', '.join(DATASETS)}) or a path")
        return self


def _check_template(template: str) -> str:
    """Return a known name, or a text with {question} in it; raise ValueError with the nearest name otherwise."""
    require(
        template in TEMPLATES or "{question}" in template,
        f"no template of that name{nearest(template, TEMPLATES)}; known: {', '.join(TEMPLATES)}, "
        "or a custom text that contains {question}",
    )
    return template


def _check_slot(template: str) -> str:
    """Return a template with {question} in it; raise ValueError for any other text."""
    require("{question}" in template, "the template needs {question} in the place of the question")
    return template


class TaskSettings(TaggedSection):
    """Base class of the settings of a task."""

    tag = "name"
    default = "countdown"
    name: str
    rewards: Annotated[tuple[RewardComponent, ...] | None, AsList] = None
    """Several rewards, whose weighted sum is trained on. The first one decides which answers are correct, in training
    and in evaluations. null: the reward of the answers' grader."""
    tools: Annotated[tuple[FunctionPath, ...], AsList] = ()
    """Tools that the model can call, as module:function: functions with type hints and a docstring."""
    environment: FunctionPath | None = None
    """A class as module:Class that answers each message of the model and has the reward at the end."""
    max_turns: PositiveInt = 8
    """With tools or an environment: the largest number of messages of the model in a completion. Their tokens and what
    is inserted between them count towards sampling.max_tokens."""
    max_turn_tokens: PositiveInt | None = None
    """With tools or an environment: the largest number of tokens of a message of the model. A longer one ends there,
    and the conversation continues. null: no limit but sampling.max_tokens."""
    max_result_chars: PositiveInt = 2000
    """Characters of a tool's result that the model receives."""

    @classmethod
    def classes(cls) -> Mapping[str, type[Self]]:
        """Return the settings class for each value of `task.name`, the names of the data sets included."""
        names = (*generated_tasks(), DATA_TASK, *DATASETS)
        return {name: load_attribute(TASKS[task_kind(name)].settings) for name in names}

    @property
    def title(self) -> str:
        """The name of the task in overviews."""
        return self.name

    @property
    def functions(self) -> tuple[str, ...]:
        """The tools or the environment; empty for completions of a single turn."""
        return self.tools or ((self.environment,) if self.environment else ())

    @property
    def evaluated_rewards(self) -> tuple[RewardComponent, ...] | None:
        """The rewards of evaluations: `rewards` without controls; None for the grader of the answers alone."""
        kept = tuple(reward for reward in self.rewards or () if not reward.is_control)
        return kept if any(reward.weight for reward in kept) else None

    @field_validator("environment")
    @classmethod
    def _check_no_tools(cls, environment: str | None, info: ValidationInfo) -> str | None:
        require(not (environment and info.data.get("tools")), "a task has tools or an environment, not both")
        return environment

    @field_validator("max_turns", "max_turn_tokens", "max_result_chars")
    @classmethod
    def _check_conversation(cls, limit: int | None, info: ValidationInfo) -> int | None:
        default = cls.model_fields[str(info.field_name)].default
        problem = "without tools or an environment a completion is one message; set sampling.max_tokens"
        require(limit == default or info.data.get("tools") or info.data.get("environment"), problem)
        return limit

    @field_validator("rewards")
    @classmethod
    def _check_rewards(
        cls, rewards: tuple[RewardComponent, ...] | None
    ) -> tuple[RewardComponent, ...] | None:
        if rewards is None:
            return None
        require(
            rewards, "the list is empty; name at least one grader, or use null for the grader of the task"
        )
        require(all(reward.grader for reward in rewards[1:]), "each entry but the first needs a grader")
        check_answer_grader(rewards[0].grader or "")
        require(
            rewards[0].grader is None or "grader" in cls.model_fields,
            "this task has a fixed grader, which must be the first entry; remove `grader` from the first entry",
        )
        labels = [reward.label for reward in rewards]
        for label in labels:
            require(
                labels.count(label) == 1, f"two entries have the name '{label}'; give each a different `name`"
            )
        require(
            any(reward.weight for reward in rewards), "every weight is 0, so there is no reward to train on"
        )
        return rewards


class CountdownTask(TaskSettings):
    """Reach a target with +, − and *, using each of the given numbers exactly once.

    The sizes are limited so that all problems can be enumerated in a few seconds, without a stored table.
    """

    name: Literal["countdown"] = "countdown"
    numbers: int = Field(4, ge=2, le=5)
    """Count of the numbers in a problem."""
    max_number: int = Field(9, ge=2, le=10)
    """Numbers are sampled from 1 to this."""
    min_target: int = Field(0, ge=0, le=999)
    """The smallest target."""
    max_target: int = Field(99, ge=0, le=999)
    """The largest target; 4 numbers up to 9 reach 36 without a *."""
    heldout_fraction: float = Field(0.1, gt=0, le=0.1)
    """Share of the problems held out for evaluation; at most 0.1, because the bundled model was warm-started on the
    other nine tenths."""


class CalculatorTask(TaskSettings):
    """Products of two numbers of two digits with a third number, with a calculator as the model's tool."""

    name: Literal["calculator"] = "calculator"
    tools: Annotated[tuple[FunctionPath, ...], AsList] = ("bandpo_cli.grading.countdown:calculate",)


class DataTask(TaskSettings):
    """Questions with reference answers, from known data sets, the hub or local files."""

    name: str
    """A known data set, with its own train and evaluation parts; or `data`, which takes all from `train`."""
    train: Annotated[tuple[Source, ...], AsList] = ()
    """The sources of the training problems, all mixed. Empty: the train part of the data set `name`."""
    heldout: Annotated[tuple[Source, ...], AsList] = ()
    """Evaluation sets, each scored separately as eval/<its label>/... Empty: the evaluation part of the data set
    `name`; where it has none, `heldout_fraction` of the training problems."""
    heldout_fraction: float = Field(0.05, gt=0, lt=1)
    """Share of the training problems held out for evaluation where no evaluation set is named (chosen by a hash)."""
    revisions: dict[str, NotEmpty] = Field(default_factory=dict)
    """The revision (branch, tag or commit) of data sets on the hub, by their id; the latest of those not named."""
    template: Annotated[str, AfterValidator(_check_template)] = "answer-line"
    """The user message: `answer-line` (the paper's), `boxed`, `hashes` (verl's for GSM8K), `plain`, or a custom text
    that contains {question}. Chat messages get no template, and prompts without an answer not the default."""
    system: str | None = None
    """A system message before the user message, or before chat messages without one."""
    grader: AnswerGraderName | None = None
    """Grader of all answers, those of the evaluation sets too: `math`, `number`, `math-dapo` (the paper's), `gsm8k`,
    ..., or a custom function as module:function. null: the grader of each source. config.yaml has the one of
    all sources here, and different ones in the sources."""

    @field_validator("template")
    @classmethod
    def _check_environment(cls, template: str, info: ValidationInfo) -> str:
        require(
            template == "plain" or not info.data.get("environment"),
            "the environment writes the user message; leave it out, and write its text in reset or as task.system",
        )
        return template

    @model_validator(mode="after")
    def _choose_grader(self) -> DataTask:
        first = self.rewards[0].grader if self.rewards else None
        require(
            not self.grader or not first,
            f"grader = '{self.grader}' and the first of the rewards, '{first}', both grade the answers; leave one of "
            "them out",
        )
        require(
            self.environment or ENVIRONMENT_GRADER not in (self.grader, first),
            f"the grader '{ENVIRONMENT_GRADER}' is the reward of task.environment; name the class there",
        )
        if self.environment:  # it gets the question alone, and has the reward unless a grader is named
            self.__dict__["template"] = "plain"
            self.__dict__["grader"] = self.grader or (None if first else ENVIRONMENT_GRADER)
        if self.answer_grader is None:
            graders = self._graders_of_sources()
            by_source = {
                part: tuple(
                    source.model_copy(update={"grader": source.answer_grader})
                    for source in getattr(self, part)
                )
                for part in ("train", "heldout")
            }
            # The section is frozen; its validator writes the graders out, so that config.yaml has them.
            self.__dict__.update({"grader": graders.pop()} if len(graders) == 1 else by_source)
        return self

    @property
    def title(self) -> str:
        """The name of the data set; of the task `data` the names of its sources."""
        if self.name != DATA_TASK:
            return self.name
        sources = self.train or self.heldout
        names = (item.label or item.name or Path(str(item.path)).stem for item in sources)
        return "+".join(names) or self.name

    @property
    def answer_grader(self) -> str | None:
        """The grader of all answers, which decides what is correct; None for the one of each source."""
        return self.grader or (self.rewards[0].grader if self.rewards else None)

    @property
    def chosen_grader(self) -> str | None:
        """The grader of all answers, for other sources too; None if it only is the one that the sources have anyway."""
        return None if self._graders_of_sources() == {self.answer_grader} else self.answer_grader

    def sources(self, part: Literal["train", "heldout"]) -> tuple[Source, ...]:
        """Return the sources of a part: the configured ones, else those of the known data set `name`."""
        configured: tuple[Source, ...] = getattr(self, part)
        if configured or self.name == DATA_TASK:
            return configured
        known = DATASETS[self.name]
        if part == "heldout" and known.evaluation:
            return tuple(Source(name=name) for name in known.evaluation)
        return (Source(name=self.name),) if known.split(part) else ()

    def _graders_of_sources(self) -> set[str]:
        return {source.answer_grader for source in (*self.sources("train"), *self.sources("heldout"))}


def yaml_number(value: Any) -> Any:
    """Return the number that a text such as `1e-3` is in YAML 1.2 and JSON; YAML 1.1 reads it as text."""
    if isinstance(value, list):
        return [yaml_number(item) for item in value]
    pattern = r"[-+]?[0-9]+[eE][-+]?[0-9]{1,2}"
    return float(value) if isinstance(value, str) and re.fullmatch(pattern, value) else value


class ReasoningGymTask(TaskSettings):
    """Problems from the generators of the library reasoning-gym, with the scores of the library.

    The names of the generators and their options are checked when the problems are made, because that takes the
    library, and a stored configuration can be read without it.
    """

    name: Literal["reasoning-gym"] = "reasoning-gym"
    names: Annotated[tuple[str, ...], AsList] = ()
    """The generators, all mixed for training; each is a separate evaluation set, eval/<its name>/..."""
    size: PositiveInt = 500
    """Training problems of each generator. `size` in its `options` sets another number, and so its share."""
    heldout_size: PositiveInt = 100
    """Held-out problems of each generator."""
    seed: NonNegativeInt = 0
    """Seed of the problems. It is not the seed of the run, so that runs with several seeds have the same problems."""
    options: dict[str, dict[str, Annotated[JsonValue, BeforeValidator(yaml_number)]]] = Field(
        default_factory=dict
    )
    """Options of the generators by name: {chain_sum: {max_terms: 3, size: 2000}}."""
    system: str | None = "default"
    """The system message: the name of one of the library's (default, simple, direct, DeepSeekZero, chain_of_draft), or
    a custom text. It must ask for <answer>...</answer>, which is what is scored. null: no system message."""
    template: Annotated[str, AfterValidator(_check_slot)] = "{question}"
    """The user message, with {question} in the place of the question."""


def task_from_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Return the values of `--task` as a layer of the `task` section.

    A known name is the task; a data file is what the task `data` trains on; `TASK:MEMBER` is a member of a task, and
    several of them are mixed. Anything else stays a name, which the validation of the settings reports. Raise
    ConfigError if a data file does not exist, or several values are not members of one task.
    """
    members = [split_member(text) for text in texts]
    tasks = {member[0] for member in members if member}
    if None not in members and len(tasks) == 1:
        return {"name": tasks.pop(), "names": [member[1] for member in members if member]}
    if len(texts) != 1:
        raise ConfigError(
            f"--task {' --task '.join(texts)}: one value, or several members of one task; mix data sets with "
            "task.train in a config file"
        )
    (text,) = texts
    path, is_file = user_path(text), Path(text).suffix.lower() in FILE_SUFFIXES
    if is_file and not path_exists(path):
        raise ConfigError(f"--task {text}: there is no such file{nearest_file(path, FILE_SUFFIXES)}")
    if is_file or (text not in TaskSettings.classes() and path_exists(Path(text))):
        return {"name": DATA_TASK, "train": [{"path": text}]}
    return {"name": text}


def check_package(entry: TaskEntry) -> None:
    """Raise ConfigError, with the command that installs it, if the optional package of a task is not installed."""
    if not is_installed(entry.package):
        raise ConfigError(f"task {entry.name}: the package {entry.package} is not installed; {entry.install}")
