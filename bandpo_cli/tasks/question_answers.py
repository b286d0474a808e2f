"""Question-answer task: several sources mixed for training, and evaluation sets that training never uses."""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

import yaml

from bandpo_cli.config.batch_and_sampling import RewardComponent, needs_answer
from bandpo_cli.config.task import DataTask, Fields, Source
from bandpo_cli.errors import ConfigError, nearest, plural
from bandpo_cli.registries import DATA_TASK, GRADERS, TEMPLATES
from bandpo_cli.tasks.rows import (
    CHAT_TEXT,
    NotLoadedError,
    SplitName,
    as_answer,
    as_level,
    chat_value,
    clean_text,
    find_fields,
    has_surrogates,
    hub_id,
    known_dataset,
    read_rows,
    source_label,
    to_json_value,
    value_at,
)
from bandpo_cli.tasks.task import Task, bare_question, build_prompt, compatibility_form, hash_order, text_hash
from bandpo_cli.types import Message, Problem, Prompt, messages_of

SAMPLE_ROWS = 1000  # The fields are chosen by these first rows, so that a file of millions is read only once

ROLES = ("system", "user", "assistant")

_PURPOSES = {"train": "training", "heldout": "evaluation"}
_DEFAULT_TEMPLATE = DataTask.model_fields["template"].default


class Question(NamedTuple):
    """The question of a row, as text or as the complete prompt in chat messages, and its answer; None for none.

    `has_solution`: an assistant message at the end is not part of the prompt, because the model writes its own.
    """

    prompt: Prompt
    answer: str | None
    has_solution: bool


