"""Layers of settings and their validation: YAML files, then flags, then `--set a.b=c`.

Later layers win, key by key. Where a later layer changes the tag of a section (say `bounds.method`), the fields of the
earlier layers are dropped, because they belong to another class. A validation error becomes one line that names the
key, the value, what is allowed and the nearest valid name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from bandpo_cli.config.files import FileLayer, parse_yaml, read_mapping
from bandpo_cli.config.other_trainers import setting_for
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.section import Choice, choice_of
from bandpo_cli.config.task import task_defaults
from bandpo_cli.errors import ConfigError, has_secret, nearest, redact_credentials, unknown_choice
from bandpo_cli.registries.methods import method_name

_MAX_PEERS = 7
"""Methods or tasks that an error lists as having a setting."""

Layer = Mapping[str, Any]
"""Settings by section, as in a YAML file: {"optim": {"lr": 1e-4}}."""


def resolve(layers: Iterable[Layer]) -> RunConfig:
    """Merge the layers, earliest first, over the defaults of the task that they name, and validate the result.

    Raises:
        ConfigError: one line that names the key, the value, what is allowed and the nearest valid name.
    """
    layers = list(layers)
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge(merged, _without_aliases(layer), RunConfig)
    merged = merge(task_defaults(merged.get("task")), merged, RunConfig)
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        where = _origin(error.errors(include_url=False)[0], layers)
        message = validation_message(error, RunConfig)
        raise ConfigError(f"{where}: {message}" if where else message) from None


def to_yaml(config: RunConfig) -> str:
    """Return the resolved configuration as YAML; `read_layer` and `resolve` turn it back into the same one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def split_values(text: str) -> list[str]:
    """Return the values of a comma-separated list, without the spaces around them: 0.01 and 0.05 of `0.01, 0.05`.

    Commas within brackets belong to a value: `[0.9,0.95],[0.9,0.99]` has two.
    """
    values, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth <= 0:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def read_layer(path: Path, where: str = "--config") -> Layer:
    """Read a YAML config file that the package has written; `where` is the option or key that named the file.

    Secrets in `tracking.uri`, which earlier versions have stored, are redacted.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not hold a mapping.
    """
    return without_secret(read_mapping(path, f"{where} {path}"))


def without_secret(layer: Layer) -> Layer:
    """Return stored settings with the secrets in `tracking.uri` redacted."""
    tracking = layer.get("tracking")
    uri = tracking.get("uri") if isinstance(tracking, Mapping) else None
    if not isinstance(tracking, Mapping) or not isinstance(uri, str) or not has_secret(uri):
        return layer
    return {**layer, "tracking": {**tracking, "uri": redact_credentials(uri)}}


