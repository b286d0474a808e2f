"""Layers of settings: YAML files, then flags, then `--set a.b=c`. Later layers win, key by key.

Where a later layer changes the kind of a tagged choice (say `bounds.method`), the fields of the earlier kind are
dropped: they mean nothing to the new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from bandpo_cli.config.messages import explain, tags_of
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.task_defaults import task_defaults
from bandpo_cli.config.yaml_text import parse_yaml, read_yaml
from bandpo_cli.errors import ConfigError

Layer = Mapping[str, Any]


def read_value(text: str, where: str) -> Any:
    """Read one value as YAML does. Raises ConfigError, naming `where`."""
    return parse_yaml(text, where)


def read_layer(path: Path, where: str = "--config") -> Layer:
    """Read one YAML file; `where` says what named it.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or holds no mapping.
    """
    content = read_yaml(path, f"{where} {path}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{where} {path}: expected `section:` with `key: value` lines, found {_kind(content)}"
        )
    return content


def _kind(value: Any) -> str:
    return {"list": "a list", "str": "a bare text"}.get(
        type(value).__name__, f"a bare {type(value).__name__}"
    )


def read_assignments(assignments: Iterable[str]) -> Layer:
    """Turn `["optim.lr=1e-4", ...]` of `--set` into one layer; values are read as YAML.

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
        section = layer
        for key in keys[:-1]:
            section = section.setdefault(key, {})
            if not isinstance(section, dict):
                raise ConfigError(f"--set {assignment!r}: '{key}' was given a plain value by another --set")
        section[keys[-1]] = parse_yaml(text, f"--set {assignment!r}")
    return layer


def flag_layer(flags: Mapping[tuple[str, ...], Any]) -> Layer:
    """Turn the flags that were given, by the path of their setting, into a layer; None is a flag that was not."""
    layer: dict[str, Any] = {}
    for path, value in flags.items():
        if value is None:
            continue
        section = layer
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = value
    return layer


def merge(base: Layer, over: Layer, model: type[BaseModel]) -> dict[str, Any]:
    """Return `base` with `over` on top, both shaped like `model`; see the module for tagged choices."""
    merged = dict(base)
    for key, value in over.items():
        field = model.model_fields.get(key)
        earlier = merged.get(key)
        if field is None or not isinstance(value, dict):
            merged[key] = value
        elif field.discriminator is not None:
            merged[key] = _merge_choice(earlier if isinstance(earlier, dict) else {}, value, field)
        else:
            inner = _section_of(field)
            mergeable = inner is not None and isinstance(earlier, dict)
            merged[key] = merge(earlier, value, inner) if mergeable else value  # type: ignore[arg-type]
    return merged


def _merge_choice(earlier: Layer, value: Layer, field: FieldInfo) -> dict[str, Any]:
    """Merge two layers of a tagged choice; a changed tag drops what came before."""
    tag = str(field.discriminator)
    default = getattr(field.get_default(call_default_factory=True), tag, None)
    earlier_kind = earlier.get(tag, default)
    kind = value.get(tag, earlier_kind)
    if kind != earlier_kind:
        return dict(value)
    kinds = {name: cls for cls in _section_classes(field) for name in tags_of(cls, tag)}
    if not isinstance(kind, str) or kind not in kinds:
        return {**earlier, **value}
    return {tag: kind, **merge(earlier, value, kinds[kind])}


def _section_classes(field: FieldInfo) -> list[type[BaseModel]]:
    options = get_args(field.annotation) or (field.annotation,)
    return [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    classes = _section_classes(field)
    return classes[0] if len(classes) == 1 else None


def resolve(layers: Iterable[Layer]) -> RunConfig:
    """Merge the layers, earliest first, over the defaults of the task that they name, and check the result.

    Raises:
        ConfigError: one line that names the key, the value, what is allowed and the nearest valid name.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge(merged, layer, RunConfig)
    merged = merge(task_defaults(merged.get("task")), merged, RunConfig)
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig)) from None


def to_yaml(config: RunConfig) -> str:
    """Write the resolved configuration; `read_layer` and `resolve` give the same one back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
