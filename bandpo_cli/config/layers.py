"""Layers of settings: config files in YAML, then flags, then `--set a.b=c`; they are merged and validated.

Later layers win, key by key. Where a later layer changes the tag of a section (say `bounds.method`), the fields of the
earlier layers are dropped, because they belong to another class; if they named no tag, only those that the default
class has of its own. A validation error becomes one line that names the key, the value, what is allowed and the nearest
valid name.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from bandpo_cli.config import shipped_configs
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.task import TaskSettings
from bandpo_cli.custom_code import add_code_folder
from bandpo_cli.errors import ConfigError, nearest
from bandpo_cli.methods.settings import MethodSettings
from bandpo_cli.paths import nearest_file, path_exists, read_text
from bandpo_cli.registries import BUNDLED_MODELS, TASKS, task_kind
from bandpo_cli.settings_validation import Section, TaggedSection, describe_error, meaning_of, trainer_keys

_TAGGED: Mapping[str, type[TaggedSection]] = {"task": TaskSettings, "bounds": MethodSettings}

_TEXTS = ("task.template", "task.system")
"""Settings that are sentences, with characters that have a meaning in YAML: `{question} Answer: [a number]`."""

_FORM = "write a setting as section.key=value, for example optim.lr=1e-4"

Layer = Mapping[str, Any]
"""Settings by section, as in a YAML file: {"optim": {"lr": 1e-4}}."""

MERGE_TAG = "tag:yaml.org,2002:merge"
"""The tag of the key `<<`, whose value is a mapping, or a list of mappings, to take entries from."""


SectionT = TypeVar("SectionT", bound=Section)

Settings = Layer | RunConfig | Iterable[Layer | RunConfig]
"""Settings in Python: a dictionary, whose keys may be dotted ({"optim.lr": 1e-4}); a `RunConfig`, which has a value for
every setting; or a list of these, in which later ones win."""


def as_layers(settings: Settings) -> list[Layer]:
    """Return settings as nested layers. Raises ConfigError if they are anything else."""
    layers: list[Layer] = []
    is_one = isinstance(settings, Mapping | RunConfig | str) or not isinstance(settings, Iterable)
    for given in [settings] if is_one else settings:
        layer: Any = given.model_dump(mode="json") if isinstance(given, RunConfig) else given
        if not isinstance(layer, Mapping):
            known = ", ".join(RunConfig.model_fields)
            raise ConfigError(f"{layer!r:.80}: expected settings as a dictionary, with keys among {known}")
        if not isinstance(layer, FileLayer):
            nested: dict[str, Any] = {}
            for key, value in layer.items():
                plain = value.model_dump(mode="json") if isinstance(value, Section) else value
                nested = _merge_mappings(nested, nest({str(key): plain}))
            layer = nested
        layers.append(layer)
    return layers


def resolve(settings: Settings) -> RunConfig:
    """Merge layers, earliest first, over the defaults of the task and the model that they name, and validate them.

    Raises:
        ConfigError: one line that names the key, the value, what is allowed and the nearest valid name.
    """
    layers = as_layers(settings)
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge(merged, layer)
    model = merged.get("model")
    defaults = _default_layer(merged.get("task"), model.get("path") if isinstance(model, dict) else None)
    try:
        return RunConfig.model_validate(_merge_mappings(defaults, merged))
    except ValidationError as error:
        raise ConfigError(validation_message(error, layers)) from None


def _default_layer(task: Any, model: Any) -> dict[str, Any]:
    """Return the defaults for the `task` section and the path of the model as the user wrote them, whatever they are.

    Without a path (None), the model is the one that was made for the task, if there is one; without a name, the task is
    the one that a bundled model was made for.
    """
    task = task if isinstance(task, dict) else {}
    if TaskSettings.tag not in task and isinstance(model, str) and model in BUNDLED_MODELS:
        task = {TaskSettings.tag: BUNDLED_MODELS[model]}
    name = TaskSettings.kind_of(task)
    entry = TASKS.get(task_kind(name)) if isinstance(name, str) else None
    if entry is None:
        return {}
    is_bundled = entry.bundled_model is not None and model in (None, entry.bundled_model)
    defaults = dict(entry.bundled_defaults if is_bundled else entry.defaults)
    if is_bundled:
        defaults["model"] = {"path": entry.bundled_model}
    if is_bundled and entry.name != TaskSettings.default:  # else messages say that the task is the default
        defaults["task"] = {TaskSettings.tag: entry.name}
    return defaults


def merge(base: Layer, over: Layer) -> dict[str, Any]:
    """Return `base` with `over` on top; the module docstring describes tagged sections."""
    kept = dict(base)
    for name, cls in _TAGGED.items():
        earlier, later = base.get(name), over.get(name)
        if not isinstance(earlier, dict) or not isinstance(later, dict) or cls.tag not in later:
            continue
        if cls.kind_of(earlier) != cls.kind_of(later):
            # What the default class does not have of its own was never meant for it: `template` without a task's name.
            own = cls.classes()[cls.default].model_fields.keys() - cls.model_fields.keys()
            is_default = cls.tag not in earlier
            kept[name] = {key: earlier[key] for key in earlier if is_default and key not in own}
    return _merge_mappings(kept, over)


def _merge_mappings(base: Layer, over: Layer) -> dict[str, Any]:
    """Return `base` with `over` on top, key by key at every level; a key 0, 1, ... is an element of a list."""
    merged = {**base, **over}
    for key in base.keys() & over.keys():
        earlier, later = base[key], over[key]
        items = {str(index): item for index, item in enumerate(earlier)} if isinstance(earlier, list) else {}
        is_list = isinstance(earlier, list) and isinstance(later, dict) and later.keys() <= items.keys()
        if is_list:
            earlier = items
        if isinstance(earlier, dict) and isinstance(later, dict):
            merged[key] = _merge_mappings(earlier, later)
        if is_list:
            merged[key] = [*merged[key].values()]
    return merged


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


def read_assignments(assignments: Iterable[str]) -> Layer:
    """Return `["optim.lr=1e-4", ...]` of `--set` as one layer; raise ConfigError for other forms and contradictions."""
    layer: dict[str, Any] = {}
    for assignment in assignments:
        where = f"--set {assignment!r}"
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"{where}: {_FORM}")
        _set_nested(layer, path.strip(), parse_value(path.strip(), text, where), where)
    return layer


def parse_value(key: str, text: str, where: str) -> Any:
    """Return the value of a setting on the command line: YAML, or the text itself for a setting that is a text.

    A text may be quoted as in YAML, and `null` is no text.
    """
    if key not in _TEXTS:
        return parse_yaml(text, where)
    with suppress(ConfigError):
        if text == "null" or text[:1] + text[-1:] in ("''", '""'):
            return parse_yaml(text, where)
    return text


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted settings as sections: {"optim.lr": 1e-4} as {"optim": {"lr": 1e-4}}."""
    layer: dict[str, Any] = {}
    for key, value in settings.items():
        _set_nested(layer, key, value, f"'{key}'")
    return layer