def read_assignments(assignments: Iterable[str]) -> Layer:
    """Return `["optim.lr=1e-4", ...]` of `--set` as one layer; values are read as YAML.

    Raises:
        ConfigError: an assignment is not of the form `a.b=value`, or one contradicts another.
    """
    layer: dict[str, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(
                f"--set {assignment!r}: write it as section.key=value, for example optim.lr=1e-4"
            )
        where = f"--set {assignment!r}"
        try:
            value = parse_yaml(text, where)
        except ConfigError as error:
            if text[:1] not in "{[" or text[-1:] in "}]":
                raise
            # A template such as `{question} Answer with the number only.`
            raise ConfigError(
                f"{error}; quote a text that begins with {text[0]}: --set '{path}=\"...\"'"
            ) from None
        _set_nested(layer, keys, value, where)
    return layer


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted settings as sections: {"optim.lr": 1e-4} as {"optim": {"lr": 1e-4}}.

    Raises:
        ConfigError: one of them is not a dotted name, or contradicts another.
    """
    layer: dict[str, Any] = {}
    for key, value in settings.items():
        keys = key.split(".")
        if not all(keys):
            raise ConfigError(f"'{key}': a setting is written as section.key")
        _set_nested(layer, keys, value, f"'{key}'")
    return layer


def flatten(
    settings: Any, expand_lists: bool = False, keep_empty: bool = False, path: str = ""
) -> dict[str, Any]:
    """Return sections as dotted settings, the inverse of `nest`.

    Args:
        settings: a mapping of settings by section.
        expand_lists: give each element of a list that holds mappings or lists a key of its own: `task.train.0.path`.
        keep_empty: an empty mapping is a value; otherwise it has no key.
        path: the key of `settings` itself.
    """
    nested: Iterable[tuple[Any, Any]]
    if isinstance(settings, Mapping) and (settings or not keep_empty or not path):
        nested = settings.items()
    elif (
        expand_lists
        and isinstance(settings, list)
        and any(isinstance(setting, dict | list) for setting in settings)
    ):
        nested = enumerate(settings)
    else:
        return {path: settings}
    flat: dict[str, Any] = {}
    for key, value in nested:
        flat |= flatten(value, expand_lists, keep_empty, f"{path}.{key}" if path else str(key))
    return flat


def merge(base: Layer, over: Layer, model: type[BaseModel]) -> dict[str, Any]:
    """Return `base` with `over` on top, both shaped like `model`; the module docstring describes tagged sections."""
    merged = dict(base)
    for key, value in over.items():
        field = model.model_fields.get(key)
        earlier = merged.get(key)
        if field is None or not isinstance(value, dict):
            merged[key] = value
        elif (choice := choice_of(field)) is not None:
            merged[key] = _merge_tagged(earlier if isinstance(earlier, dict) else {}, value, field, choice)
        elif get_origin(field.annotation) is dict:
            merged[key] = _merge_mappings(earlier, value)
        else:
            inner = _nested_section(field)
            mergeable = inner is not None and isinstance(earlier, dict)
            merged[key] = merge(earlier, value, inner) if mergeable else value  # type: ignore[arg-type]
    return merged


def validation_message(error: ValidationError, model: type[BaseModel]) -> str:
    """Return the first error as `key = value: what is wrong and what is allowed`, with the number of further errors."""
    # A setting may be missing because its name is misspelt.
    errors = sorted(error.errors(include_url=False), key=lambda item: item["type"] == "missing")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return _one_message(errors[0], model) + more


def _without_aliases(layer: Layer) -> Layer:
    """Return `layer` with the name of its method in place of an alias (`grpo` is `clip`)."""
    bounds = layer.get("bounds")
    if not isinstance(bounds, dict) or not isinstance(bounds.get("method"), str):
        return layer
    return {**layer, "bounds": {**bounds, "method": method_name(bounds["method"])}}


def _origin(error: ErrorDetails, layers: Sequence[Layer]) -> str | None:
    """Return file and line of the setting that an error is about; None where the last layer that has it is no file."""
    keys = re.sub(r"\[\d+\]", "", _locate(error["loc"], RunConfig).path).split(".")
    if error["type"] == "union_tag_invalid":
        keys.append(str(error["ctx"]["discriminator"]))
    for layer in reversed(layers):
        if _has(layer, keys):
            return layer.locate(keys) if isinstance(layer, FileLayer) else None
    return None


def _has(layer: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(layer, Mapping) or key not in layer:
            return False
        layer = layer[key]
    return True


def _set_nested(layer: dict[str, Any], keys: Sequence[str], value: Any, where: str) -> None:
    """Set a value in nested mappings; raise ConfigError, which begins with `where`, if a section has a plain value."""
    section = layer
    for key in keys[:-1]:
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f"{where}: '{key}' has a plain value already; give it a value or keys below it, not both"
            )
    section[keys[-1]] = value


def _merge_mappings(base: Any, over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `over` on top, key by key at every level."""
    merged = dict(base) if isinstance(base, dict) else {}
    for key, value in over.items():
        merged[key] = _merge_mappings(merged.get(key), value) if isinstance(value, dict) else value
    return merged


def _merge_tagged(earlier: Layer, value: Layer, field: FieldInfo, choice: Choice) -> dict[str, Any]:
    """Merge two layers of a tagged choice; a changed tag drops the earlier layer."""
    tag, classes = choice.tag, choice.classes()
    default = getattr(field.get_default(call_default_factory=True), tag, None)
    earlier_kind = earlier.get(tag, default)
    kind = value.get(tag, earlier_kind)
    if kind != earlier_kind:
        return dict(value)
    if not isinstance(kind, str) or kind not in classes:
        return {**earlier, **value}
    return {tag: kind, **merge(earlier, value, classes[kind])}


def _nested_section(field: FieldInfo) -> type[BaseModel] | None:
    """Return the settings class that a field allows: `X`, `X | None`, `tuple[X, ...]`; None for plain values."""
    options = get_args(field.annotation) or (field.annotation,)
    options = tuple(
        inner for option in options for inner in (option, *get_args(option))
    )  # tuple[X, ...] | None
    return next(
        (option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None
    )


def _one_message(error: ErrorDetails, model: type[BaseModel]) -> str:
    """Return one error of pydantic as `key = value: what is wrong and what is allowed`."""
    path, owner, tag, peers = _locate(error["loc"], model)
    kind, value = error["type"], error["input"]
    if kind == "extra_forbidden":
        names = list(owner.model_fields) if owner else []
        section = f" of '{tag}'" if tag else ""
        meant = setting_for(path)
        name = path.split(".")[-1]
        near = nearest(name, names) if meant is None else f" (did you mean '{meant}'?)"
        having = [peer for peer, settings in peers.items() if name in settings.model_fields]
        more = f" and {len(having) - _MAX_PEERS} more" if len(having) > _MAX_PEERS else ""
        elsewhere = f"; a setting of {', '.join(having[:_MAX_PEERS])}{more}" if having else ""
        return f"{path}: no such setting{section}{near}; known: {', '.join(names)}{elsewhere}"
    if kind == "union_tag_invalid":
        key = str(error["ctx"]["discriminator"])
        given = value.get(key) if isinstance(value, dict) else value
        allowed = str(error["ctx"]["expected_tags"]).split(", ")
        return f"{path}.{key} = {given!r}: {unknown_choice(given, allowed)}"
    if kind == "literal_error":
        field = owner.model_fields.get(path.split(".")[-1]) if owner else None
        allowed = [str(name) for name in _literal_values(field.annotation)] if field else []
        allowed = allowed or [str(error["ctx"]["expected"])]
        return f"{path} = {value!r}: {unknown_choice(value, allowed)}"
    message = error["msg"].removeprefix("Value error, ")
    if not path:
        return message
    if kind == "missing":
        return f"{path}: no value is given; add --set {path}=VALUE, or the key in a file"
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        field = owner.model_fields.get(path.split(".")[-1]) if owner else None
        inner = None if field is None or choice_of(field) is not None else _nested_section(field)
        known = "" if inner is None else f": {', '.join(inner.model_fields)}"
        return f"{path} = {_short_repr(value)}: a section is expected here, with keys below it{known}"
    return f"{path} = {_short_repr(value)}: {message[0].lower()}{message[1:]}"


def _short_repr(value: Any) -> str:
    """Return the value as Python code of at most 80 characters, without the credentials of an address."""
    text = redact_credentials(repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


class _Location(NamedTuple):
    """Location of an error.

    Attributes:
        path: the dotted key.
        owner: the settings class that holds it.
        tag: the tag that chose this class.
        peers: the classes that the other tags choose, with this one.
    """

    path: str
    owner: type[BaseModel] | None
    tag: str | None
    peers: Mapping[str, type[BaseModel]]


def _locate(loc: tuple[int | str, ...], model: type[BaseModel]) -> _Location:
    """Follow pydantic's location down the settings classes.

    A tagged section adds its tag to a location (`bounds`, `band`, `delta`), which is not a key in the settings.
    """
    path, tag = "", None
    owner: type[BaseModel] | None = model
    choice: Choice | None = None
    peers: Mapping[str, type[BaseModel]] = {}
    for index, part in enumerate(loc):
        if choice is not None:
            peers = choice.classes()
            owner, choice, tag = peers.get(str(part)), None, str(part)
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
        choice = choice_of(field)
        inner = None if choice else _nested_section(field)
        if inner is not None and index + 1 < len(loc):
            owner, tag, peers = inner, None, {}
    return _Location(path, owner, tag, peers)


def _literal_values(annotation: Any) -> tuple[Any, ...]:
    """Return the values of a Literal, or of all Literals in a union."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(value for option in get_args(annotation) for value in _literal_values(option))
