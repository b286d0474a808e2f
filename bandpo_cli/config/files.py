"""Config files: a strict YAML loader, the files that the package ships, and the line of a setting in a file.

An error is one line with its position.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from bandpo_cli.custom_code import add_code_folder
from bandpo_cli.errors import ConfigError, nearest
from bandpo_cli.paths import nearest_file, path_exists, read_text

MERGE_TAG = "tag:yaml.org,2002:merge"
"""The tag of the key `<<`, whose value is a mapping, or a list of mappings, to take entries from."""


def read_yaml(path: Path, where: str) -> Any:
    """Return the value in a file, as `parse_yaml` does; an error begins with `where`."""
    return parse_yaml(read_text(path, where), where)


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of the document `text`, None for an empty one.

    Raises:
        ConfigError: the text is not YAML, has a key twice, or has a language-specific tag.
    """
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

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._flattened: set[int] = set()

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


def _yaml_error(text: str, place: Any) -> yaml.MarkedYAMLError:
    """Return an error that `parse_yaml` reports with the line of `place`."""
    return yaml.constructor.ConstructorError(None, None, text, place.start_mark)


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


def shipped_configs() -> dict[str, Path]:
    """Return the configuration files of the package by name: `gsm8k`, `methods/clip`, `paper/base`."""
    paths = sorted(SHIPPED.rglob("*.yaml"))
    return {path.relative_to(SHIPPED).with_suffix("").as_posix(): path for path in paths}


def describe_config(path: Path) -> str:
    """Return the first sentence of the comment at the head of a configuration file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.removeprefix("#").strip() for line in comment).split(". ")[0].rstrip(".")


def read_config(path: Path, where: str = "--config") -> FileLayer:
    """Return the settings of a file, or of a configuration file of the package by its name.

    `paper/base`, `paper/base.yaml` and `configs/paper/base.yaml` name the same file of the package. Modules beside the
    file can be named in the settings.

    Args:
        where: the option that named the file; error messages begin with it.

    Raises:
        ConfigError: there is no such file, it cannot be read, is not YAML, or does not hold a mapping.
    """
    where = f"{where} {path}"
    if not path_exists(path):
        known, name = shipped_configs(), path.as_posix().removeprefix("configs/").removesuffix(".yaml")
        if name not in known:
            near = nearest_file(path, (".yaml", ".yml")) or nearest(name, known)
            problem = f"no such file, and no configuration of that name{near}"
            raise ConfigError(f"{where}: {problem}; `bandpo configs` lists them")
        path = known[name]
    else:
        add_code_folder(path.parent)
    return FileLayer(read_mapping(path, where), where, path)


def read_mapping(file: Path, where: str) -> dict[str, Any]:
    """Return the settings by section in a YAML file; raise ConfigError, which begins with `where`, for another file."""
    content = read_yaml(file, where)
    if content is None or isinstance(content, dict):
        return content or {}
    kind = {"list": "a list", "str": "a text"}.get(type(content).__name__, f"the value {content}")
    raise ConfigError(f"{where}: expected `section:` with `key: value` lines, found {kind}")