CHOSEN_AT_START = (
    "model.dtype",
    "model.gradient_checkpointing",
    "optim.micro_batch_tokens",
    "sampling.vllm.sleep",
    "sampling.vllm.memory_fraction",
)
"""Settings that a run chooses at its start where they are `auto` or null; its config.yaml has the values."""


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return the settings with other values, given by dotted setting. Raises ConfigError if a value is not valid."""
    with suppress(AttributeError):  # an unknown setting
        if all(attrgetter(key)(config) == value for key, value in values.items()):
            return config
    return resolve([config, values])


def copy_values(config: SectionT, other: SectionT, keys: Iterable[str]) -> SectionT:
    """Return the settings with the values that `other` has for these dotted settings, which are valid already."""
    changed: dict[str, Any] = {}
    for name, _, rest in (key.partition(".") for key in keys):
        own, value = changed.get(name, getattr(config, name)), getattr(other, name)
        changed[name] = copy_values(own, value, [rest]) if rest else value
    return config.model_copy(update=changed)


def _set_nested(section: dict[str, Any], path: str, value: Any, where: str) -> None:
    """Set a value by its dotted name; raise ConfigError, which begins with `where`, if a section has a plain value."""
    *sections, last = path.split(".")
    if not all((*sections, last)):
        raise ConfigError(f"{where}: {_FORM}")
    for key in sections:
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f"{where}: '{key}' has a plain value already; give it a value or keys below it, not both"
            )
    section[last] = value


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
    has_items = isinstance(settings, list) and any(isinstance(item, dict | list) for item in settings)
    if expand_lists and has_items:
        settings = dict(enumerate(settings))
    if not isinstance(settings, Mapping) or (keep_empty and path and not settings):
        return {path: settings}
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= flatten(value, expand_lists, keep_empty, f"{path}.{key}" if path else str(key))
    return flat


def setting_changes(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the values before and after of the settings that differ, by dotted name; None for a missing setting.

    If the class of a tagged section differs (another method has other settings), only the tag is compared.
    """
    old, new = (config.model_dump(mode="json") for config in (before, after))
    for name, cls in _TAGGED.items():
        if cls.kind_of(old[name]) != cls.kind_of(new[name]):
            old[name], new[name] = ({cls.tag: settings[name][cls.tag]} for settings in (old, new))
    old, new = flatten(old), flatten(new)
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def changes_text(changes: Mapping[str, tuple[Any, Any]], separator: str = ", ") -> str:
    """Return changes of the settings of a run, values up to 80 characters: `optim.lr = 0.001 (the run has 5e-05)`."""
    texts = [(key, setting_text(old), setting_text(new)) for key, (old, new) in changes.items()]
    return separator.join(f"{key} = {new:.80} (the run has {old:.80})" for key, old, new in texts)


def setting_text(value: Any) -> str:
    """Return a value as text for `--set`: JSON, which is YAML too, or a text itself."""
    return value if isinstance(value, str) else json.dumps(value)


