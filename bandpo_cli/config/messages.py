"""Pydantic's findings as one line that a user can act on."""

from __future__ import annotations

import re
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from bandpo_cli.errors import nearest


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first finding as `key = value: what is wrong and what is allowed`, and how many more there are."""
    findings = error.errors(include_url=False)
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return _explain_one(findings[0], model) + more


def _explain_one(finding: ErrorDetails, model: type[BaseModel]) -> str:
    path, owner = _walk(finding["loc"], model)
    kind, value = finding["type"], finding["input"]
    if kind == "extra_forbidden":
        names = list(owner.model_fields) if owner else []
        kind_of = f" of '{tag}'" if (tag := _only_tag(owner)) else ""
        return f"{path}: no such setting{kind_of}{nearest(path.split('.')[-1], names)}; known: {', '.join(names)}"
    if kind == "union_tag_invalid":
        tag = str(finding["ctx"]["discriminator"]).strip("'")
        given = value.get(tag) if isinstance(value, dict) else value
        allowed = [name.strip(" '") for name in str(finding["ctx"]["expected_tags"]).split(",")]
        return (
            f"{path}.{tag} = {given!r}: unknown{nearest(str(given), allowed)}; allowed: {', '.join(allowed)}"
        )
    if kind == "literal_error":
        allowed = [str(name) for name in _literal_values(owner, path)] or [str(finding["ctx"]["expected"])]
        return f"{path} = {value!r}: unknown{nearest(str(value), allowed)}; allowed: {', '.join(allowed)}"
    message = finding["msg"].removeprefix("Value error, ")
    if not path:
        return message
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        return f"{path} = {_short(value)}: a section is expected here, with keys below it"
    return f"{path} = {_short(value)}: {message[0].lower()}{message[1:]}"


def _only_tag(owner: type[BaseModel] | None) -> str | None:
    """Return the tag of one kind of a tagged choice, e.g. `clip`; None for an ordinary section."""
    first = next(iter(owner.model_fields.values())) if owner else None
    values = get_args(first.annotation) if first else ()
    return str(values[0]) if len(values) == 1 and isinstance(values[0], str) else None


def _short(value: Any) -> str:
    text = re.sub(r"://[^/@]*@", "://***@", repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


def _walk(loc: tuple[int | str, ...], model: type[BaseModel]) -> tuple[str, type[BaseModel] | None]:
    """Turn pydantic's location into the user's dotted key and the settings class that holds it.

    In a location a tagged choice adds its tag (`bounds`, `band`, `delta`), which is no key of the user's.
    """
    keys: list[str] = []
    owner: type[BaseModel] | None = model
    options: list[type[BaseModel]] = []
    for part in loc:
        if options and keys and len(options) > 1:
            chosen = [cls for cls in options if any(f.default == part for f in cls.model_fields.values())]
            if chosen:
                owner, options = chosen[0], []
                continue
        if (
            owner is None
            or part in ("float", "int", "str")
            or str(part).startswith(("function-", "constrained-"))
        ):
            continue
        keys.append(str(part))
        field = owner.model_fields.get(str(part))
        if field is None:
            continue
        nested = get_args(field.annotation) or (field.annotation,)
        options = [cls for cls in nested if isinstance(cls, type) and issubclass(cls, BaseModel)]
        if len(options) == 1 and len(loc) > len(keys):
            owner, options = options[0], []
    return ".".join(keys), owner


def _literal_values(owner: type[BaseModel] | None, path: str) -> tuple[Any, ...]:
    field = owner.model_fields.get(path.split(".")[-1]) if owner else None
    return get_args(field.annotation) if field else ()