class QuestionAnswerTask(Task):
    """The task of data sets and files. Each source is read once, when its problems are first requested."""

    def __init__(self, config: DataTask) -> None:
        """Raise ConfigError if there are no sources, two sources share a label, or a revision is of no source."""
        super().__init__(config.name, self._train, self._heldout)
        self._config = config
        known = hub_ids(config)
        if unknown := next((name for name in config.revisions if name not in known), None):
            raise ConfigError(
                f"task.revisions: '{unknown}' is no data set on the hub that this task reads"
                f"{nearest(unknown, known)}; it reads {', '.join(known) or 'local files only'}"
            )
        self._train_sources, self._heldout_sources = config.sources("train"), config.sources("heldout")
        for part, sources in (("train", self._train_sources), ("heldout", self._heldout_sources)):
            counts = Counter(map(source_label, sources))
            if repeated := next((label for label, count in counts.items() if count > 1), None):
                names = f"{counts[repeated]} sources have the label '{repeated}'"
                raise ConfigError(f"task.{part}: {names}; give each a different label:")
        self._trains = False
        if not self._heldout_sources:
            self._check_train_sources()

    def _check_train_sources(self) -> None:
        if not self._train_sources:
            raise ConfigError(
                f"task.train: the task '{self.name}' has no training problems of its own; set it: --set "
                "task.train=FILE, or the name of a known data set"
            )

    def _heldout(self) -> dict[str, list[Problem]]:
        return {label: self._with_prompts(questions) for label, questions in self._heldout_questions.items()}

    @cached_property
    def _heldout_questions(self) -> dict[str, list[Problem]]:
        """The questions of the evaluation sets by label.

        Without a source, they are chosen by a hash of the question alone, so that adding rows moves none.
        """
        if self._heldout_sources:
            return {
                source_label(source): hash_order(self._load(source, "heldout"))
                for source in self._heldout_sources
            }
        keyed, fraction = self._train_questions, self._config.heldout_fraction
        # Another hash than in the countdown task: both decide which problems are held out, and must not change.
        ranked = sorted((int(text_hash(f"heldout/{key}"), 16) / 2**64, key) for key, _ in keyed)
        keys = {key for rank, key in ranked if rank < fraction} or {ranked[0][1]}
        heldout = [question for key, question in keyed if key in keys]
        label = source_label(self._train_sources[0]) if len(self._train_sources) == 1 else "heldout"
        self.notes.append(
            f"{label}: {len(heldout):,} of {plural(len(keyed), 'problem')} held out for evaluation "
            f"(heldout_fraction = {fraction:g})"
        )
        return {label: heldout}

    def _train(self) -> list[Problem]:
        self._check_train_sources()
        self._trains = True  # an evaluation needs no training problems
        heldout = list(chain.from_iterable(self._heldout_questions.values()))
        keys, ids = {question_key(question.prompt) for question in heldout}, {q.id for q in heldout}
        clean = [question for key, question in self._train_questions if key not in keys]
        shared = len(self._train_questions) - len(clean)
        if shared and self._heldout_sources:
            self.notes.append(f"train: {plural(shared, 'problem')} dropped, also in an evaluation set")
        if not clean:
            raise ConfigError(
                "task.train: every problem is held out for evaluation, so none remains to train on; give more "
                "problems, or name other evaluation problems in task.heldout"
            )
        # The ids in the files may be the same numbers for training and evaluation problems.
        return self._with_prompts(replace(q, id=f"{q.id}/train") if q.id in ids else q for q in clean)

    @cached_property
    def _train_questions(self) -> list[tuple[str, Problem]]:
        """The questions of all training sources with their keys, mixed in the order of a hash."""
        questions = chain.from_iterable(self._load(source, "train") for source in self._train_sources)
        distinct = {question.id: question for question in questions}
        return [(question_key(question.prompt), question) for question in hash_order(distinct.values())]

    def _load(self, source: Source, part: SplitName) -> list[Problem]:
        """Return the questions of a source, and add notes on them."""
        try:
            questions, notes = load_questions(source, part, self._config)
        except NotLoadedError as error:
            parts: tuple[SplitName, ...] = ("train", "heldout") if self._trains else (part,)
            sources = {name: self._config.sources(name) for name in parts}
            copies = [local_copies(name, given) for name, given in sources.items() if any(map(hub_id, given))]
            if not copies:
                raise
            raise NotLoadedError(f"{error}; give local copies: {' '.join(copies)}") from None
        self.notes += notes
        template, grader = self._config.template, questions[0].grader
        readable = GRADERS[grader].templates if grader in GRADERS else ()
        if any(not isinstance(question.prompt, str) for question in questions):
            self.notes.append(
                f"{source_label(source)}: has chat messages; task.template does not apply, task.system where they have "
                "no system message"
            )
        elif not questions[0].answer:
            self.notes.append(
                f"{source_label(source)}: without reference answers, so that the default of task.template does not "
                f"apply{f' and {grader!r} grades nothing' if needs_answer(grader) else ''}"
            )
        elif readable and template in TEMPLATES and template not in ("plain", *readable):
            self.notes.append(
                f"{source_label(source)}, {_PURPOSES[part]}: the grader '{grader}' does not read the answers that "
                f"task.template = '{template}' asks for; use task.template = {' or '.join(readable)}"
            )
        return questions

    def _with_prompts(self, questions: Iterable[Problem]) -> list[Problem]:
        """Return the questions in the template of the config."""
        template, system = self._config.template, self._config.system
        # The default template asks for a final answer, which nothing compares where there is no reference.
        unanswered = "plain" if template == _DEFAULT_TEMPLATE else template
        prompts = (
            (q, build_prompt(q.prompt, template if q.answer else unanswered, system)) for q in questions
        )
        return [replace(q, prompt=prompt, question=bare_question(q.label)) for q, prompt in prompts]


def hub_ids(config: DataTask) -> list[str]:
    """Return the ids of the data sets on the hub that a task reads, without files and folders."""
    ids = [hub_id(source) for source in (*config.sources("train"), *config.sources("heldout"))]
    return list(dict.fromkeys(filter(None, ids)))