def settings_named(option: str) -> list[str]:
    """Return the settings that an unknown option may mean: that of `meaning_of`, else those with the option's name."""
    if setting := meaning_of(option)[0]:
        return [setting]
    end = f".{option.lstrip('-').replace('-', '_')}"
    return [key for key in flatten(RunConfig().model_dump()) if key.endswith(end)]


def validation_message(
    error: ValidationError, layers: Sequence[Layer] = (), within: Sequence[str] = ()
) -> str:
    """Return `describe_error`, after the file and the line if the last of `layers` that has the key is a file."""
    message, path = describe_error(error, within)
    keys = [part for part in path if isinstance(part, str)]
    dotted = ".".join([*keys, ""])
    for layer in reversed(layers) if keys else ():
        if any(f"{key}.".startswith(dotted) for key in flatten(layer, keep_empty=True)):
            if not isinstance(layer, FileLayer) or not (where := layer.locate(keys)):
                return message
            is_trl = len(layer.keys() & trainer_keys("trl").keys()) > 1
            trainer = "verl" if "actor_rollout_ref" in layer else "trl" if is_trl else ""
            advice = f"; bandpo configs --from {trainer} {layer.path} > run.yaml converts the file"
            return f"{where}: {message}{advice if trainer else ''}"
    return message


def read_yaml(path: Path, where: str) -> Any:
    """Return the value in a file, as `parse_yaml` does; an error begins with `where`."""
    return parse_yaml(read_text(path, where), where)


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a document; raise ConfigError if it is not YAML, or has a key twice or a Python tag."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except Exception as error:  # noqa: BLE001 - PyYAML raises KeyError, IndexError and others for malformed values
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or type(error).__name__
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: not readable as YAML: {problem}") from None


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's safe loader: libyaml, which takes an eighth of the time, where PyYAML is built with it."""


class _StrictLoader(_Loader):  # type: ignore[misc]
    """The safe loader, for which a duplicate key is an error: PyYAML silently takes the last one."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put the entries of merge keys (`<<: *defaults`) before those of the mapping itself, which win.

        Duplicate keys are searched for in the mapping as it is written, therefore before the first merge.
        """
        if "has_unique_keys" in vars(node):
            return
        keys = []
        for key_node, _ in node.value:
            key = "<<" if key_node.tag == MERGE_TAG else self.construct_object(key_node, deep=True)
            if key in keys:
                problem = f"'{key}' is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            keys.append(key)
        vars(node)["has_unique_keys"] = True
        super().flatten_mapping(node)


class FileLayer(dict[str, Any]):
    """The settings of the file `path`, which the option `where` named; errors in them name the file and the line."""

    def __init__(self, settings: Mapping[str, Any], where: str, path: Path) -> None:
        super().__init__(settings)
        self.where, self.path = where, path

    def locate(self, keys: Sequence[str]) -> str | None:
        """Return `--config a.yaml, line 3` for the setting with these keys; None where the file does not have it."""
        line, node = 0, yaml.compose(read_text(self.path, self.where), Loader=_Loader)
        for key in keys:
            line, node = next(_entries(node, key), (0, None))
        return f"{self.where}, line {line}" if line else None


def _entries(node: yaml.Node | None, key: str) -> Iterator[tuple[int, yaml.Node]]:
    """Yield line and value of the entry `key` of a mapping, then those of the mappings that it merges (`<<`)."""
    if isinstance(node, yaml.MappingNode):
        for key_node, value in node.value:
            if key_node.value == key:
                yield key_node.start_mark.line + 1, value
        for key_node, value in node.value:
            if key_node.tag == MERGE_TAG:
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    yield from _entries(merged, key)


def read_config(path: Path, where: str = "--config") -> FileLayer:
    """Return the settings of a file, or of a configuration file of the package by its name; see `read_layer`.

    `paper/base`, `paper/base.yaml` and `configs/paper/base.yaml` name the same file of the package. Modules beside the
    file can be named in the settings.
    """
    if path_exists(path):
        add_code_folder(path.parent)
        return FileLayer(read_layer(path, where), f"{where} {path}", path)
    known, name = shipped_configs(), path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    if name not in known:
        near = nearest_file(path, (".yaml", ".yml")) or nearest(name, known)
        problem = f"no such file, and no configuration of that name{near}"
        raise ConfigError(f"{where} {path}: {problem}; `bandpo configs` lists them")
    return FileLayer(read_layer(known[name], where), f"{where} {path}", known[name])


def read_layer(path: Path, where: str = "--config") -> Layer:
    """Return the settings by section in a YAML file; raise ConfigError, which begins with `where`, for others."""
    content = read_yaml(path, where := f"{where} {path}")
    if content is None or isinstance(content, dict):
        return content or {}
    kind = {"list": "a list", "str": "a text"}.get(type(content).__name__, f"the value {content}")
    raise ConfigError(f"{where}: expected `section:` with `key: value` lines, found {kind}")
