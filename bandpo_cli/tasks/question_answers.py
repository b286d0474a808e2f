"""Questions with reference answers: several sources mixed for training, evaluation sets that training never sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from bandpo_cli.config.data import Source
from bandpo_cli.config.task import DataTask
from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import DATASETS
from bandpo_cli.tasks.questions import (
    LoadedQuestions,
    Question,
    build_prompt,
    format_counts,
    load_questions,
    text_hash,
)
from bandpo_cli.tasks.rows import source_label
from bandpo_cli.types import Problem


class QuestionAnswerTask:
    """The task of data sets and files. Its parts are read when they are first asked for, and once only."""

    def __init__(self, config: DataTask) -> None:
        """Check what can be checked unread.

        Raises:
            ConfigError: there are no problems at all, or two sources share a label.
        """
        self.name: str = config.name
        self._config = config
        self._notes: list[str] = []
        self._heldout_sources = config.heldout or _default_heldout(config)
        _check_labels("heldout", self._heldout_sources)
        if not self._heldout_sources:
            _check_labels("train", self._train_sources)

    def train_problems(self) -> Sequence[Problem]:
        """The problems to learn from.

        Raises:
            ConfigError: a source cannot be used, or nothing is left to train on.
        """
        return self._train

    def heldout_sets(self) -> dict[str, Sequence[Problem]]:
        """The evaluation sets by label; the training sources are read only where they have to be split.

        Raises:
            ConfigError: a source cannot be used.
        """
        return self._heldout_problems

    def notes(self) -> list[str]:
        """Say in lines what has been read so far, and what was left out of it."""
        return list(self._notes)

    @cached_property
    def _train_sources(self) -> tuple[Source, ...]:
        sources = self._config.train or _default_train(self._config)
        _check_labels("train", sources)
        return sources

    @cached_property
    def _heldout_problems(self) -> dict[str, Sequence[Problem]]:
        return {label: self._problems(questions) for label, questions in self._heldout.items()}

    @cached_property
    def _heldout(self) -> dict[str, list[Question]]:
        if not self._heldout_sources:
            return {self._split_label: self._split[1]}
        sets = {}
        for source in self._heldout_sources:
            loaded = load_questions(source, "heldout", self._config.grader)
            self._note(loaded, "evaluation")
            sets[loaded.label] = _hash_order(loaded.questions)
        return sets

    @cached_property
    def _train(self) -> list[Problem]:
        self._train_sources  # noqa: B018 - raises where there are none, before anything is read
        if not self._heldout_sources:
            return self._problems(self._split[0])
        heldout = [question for questions in self._heldout.values() for question in questions]
        keys, ids = {question.key for question in heldout}, {question.id for question in heldout}
        questions = self._mixed
        clean = [question for question in questions if question.key not in keys]
        if shared := len(questions) - len(clean):
            self._notes.append(f"train: {_problems(shared)} left out, in an evaluation set too")
        if not clean:
            raise ConfigError(
                "task.train: every problem is in an evaluation set too, so none is left to train on; "
                "name another file in task.heldout"
            )
        # Ids that the files give may number training and evaluation problems alike.
        return self._problems(replace(q, id=f"{q.id}/train") if q.id in ids else q for q in clean)

    @cached_property
    def _mixed(self) -> list[Question]:
        """All sources together, in an order in which none comes first."""
        questions: dict[str, Question] = {}
        for source in self._train_sources:
            loaded = load_questions(source, "train", self._config.grader)
            self._note(loaded, "train")
            questions |= {question.id: question for question in loaded.questions}
        return _hash_order(questions.values())

    @cached_property
    def _split(self) -> tuple[list[Question], list[Question]]:
        """Training and held-out questions; a hash of the question alone says which, so that adding rows moves none."""
        fraction = self._config.heldout_fraction
        ranked = sorted((_unit_hash(question.key), question.key) for question in self._mixed)
        kept = {key for rank, key in ranked if rank < fraction} or {ranked[0][1]}
        train = [question for question in self._mixed if question.key not in kept]
        heldout = [question for question in self._mixed if question.key in kept]
        if not train:
            raise ConfigError(
                f"task.train: of {_problems(len(ranked))}, heldout_fraction = {fraction:g} leaves none to train on; "
                "give more problems, or evaluation problems of their own in task.heldout"
            )
        self._notes.append(
            f"{self._split_label}: {len(heldout):,} of {_problems(len(self._mixed))} kept for evaluation "
            f"(heldout_fraction = {fraction:g})"
        )
        return train, heldout

    @property
    def _split_label(self) -> str:
        labels = [source_label(source) for source in self._train_sources]
        return labels[0] if len(labels) == 1 else "heldout"

    def _problems(self, questions: Iterable[Question]) -> list[Problem]:
        config = self._config
        return [
            Problem(
                id=question.id,
                prompt=build_prompt(question.text, config.template, config.system)
                if isinstance(question.text, str)
                else question.text,
                answer=question.answer,
                source=question.label,
                grader=question.grader,
                extra=question.extra,
            )
            for question in questions
        ]

    def _note(self, loaded: LoadedQuestions, what: str) -> None:
        left_out = f"; left out: {format_counts(loaded.left_out)}" if loaded.left_out else ""
        self._notes.append(f"{loaded.label}: {_problems(len(loaded.questions), what)}{left_out}")
        if any(not isinstance(question.text, str) for question in loaded.questions):
            self._notes.append(
                f"{loaded.label}: brings chat messages; task.template and task.system do not apply"
            )


def _default_train(config: DataTask) -> tuple[Source, ...]:
    if config.name == "data":
        raise ConfigError(
            "task.train: the task 'data' needs it: --set task.train=FILE, or a known data set's name"
        )
    if DATASETS[config.name].train_split is None:
        raise ConfigError(
            f"task.name = '{config.name}': this data set is for evaluation only; use it in task.heldout "
            f"(--set task.heldout={config.name}) of a task to train on"
        )
    return (Source(name=config.name),)


def _default_heldout(config: DataTask) -> tuple[Source, ...]:
    if config.name == "data":
        return ()
    known = DATASETS[config.name]
    names = known.evaluation or ((config.name,) if known.eval_split else ())
    return tuple(Source(name=name) for name in names)


def _problems(count: int, what: str = "") -> str:
    return f"{count:,} {what} problem{'' if count == 1 else 's'}".replace("  ", " ")


def _check_labels(part: str, sources: Iterable[Source]) -> None:
    for label, count in Counter(source_label(source) for source in sources).items():
        if count > 1:
            raise ConfigError(
                f"task.{part}: {count} sources are called '{label}'; give each a label: of its own"
            )


def _hash_order(questions: Iterable[Question]) -> list[Question]:
    """Order by a hash, so that any prefix is a fair sample whatever order the rows came in."""
    return sorted(questions, key=lambda question: (text_hash(question.id), question.id))


def _unit_hash(key: str) -> float:
    """A number in [0, 1)."""
    return int(text_hash(f"heldout/{key}"), 16) / 2**64
