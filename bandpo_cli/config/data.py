"""Settings of the sources of questions and answers (`task.train`, `task.heldout`) and of their grader."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from bandpo_cli.config.section import Section, check_known
from bandpo_cli.registries import DATASETS, GRADERS

LABEL_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
"""What is allowed as a part of a metric name."""

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""The suffixes of the local files that can be read."""

DatasetName = Annotated[str, BeforeValidator(lambda name: check_known(name, DATASETS))]
GraderName = Annotated[str, AfterValidator(GRADERS.check_name)]


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

    name: DatasetName | None = None
    """A known data set: its hub id, its fields and the form of its answers are known. With `path` as well, that
    file is read instead (a local copy)."""

    path: str | None = Field(None, min_length=1)
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

    grader: GraderName | None = None
    """Grader of this source's answers; null: the data set's own, `math` for any other source."""

    label: str | None = Field(None, pattern=LABEL_PATTERN, max_length=60)
    """Its name in metrics; by default the name of the data set, or of the file without its suffix."""

    @model_validator(mode="before")
    @classmethod
    def _read_plain_string(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value} if value in DATASETS else {"path": value}
        return value

    @model_validator(mode="after")
    def _check_has_location(self) -> Source:
        if self.name is None and self.path is None:
            raise ValueError(f"give it a name ({', '.join(DATASETS)}) or a path")
        return self


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, dict)) else value


Sources = Annotated[tuple[Source, ...], BeforeValidator(_as_list)]
"""Several sources; a single one need not be in a list."""
