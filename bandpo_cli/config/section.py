"""Base class of the settings sections, and sections whose class a tag chooses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Union

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from bandpo_cli.errors import unknown_choice

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Frozen settings: unknown keys are an error, and the attributes' docstrings are their descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Choice:
    """Validates a section whose class is chosen by a tag, from a table that may grow at run time.

    It is part of a field's annotation, `bounds: Annotated[MethodSettings, Choice(classes, "method")]`. The errors are
    those of pydantic's tagged unions: their location contains the tag, as in ("bounds", "band", "delta").
    """

    def __init__(self, classes: Callable[[], Mapping[str, type[Section]]], tag: str) -> None:
        """Choose from `classes()`, by the value of the field `tag`."""
        self.classes = classes
        self.tag = tag
        self._built_for: tuple[tuple[str, type[Section]], ...] = ()
        self._adapter: TypeAdapter[Any] | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Return the schema that pydantic validates the field with."""
        return core_schema.no_info_plain_validator_function(self._validate)

    def _validate(self, value: Any) -> Any:
        if not isinstance(value, (dict, Section)):
            raise PydanticCustomError(
                "model_attributes_type", "Input should be a valid dictionary or object to extract fields from"
            )
        classes = self.classes()
        name = self._tag_of(value)
        if name is None and (not isinstance(value, dict) or self.tag not in value):
            raise PydanticCustomError(
                "union_tag_not_found",
                "Unable to extract tag using discriminator '{discriminator}'",
                {"discriminator": self.tag},
            )
        if not isinstance(name, str) or name not in classes:
            raise PydanticCustomError(
                "union_tag_invalid",
                "Input tag '{tag}' does not match any of the expected tags: {expected_tags}",
                {"discriminator": self.tag, "tag": str(name), "expected_tags": ", ".join(classes)},
            )
        return self._adapter_for(classes).validate_python(value)

    def _adapter_for(self, classes: Mapping[str, type[Section]]) -> TypeAdapter[Any]:
        """Return the validator of the tagged union of `classes`, built again after an entry was registered."""
        table = tuple(classes.items())
        if self._adapter is None or table != self._built_for:
            members = tuple(Annotated[cls, Tag(name)] for name, cls in table)
            union: Any = Annotated[Union[members], Discriminator(self._tag_of)]  # noqa: UP007 (a run-time tuple)
            self._adapter = TypeAdapter(union)
            self._built_for = table
        return self._adapter

    def _tag_of(self, value: Any) -> Any:
        return value.get(self.tag) if isinstance(value, dict) else getattr(value, self.tag, None)


def choice_of(field: FieldInfo) -> Choice | None:
    """Return the choice that a field of a section is, None for any other field."""
    return next((item for item in field.metadata if isinstance(item, Choice)), None)


def check_known(value: Any, allowed: Collection[str]) -> str:
    """Return `value` if it is one of `allowed`; raise a pydantic error that lists them otherwise."""
    if isinstance(value, str) and value in allowed:
        return value
    raise PydanticCustomError("unknown_name", "{message}", {"message": unknown_choice(value, allowed)})
