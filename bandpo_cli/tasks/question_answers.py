"""Question-answer task: several sources mixed for training, and evaluation sets that training never uses."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

from bandpo_cli.config.task import TEMPLATES, DataTask, Source
from bandpo_cli.datasets import DATA_TASK, DATASETS
from bandpo_cli.errors import ConfigError, nearest, plural
from bandpo_cli.registries import GRADERS
from bandpo_cli.tasks.prompts import build_prompt
from bandpo_cli.tasks.questions import (
    LoadedQuestions,
    format_counts,
    hash_order,
    load_questions,
    question_key,
    text_hash,
)
from bandpo_cli.tasks.rows import SplitName, hub_id, source_label
from bandpo_cli.types import Problem


class QuestionAnswerTask:
    """The task of data sets and files. Each source is read once, when its problems are first requested."""

    def __init__(self, config: DataTask) -> None:
        """Raise ConfigError if there are no sources, two sources share a label, or a revision is of no source."""
        self.name, self._config = config.name, config
        self._notes: list[str] = []
        self._keep_columns = any(
            reward.grader is not None and reward.grader not in GRADERS for reward in config.rewards or ()
        )
        known = hub_ids(config)
        if unknown := [name for name in config.revisions if name not in known]:
            raise ConfigError(
                f"task.revisions: '{unknown[0]}' is no data set on the hub that this task reads"
                f"{nearest(unknown[0], known)}; it reads {', '.join(known) or 'local files only'}"
            )
        self._train_sources, self._heldout_sources = _sources(config, "train"), _sources(config, "heldout")
        for part, sources in (("train", self._train_sources), ("heldout", self._heldout_sources)):
            counts = Counter(map(source_label, sources))
            if repeated := [label for label, count in counts.items() if count > 1]:
                names = f"{counts[repeated[0]]} sources have the label '{repeated[0]}'"
                raise ConfigError(f"task.{part}: {names}; give each a different label:")
        if not self._heldout_sources:
            self._check_train_sources()
        sources = self._train_sources
        self._split_label = source_label(sources[0]) if len(sources) == 1 else "heldout"

    def train_problems(self) -> Sequence[Problem]:
        """Return the training problems; raise ConfigError if a source cannot be used or no problem remains."""
        return self._train

    def heldout_sets(self) -> dict[str, Sequence[Problem]]:
        """Return the evaluation sets by label; raise ConfigError if a source cannot be used.

        The training sources are read only if they are to be split.
        """
        return self._heldout_problems

    def notes(self) -> list[str]:
        """Return lines on what has been read so far, and how many rows were dropped and why."""
        return list(self._notes)

    def _check_train_sources(self) -> None:
        if not self._train_sources:
            raise ConfigError(
                "task.train: the task 'data' needs it: --set task.train=FILE, or the name of a known data set"
                if self.name == DATA_TASK
                else f"task.name = '{self.name}': this data set is for evaluation only; use it in task.heldout "
                f"(--set task.heldout={self.name}) of another task"
            )

    @cached_property
    def _heldout_problems(self) -> dict[str, Sequence[Problem]]:
        return {label: self._with_prompts(questions) for label, questions in self._heldout.items()}

    @cached_property
    def _heldout(self) -> dict[str, list[Problem]]:
        if not self._heldout_sources:
            return {self._split_label: self._train_heldout_split[1]}
        loaded = [self._load(source, "heldout") for source in self._heldout_sources]
        return {part.label: hash_order(part.questions) for part in loaded}

    @cached_property
    def _train(self) -> list[Problem]:
        self._check_train_sources()
        if not self._heldout_sources:
            return self._with_prompts(self._train_heldout_split[0])
        heldout = list(chain.from_iterable(self._heldout.values()))
        keys, ids = {question_key(question.prompt) for question in heldout}, {q.id for q in heldout}
        questions = self._all_train_questions
        clean = [question for question in questions if question_key(question.prompt) not in keys]
        if shared := len(questions) - len(clean):
            self._notes.append(f"train: {plural(shared, 'problem')} dropped, also in an evaluation set")
        if not clean:
            raise ConfigError(
                "task.train: every problem is also in an evaluation set, so none remains to train on; "
                "name another file in task.heldout"
            )
        # The ids in the files may be the same numbers for training and evaluation problems.
        return self._with_prompts(replace(q, id=f"{q.id}/train") if q.id in ids else q for q in clean)

    @cached_property
    def _all_train_questions(self) -> list[Problem]:
        """The questions of all training sources, mixed in the order of a hash."""
        loaded = [self._load(source, "train") for source in self._train_sources]
        return hash_order({q.id: q for part in loaded for q in part.questions}.values())

    @cached_property
    def _train_heldout_split(self) -> tuple[list[Problem], list[Problem]]:
        """The training and the held-out questions, by a hash of the question alone, so that adding rows moves none."""
        fraction = self._config.heldout_fraction
        keyed = [(question_key(question.prompt), question) for question in self._all_train_questions]
        # Another hash than in the countdown task: both decide which problems are held out, and must not change.
        ranked = sorted((int(text_hash(f"heldout/{key}"), 16) / 2**64, key) for key, _ in keyed)
        heldout_keys = {key for rank, key in ranked if rank < fraction} or {ranked[0][1]}
        train = [question for key, question in keyed if key not in heldout_keys]
        heldout = [question for key, question in keyed if key in heldout_keys]
        if not train:
            raise ConfigError(
                f"task.train: of {plural(len(keyed), 'problem')}, heldout_fraction = {fraction:g} leaves none to "
                "train on; give more problems, or separate evaluation problems in task.heldout"
            )
        self._notes.append(
            f"{self._split_label}: {len(heldout):,} of {plural(len(keyed), 'problem')} held out "
            f"for evaluation (heldout_fraction = {fraction:g})"
        )
        return train, heldout

    def _load(self, source: Source, part: SplitName) -> LoadedQuestions:
        """Return the questions of a source, and add notes on them."""
        config, purpose = self._config, {"train": "training", "heldout": "evaluation"}[part]
        revision = config.revisions.get(hub_id(source) or "")
        loaded = load_questions(source, part, config.answer_grader, self._keep_columns, revision)
        dropped = f"; dropped: {format_counts(loaded.dropped)}" if loaded.dropped else ""
        notes = [f": {plural(len(loaded.questions), f'{purpose} problem')}{dropped}"]
        if loaded.note:
            notes.append(f": {loaded.note}")
        grader = loaded.questions[0].grader
        readable = GRADERS[grader].templates if grader in GRADERS else ()
        if any(not isinstance(question.prompt, str) for question in loaded.questions):
            notes.append(": has chat messages; task.template and task.system do not apply")
        elif readable and config.template in TEMPLATES and config.template not in ("plain", *readable):
            notes.append(
                f", {purpose}: the grader '{grader}' does not read the answers that task.template = "
                f"'{config.template}' asks for; use task.template = {' or '.join(readable)}"
            )
        self._notes += [loaded.label + note for note in notes]
        return loaded

    def _with_prompts(self, questions: Iterable[Problem]) -> list[Problem]:
        """Return the questions in the template of the config; chat messages are complete prompts already."""
        template, system = self._config.template, self._config.system
        with_prompts = []
        for question in questions:
            if isinstance(prompt := question.prompt, str):
                prompt = build_prompt(prompt, template, system)
            with_prompts.append(replace(question, prompt=prompt))
        return with_prompts


def hub_ids(config: DataTask) -> list[str]:
    """Return the ids of the data sets on the hub that a task reads, without files and folders."""
    ids = [hub_id(source) for source in (*_sources(config, "train"), *_sources(config, "heldout"))]
    return list(dict.fromkeys(filter(None, ids)))


def _sources(config: DataTask, part: SplitName) -> tuple[Source, ...]:
    """Return the sources of a part: the configured ones, else those of the known data set `task.name`."""
    configured: tuple[Source, ...] = getattr(config, part)
    if configured or config.name == DATA_TASK:
        return configured
    known = DATASETS[config.name]
    own = (config.name,) if {"train": known.train_split, "heldout": known.eval_split}[part] else ()
    return tuple(Source(name=name) for name in (part == "heldout" and known.evaluation) or own)