def local_copies(part: SplitName, sources: Sequence[Source]) -> str:
    """Return the assignment of `--set` that reads the data sets on the hub from files."""
    values = [
        source.model_dump(mode="json", exclude_defaults=True, exclude={"subset", "split"}) | {"path": "FILE"}
        if hub_id(source)
        else source.model_dump(mode="json", exclude_defaults=True)
        for source in sources
    ]
    value = values[0] if len(values) == 1 else values
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf).strip()
    return f"--set {shlex.quote(f'task.{part}={text}')}"


def load_questions(
    source: Source, part: SplitName, config: DataTask | None = None
) -> tuple[list[Problem], list[str]]:
    """Read the questions of a source that the setting `part` of the task `config` names.

    Return them in the order of the rows, without a template unless they are chat messages, and notes for the user on
    what was read and dropped. Without a field for the answer, the answers are empty if no reward of the task compares
    with them. Raise ConfigError if the source cannot be read, lacks a needed field, has malformed chat messages, or has
    no usable row.
    """
    config = config or DataTask(name=DATA_TASK)
    label, place, known = source_label(source), source.path or source.name, known_dataset(source)
    grader, rewards = config.answer_grader or source.answer_grader, config.rewards or (RewardComponent(),)
    comparing = [name for item in rewards if item.weight and needs_answer(name := item.grader or grader)]
    readers = [grader, *filter(None, [config.environment, *(item.grader for item in rewards)])]
    rows = read_rows(source, part, config.revisions.get(hub_id(source) or ""))
    first_rows = list(islice(rows, SAMPLE_ROWS))
    if not first_rows:
        raise ConfigError(f"task.{part}: '{place}' holds no rows")
    columns = ", ".join(dict.fromkeys(str(name) for row in first_rows for name in row))
    names = find_fields(first_rows, source.fields, known)
    required = {"question": True, "answer": comparing, "level": source.levels is not None}
    if missing := [name for name in required if required[name] and getattr(names, name) is None]:
        sources = [*(getattr(config, part) or ())]
        index = sources.index(source) if source in sources else 0
        mapping = " ".join(f"--set task.{part}.{index}.fields.{name}=FIELD" for name in missing)
        why = f", which the grader '{comparing[0]}' compares with" if "answer" in missing else ""
        other = ", or a reward that needs no answer: --grader module:function" if why else ""
        raise ConfigError(
            f"'{place}': no field found for the {' and the '.join(missing)}{why}; its fields: {columns}; "
            f"add {mapping}{other}"
        )
    dropped: Counter[str] = Counter()
    problems: dict[str, Problem] = {}
    solutions = 0
    for number, row in enumerate(chain(first_rows, rows), start=1):
        question = read_question(row, names, f"{place}, row {number}")
        if question is None:
            is_broken = has_surrogates(value_at(row, names.question))
            dropped["with a question not in UTF-8" if is_broken else "without a question"] += 1
            continue
        solutions += question.has_solution
        level = as_level(value_at(row, names.level))
        # A text of several lines has no final answer that the known graders could compare with.
        answer = "" if names.answer is None else question.answer
        if answer is None or ("\n" in answer and needs_answer(grader)):
            is_broken = has_surrogates(value_at(row, names.answer))
            dropped["with an answer not in UTF-8" if is_broken else "without an answer"] += 1
        elif source.levels is not None and level not in source.levels:
            dropped["of other levels"] += 1
        elif (id_ := f"{label}/{_problem_name(row, names, question)}") in problems:
            dropped["repeated"] += 1
        else:
            extra = grader_columns(row, readers) | ({} if level is None else {"level": level})
            problems[id_] = Problem(id_, question.prompt, answer, label, grader, extra)
    selected = list(problems.values())
    if source.limit is not None and source.limit < len(problems):
        dropped["over the limit"] = len(problems) - source.limit
        selected = [selected[index * len(problems) // source.limit] for index in range(source.limit)]
    counts = ", ".join(f"{number:,} {reason}" for reason, number in dropped.items())
    if not selected:
        raise ConfigError(
            f"task.{part}: no row of '{place}' can be used: {counts}; the question was read from "
            f"'{names.question}', the answer from '{names.answer}'; its fields: {columns}"
        )
    # A source that is split afterwards has problems of both kinds.
    purpose = "" if part == "train" and not config.sources("heldout") else f"{_PURPOSES[part]} "
    notes = [f"{label}: {plural(len(selected), f'{purpose}problem')}"]
    notes[0] += f"; dropped: {counts}" if dropped else ""
    if solutions:
        use = "is the reference answer" if names.answer == names.question else "is left out"
        notes.append(f"{label}: the assistant message at the end of {plural(solutions, 'prompt')} {use}")
    return selected, notes


def grader_columns(row: Mapping[str, Any], graders: Iterable[str]) -> dict[str, Any]:
    """Return the columns of a row as JSON values: all for custom code, else those of verl's layout for graders."""
    names = ("data_source", "extra_info") if GRADERS.keys() >= {*graders} else row
    return {key: to_json_value(row[key]) for key in names if key in row}


def _problem_name(row: Mapping[str, Any], names: Fields, question: Question) -> str:
    """Return the identifier in the row, else a hash of the prompt and the answer, or all columns without an answer."""
    value, prompt = value_at(row, names.id), question.prompt
    name = clean_text(value) if isinstance(value, str) else as_answer(value)
    content = [prompt] if isinstance(prompt, str) else [[turn.role, turn.content] for turn in prompt]
    return name or text_hash(json.dumps([content, question.answer or to_json_value(row)]))


def question_key(prompt: Prompt) -> str:
    """Return a hash that ignores spacing, case, dollar signs and a known instruction around the question."""
    turns = [bare_question(message.content) for message in messages_of(prompt) if message.role != "system"]
    text = compatibility_form("\n".join(turns)).casefold()
    return text_hash(re.sub(r"[\s$]+", "", text))


def read_question(row: Mapping[str, Any], names: Fields, where: str) -> Question | None:
    """Read the question of a row, a text or chat messages; return None for blank text and for values of other types.

    Raise ConfigError if a list, or its JSON text, cannot be read as chat messages; the message begins with `where`.
    """
    value = chat_value(value_at(row, names.question))
    prompt: Prompt | None = clean_text(value)
    solution = None
    if isinstance(value, list) or (isinstance(value, str) and CHAT_TEXT.match(value)):
        try:
            prompt, solution = _read_messages(value)
        except ValueError as error:
            raise ConfigError(f"{where}: the chat messages of '{names.question}': {error}") from None
    if prompt is None:
        return None
    answer = solution if names.answer == names.question else value_at(row, names.answer)
    return Question(prompt, as_answer(answer), solution is not None)


def _read_messages(value: list[Any] | str) -> tuple[tuple[Message, ...], str | None]:
    """Return the prompt, and the content of an assistant message at the end; raise ValueError for anything else."""
    if isinstance(value, str):
        raise ValueError("no JSON text; write them with json.dumps, or save the data as .jsonl or .parquet")
    messages = []
    for number, entry in enumerate(value, start=1):
        message = entry if isinstance(entry, Mapping) else {}
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or (role == "system" and number > 1):
            raise ValueError(
                f"message {number} has the role {role!r:.50}; expected {{role: user, content: ...}}, with the role "
                "user, assistant or, of the first message, system"
            )
        if isinstance(content, list):
            parts = [part if isinstance(part, Mapping) else {} for part in content]
            texts = [part.get("text") if part.get("type") == "text" else None for part in parts]
            content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(content, str) or (content.strip() and clean_text(content) is None):
            raise ValueError(
                f"message {number} has content that is no text in UTF-8; only a text, or a list of parts of the type "
                "'text', is supported"
            )
        messages.append(Message(role, content))
    solution = messages.pop().content if messages and messages[-1].role == "assistant" else None
    if not messages or messages[-1].role != "user" or not messages[-1].content.strip():
        raise ValueError(
            "no question, which is a message with the role user and a text, at the end or before an assistant message"
        )
    return tuple(messages), solution
