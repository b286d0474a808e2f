"""Configuration files: lookup of the files that the package ships, and the line of a setting in a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bandpo_cli.config.yaml_loader import MERGE_TAG, read_yaml
from bandpo_cli.errors import ConfigError, nearest
from bandpo_cli.paths import path_exists, read_text

SHIPPED = Path(__file__).parents[1] / "configs"
"""The folder `configs` of the repository, which is part of the installed package too."""

_SUFFIX = ".yaml"


class FileLayer(dict[str, Any]):
    """The settings of a file. An error in one of them names the file and the line.

    Attributes:
        where: the option that named the file, with its path.
        path: the file.
    """

    def __init__(self, settings: Mapping[str, Any], where: str, path: Path) -> None:
        super().__init__(settings)
        self.where = where
        self.path = path

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
    paths = sorted(SHIPPED.rglob(f"*{_SUFFIX}"))
    return {path.relative_to(SHIPPED).with_suffix("").as_posix(): path for path in paths}


def describe_config(path: Path) -> str:
    """Return the first sentence of the comment at the head of a configuration file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in lines[: _comment_length(lines)]]
    return " ".join(comment).split(". ")[0].rstrip(".")


def _comment_length(lines: Sequence[str]) -> int:
    return next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))


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
    name = path.as_posix().removeprefix("configs/").removesuffix(_SUFFIX)
    if name not in known:
        raise ConfigError(
            f"{where} {path}: no such file, and no configuration of that name{nearest(name, known)}; "
            "`bandpo configs` lists them"
        )
    return known[name]


def read_config(path: Path, where: str = "--config") -> FileLayer:
    """Return the settings of a file, or of a configuration file of the package that `path` names.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not hold a mapping.
    """
    file = find_config(path, where)
    return FileLayer(read_mapping(file, f"{where} {path}"), f"{where} {path}", file)


def read_mapping(file: Path, where: str) -> dict[str, Any]:
    """Return the settings by section in a YAML file; raise ConfigError, which begins with `where`, for another file."""
    content = read_yaml(file, where)
    if content is None or isinstance(content, dict):
        return content or {}
    name = type(content).__name__
    kind = {"list": "a list", "str": "a bare text"}.get(name, f"a bare {name}")
    raise ConfigError(f"{where}: expected `section:` with `key: value` lines, found {kind}")
