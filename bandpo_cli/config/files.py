"""Config files: a strict YAML loader, the files that the package ships, and the line of a setting in a file.

The loader returns plain values of limited size and depth; an error is one line with its position.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from bandpo_cli.errors import ConfigError, nearest
from bandpo_cli.paths import path_exists, read_text

MAX_VALUES, MAX_DEPTH, MAX_DIGITS = 100_000, 50, 100
"""Limits on the values of a file (aliases expanded), on their nesting, and on the characters of a number."""

_SIMPLE = re.compile(r"[\w .:/,+=@()\[\]{}'#\n-]{0,4096}", re.ASCII)
"""Texts that libyaml reads in an eighth of the time of PyYAML's parser: short enough for the stack, because its
recursion has no limit, and without tabs, tags, aliases and other characters that the two parsers treat differently."""

MERGE_TAG = "tag:yaml.org,2002:merge"
"""The tag of the key `<<`, whose value is a mapping, or a list of mappings, to take entries from."""


def read_yaml(path: Path, where: str) -> Any:
    """Return the value in a file, as `parse_yaml` does. Raise ConfigError, which begins with `where`."""
    return parse_yaml(read_text(path, where), where)


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of the document `text`, None for an empty one.

    Raises:
        ConfigError: the text is not YAML, has a key twice, has a language-specific tag, or is too large or too deep.
    """
    try:
        if _SIMPLE.fullmatch(text):
            with suppress(yaml.YAMLError):  # the other loader accepts a few more texts, and words the error
                return yaml.load(text, Loader=_FastLoader)
        return yaml.load(text, Loader=_StrictLoader)
    except Exception as error:  # noqa: BLE001 - PyYAML raises KeyError, IndexError and others for malformed values
        name = "nested too deep" if isinstance(error, RecursionError) else type(error).__name__
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or name
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: not readable as YAML: {problem}") from None


class _Strict(yaml.constructor.SafeConstructor):
    """Limits for PyYAML's safe loaders; a duplicate key is an error, where PyYAML silently takes the last one."""

    def get_single_node(self) -> yaml.Node | None:
        self._flattened: set[int] = set()
        node: yaml.Node | None = super().get_single_node()  # type: ignore[misc]
        if node is not None:
            _expanded_size(node, {})
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put the entries of merge keys (`<<: *defaults`) before those of the mapping itself, which win.

        Duplicate keys are searched for in the mapping as it is written, therefore before the first merge.
        """
        if id(node) in self._flattened:
            return
        self._flattened.add(id(node))
        seen = set()
        for key_node, _ in node.value:
            key = "<<" if key_node.tag == MERGE_TAG else self.construct_object(key_node, deep=True)
            if key is not None and not isinstance(key, (str, int, float)):
                raise _yaml_error("a key must be a plain name", key_node)
            if key in seen:
                raise _yaml_error(f"'{key}' is given twice", key_node)
            seen.add(key)
        super().flatten_mapping(node)

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """Construct a number. YAML has base-60 numbers, and long ones take hours to convert."""
        if not isinstance(node.value, str) or len(node.value) > MAX_DIGITS:
            raise _yaml_error(f"a number of more than {MAX_DIGITS} digits", node)
        return self.construct_yaml_int(node) if node.tag.endswith("int") else self.construct_yaml_float(node)


for _tag in ("int", "float"):
    _Strict.add_constructor(f"tag:yaml.org,2002:{_tag}", _Strict.construct_number)  # type: ignore[type-var]


class _StrictLoader(_Strict, yaml.SafeLoader):
    """The loader of all texts, in Python."""

    _composed = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._composed += 1
        if self._composed > MAX_VALUES:  # checked during parsing, which takes a minute per megabyte
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_VALUES:,} values", mark)
        return super().compose_node(parent, index)


_CLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _FastLoader(_Strict, _CLoader):  # type: ignore[misc]
    """The loader of texts that match `_SIMPLE`: libyaml, where PyYAML is built with it."""


def _yaml_error(text: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    """Return an error that `parse_yaml` reports with the line of `node`."""
    return yaml.constructor.ConstructorError(None, None, text, node.start_mark)


def _expanded_size(node: yaml.Node, sizes: dict[int, int], depth: int = 0) -> int:
    """Return the number of values of a node with all aliases expanded; `sizes` has those of the nodes seen before.

    More than `MAX_VALUES`, and an alias inside itself, are an error.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if depth > MAX_DEPTH:  # also an alias inside itself
        raise _yaml_error(f"nested more than {MAX_DEPTH} deep", node)
    if id(node) not in sizes:
        children = (child for item in node.value for child in (item if isinstance(item, tuple) else (item,)))
        sizes[id(node)] = 1 + sum(_expanded_size(child, sizes, depth + 1) for child in children)
        if sizes[id(node)] > MAX_VALUES:
            raise _yaml_error(f"more than {MAX_VALUES:,} values", node)
    return sizes[id(node)]


SHIPPED = Path(__file__).parents[1] / "configs"
"""The folder `configs` of the repository, which is part of the installed package too."""


class FileLayer(dict[str, Any]):
    """The settings of a file. An error in one of them names the file and the line.

    Attributes:
        where: the option that named the file, with its path.
        path: the file.
    """

    def __init__(self, settings: Mapping[str, Any], where: str, path: Path) -> None:
        super().__init__(settings)
        self.where, self.path = where, path

    def locate(self, keys: Sequence[str]) -> str | None:
        """Return `--config a.yaml, line 3` for the setting with these keys; None where the file does not have it."""
        node = yaml.compose(read_text(self.path, self.where), Loader=yaml.SafeLoader)
        line = None
        for key in keys:
            entry = next(_entries(node, key), None)
            if entry is None:
                return None
            line, node = entry
        return None if line is None else f"{self.where}, line {line}"


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


def shipped_configs() -> dict[str, Path]:
    """Return the configuration files of the package by name: `gsm8k`, `methods/clip`, `paper/base`."""
    paths = sorted(SHIPPED.rglob("*.yaml"))
    return {path.relative_to(SHIPPED).with_suffix("").as_posix(): path for path in paths}


def describe_config(path: Path) -> str:
    """Return the first sentence of the comment at the head of a configuration file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.removeprefix("#").strip() for line in comment).split(". ")[0].rstrip(".")


def find_config(path: Path, where: str) -> Path:
    """Return the file that `path` names: a file, or a configuration file of the package by its name.

    `paper/base`, `paper/base.yaml` and `configs/paper/base.yaml` name the same file of the package.

    Args:
        where: the option that named the file; the error message begins with it.

    Raises:
        ConfigError: there is neither.
    """
    if path_exists(path):
        return path
    known = shipped_configs()
    name = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    if name not in known:
        problem = f"no such file, and no configuration of that name{nearest(name, known)}"
        raise ConfigError(f"{where} {path}: {problem}; `bandpo configs` lists them")
    return known[name]


def read_config(path: Path, where: str = "--config") -> FileLayer:
    """Return the settings of a file, or of a configuration file of the package that `path` names.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not hold a mapping.
    """
    file, where = find_config(path, where), f"{where} {path}"
    return FileLayer(read_mapping(file, where), where, file)


def read_mapping(file: Path, where: str) -> dict[str, Any]:
    """Return the settings by section in a YAML file; raise ConfigError, which begins with `where`, for another file."""
    content = read_yaml(file, where)
    if content is None or isinstance(content, dict):
        return content or {}
    kind = {"list": "a list", "str": "a text"}.get(type(content).__name__, f"the value {content}")
    raise ConfigError(f"{where}: expected `section:` with `key: value` lines, found {kind}")
