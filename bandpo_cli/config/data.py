"""Where questions and answers come from, and who grades them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from bandpo_cli.config.base import Section
from bandpo_cli.errors import nearest

DatasetName = Literal[
    "gsm8k", "math", "dapo-math-17k", "aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench"
]
DATASETS: tuple[str, ...] = get_args(DatasetName)
"""The data sets known by name."""

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""The endings of the local files that can be read."""

GRADERS = ("math", "number", "countdown")
"""The graders known by name; any other is given as `module:function`."""


def is_function_path(text: str) -> bool:
    """Tell whether `text` has the form `package.module:function`."""
    module, colon, function = text.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def known_grader(name: str) -> str:
    """Accept a known grader or `module:function`; raise ValueError with the nearest name otherwise."""
    if name in GRADERS or is_function_path(name):
        return name
    raise ValueError(
        f"no grader of that name{nearest(name, GRADERS)}; known: {', '.join(GRADERS)}, "
        "or your own as module:function"
    )


GraderName = Annotated[str, AfterValidator(known_grader)]


class Fields(Section):
    """Which fields of a row hold what; a dot goes into a nested one (`reward_model.ground_truth`).

    A name that is left out is looked for: first the verl layout (`prompt` as chat messages,
    `reward_model.ground_truth`), then the usual names.
    """

    question: str | None = None
    """The question as text, or the whole prompt as chat messages."""
    answer: str | None = None
    """The reference answer; the end of a worked solution (`#### 18`, a last \\boxed{}) is taken out of it."""
    level: str | None = None
    """How hard the problem is, for `levels`."""
    id: str | None = None
    """What names the problem; without one it is named by a hash of its prompt and answer."""


class Source(Section):
    """One source of problems. Written as a bare text it is a known data set's name or a path."""

    name: DatasetName | None = None
    """A known data set: its place, its fields and the form of its answers are known. With `path` as well, that
    file is read in its place (a local copy)."""

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
    """Keep this many problems at most, evenly spread over the file."""

    grader: GraderName | None = None
    """Judges this source's answers; null: the data set's own, `math` for any other."""

    label: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=60)
    """Its name in metrics; by default the data set's, or the file's without its ending."""

    @model_validator(mode="before")
    @classmethod
    def _bare_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value} if value in DATASETS else {"path": value}
        return value

    @model_validator(mode="after")
    def _has_a_place(self) -> Source:
        if self.name is None and self.path is None:
            raise ValueError(f"give it a name ({', '.join(DATASETS)}) or a path")
        return self


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, dict)) else value


Sources = Annotated[tuple[Source, ...], BeforeValidator(_as_list)]
"""Several sources; a single one may stand alone."""
