"""Strict YAML loader: plain values of limited size and depth; an error is one line with its position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from bandpo_cli.errors import ConfigError
from bandpo_cli.paths import read_text

MAX_VALUES, MAX_DEPTH, MAX_DIGITS = 100_000, 50, 100
"""Limits on the values of a file (aliases expanded), on their nesting, and on the characters of a number."""

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
        return yaml.load(text, Loader=_StrictLoader)
    except Exception as error:  # noqa: BLE001 - PyYAML raises KeyError, IndexError and others for malformed values
        problem = getattr(error, "problem", None) or getattr(error, "reason", None)
        if not problem:
            problem = "nested too deep" if isinstance(error, RecursionError) else type(error).__name__
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: not readable as YAML: {problem}") from None


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader with limits; a duplicate key is an error, where PyYAML silently takes the last one."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._composed = 0
        self._flattened: set[int] = set()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._composed += 1
        if self._composed > MAX_VALUES:  # checked during parsing, which takes a minute per megabyte
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_VALUES:,} values", mark)
        return super().compose_node(parent, index)

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _check_expanded_size(MAX_VALUES, node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):  # `!!map 5`
            raise _yaml_error("expected `key: value` lines", node)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put the entries of merge keys (`<<: *defaults`) before those of the mapping itself, which win.

        Duplicate keys are searched for in the mapping as it is written, therefore before the first merge.
        """
        if id(node) not in self._flattened:
            self._flattened.add(id(node))
            self._check_keys(node)
            super().flatten_mapping(node)

    def _check_keys(self, node: yaml.MappingNode) -> None:
        seen = set()
        for key_node, _ in node.value:
            key = "<<" if key_node.tag == MERGE_TAG else self.construct_object(key_node, deep=True)
            if key is not None and not isinstance(key, (str, int, float)):
                raise _yaml_error("a key must be a plain name", key_node)
            if key in seen:
                raise _yaml_error(f"'{key}' is given twice", key_node)
            seen.add(key)

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """Construct a number. YAML has base-60 numbers, and long ones take hours to convert."""
        if not isinstance(node.value, str) or len(node.value) > MAX_DIGITS:
            raise _yaml_error(f"a number of more than {MAX_DIGITS} digits", node)
        construct = (
            yaml.SafeLoader.construct_yaml_int
            if node.tag.endswith("int")
            else yaml.SafeLoader.construct_yaml_float
        )
        return construct(self, node)


for _tag in ("int", "float"):
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _StrictLoader.construct_number)


def _yaml_error(text: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    """Return an error that `parse_yaml` reports with the line of `node`."""
    return yaml.constructor.ConstructorError(None, None, text, node.start_mark)


def _check_expanded_size(max_values: int, root: yaml.Node) -> None:
    """Raise an error for more than `max_values` values with all aliases expanded, and for an alias inside itself."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node, depth: int) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if depth > MAX_DEPTH:  # also an alias inside itself
            raise _yaml_error(f"nested more than {MAX_DEPTH} deep", node)
        if id(node) not in sizes:
            children = (
                child for each in node.value for child in (each if isinstance(each, tuple) else (each,))
            )
            sizes[id(node)] = 1 + sum(size(child, depth + 1) for child in children)
            if sizes[id(node)] > max_values:
                raise _yaml_error(f"more than {max_values:,} values", node)
        return sizes[id(node)]

    size(root, 0)
