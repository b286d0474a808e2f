"""Pydantic's findings as one line that a user can act on."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bandpo_cli.errors import nearest


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first finding as `key = value: what is wrong and what is allowed`, and how many more there are."""
    findings = error.errors(include_url=False)
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return _explain_one(findings[0], model) + more


def tags_of(section: type[BaseModel], tag: str) -> tuple[Any, ...]:
    """Return the values of its tag that choose this kind of section, e.g. ("clip",) for `method` of ClipBounds."""
    field = section.model_fields.get(tag)
    return _literal_values(field.annotation) if field else ()


def _explain_one(finding: ErrorDetails, model: type[BaseModel]) -> str:
    path, owner, tag = _walk(finding["loc"], model)
    kind, value = finding["type"], finding["input"]
    if kind == "extra_forbidden":
        names = list(owner.model_fields) if owner else []
        kind_of = f" of '{tag}'" if tag else ""
        return f"{path}: no such setting{kind_of}{nearest(path.split('.')[-1], names)}; known: {', '.join(names)}"
    if kind == "union_tag_invalid":
        key = str(finding["ctx"]["discriminator"]).strip("'")
        given = value.get(key) if isinstance(value, dict) else value
        allowed = [name.strip(" '") for name in str(finding["ctx"]["expected_tags"]).split(",")]
        return (
            f"{path}.{key} = {given!r}: unknown{nearest(str(given), allowed)}; allowed: {', '.join(allowed)}"
        )
    if kind == "literal_error":
        field = owner.model_fields.get(path.split(".")[-1]) if owner else None
        allowed = [str(name) for name in _literal_values(field.annotation)] if field else []
        allowed = allowed or [str(finding["ctx"]["expected"])]
        return f"{path} = {value!r}: unknown{nearest(str(value), allowed)}; allowed: {', '.join(allowed)}"
    message = finding["msg"].removeprefix("Value error, ")
    if not path:
        return message
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        return f"{path} = {_short(value)}: a section is expected here, with keys below it"
    return f"{path} = {_short(value)}: {message[0].lower()}{message[1:]}"


def _short(value: Any) -> str:
    text = re.sub(r"://[^/@]*@", "://***@", repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


class _Place(NamedTuple):
    """Where a finding lies: the user's dotted key, the settings class that holds it, and the kind chosen there."""

    path: str
    owner: type[BaseModel] | None
    tag: str | None


def _walk(loc: tuple[int | str, ...], model: type[BaseModel]) -> _Place:
    """Follow pydantic's location down the settings classes.

    In a location a tagged choice adds its tag (`bounds`, `band`, `delta`), which is no key of the user's.
    """
    path, tag = "", None
    owner: type[BaseModel] | None = model
    options: list[type[BaseModel]] = []
    for index, part in enumerate(loc):
        if len(options) > 1:
            chosen = [cls for cls in options if any(part in tags_of(cls, name) for name in cls.model_fields)]
            if chosen:
                owner, options, tag = chosen[0], [], str(part)
                continue
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        if owner is None or part in ("float", "int", "str") or part.startswith(("function-", "constrained-")):
            continue
        path += f".{part}" if path else part
        field = owner.model_fields.get(part)
        if field is None:
            continue
        options = _sections(field.annotation)
        if len(options) == 1 and index + 1 < len(loc):
            owner, options, tag = options[0], [], None
    return _Place(path, owner, tag)


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the settings classes that an annotation allows: `X`, `X | None`, `X | Y`, `tuple[X, ...]`."""
    nested = get_args(annotation) or (annotation,)
    return [cls for cls in nested if isinstance(cls, type) and issubclass(cls, BaseModel)]


def _literal_values(annotation: Any) -> tuple[Any, ...]:
    """Return the values of a Literal, or of all Literals in a union."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(value for option in get_args(annotation) for value in _literal_values(option))
