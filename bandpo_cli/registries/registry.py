"""Registries: named entries, checks of names, and the import of what entries name as "module:attribute"."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bandpo_cli.errors import nearest


@dataclass(frozen=True)
class Entry:
    """An entry of a registry; each registry has a subclass with further fields.

    Attributes:
        name: the name in settings and on the command line.
        summary: one clause about it, for help texts and docs.
    """

    name: str
    summary: str


E = TypeVar("E", bound=Entry)


class Registry(dict[str, E]):
    """Entries by name, in the order of registration."""

    def __init__(
        self,
        kind: str,
        entries: Iterable[E] = (),
        custom: str | None = None,
        is_custom: Callable[[str], bool] | None = None,
    ) -> None:
        """Register `entries`.

        Args:
            kind: what an entry is, for messages: "divergence".
            entries: the entries.
            custom: where `module:function` is accepted beside the names, how a message offers it.
            is_custom: the test for what is accepted beside the names; None for `is_function_path`.
        """
        self.kind = kind
        self.custom = custom
        self._is_custom = is_custom or is_function_path
        for entry in entries:
            self.register(entry)

    def register(self, entry: E) -> E:
        """Add an entry and return it. Raise ValueError if its name is taken."""
        if entry.name in self:
            raise ValueError(f"there is a {self.kind} '{entry.name}' already; choose another name")
        self[entry.name] = entry
        return entry

    def names_text(self, where: Callable[[E], bool] = lambda entry: True) -> str:
        """Return the names of the entries for which `where` is true, for a help text: "band, clip or none"."""
        names = [name for name, entry in self.items() if where(entry)]
        if self.custom:
            return f"{', '.join(names)}, or {self.custom}"
        return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))

    def suggestion(self, name: str) -> str:
        """Return the end of an error message about an unknown name: the nearest name, and all that are accepted."""
        custom = f", or {self.custom}" if self.custom else ""
        return f"{nearest(name, self)}; known: {', '.join(self)}{custom}"

    def check_name(self, name: str) -> str:
        """Return `name`. Raise ValueError unless it is registered, or a function path where those are accepted."""
        if name in self or (self.custom is not None and self._is_custom(name)):
            return name
        raise ValueError(f"no {self.kind} of that name{self.suggestion(name)}")


_PATH_LOCK = threading.Lock()
"""Held while `load_function` has changed `sys.path`."""


def is_function_path(text: str) -> bool:
    """Return whether `text` has the form `package.module:function`."""
    module, colon, function = text.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


@functools.cache  # the settings of all methods are looked up at each validation
def load_attribute(path: str) -> Any:
    """Import and return the attribute that an entry names as "module:attribute"."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_function(name: str) -> Callable[..., Any]:
    """Import and return a user's `module:function`; as with `python -m`, the current folder is searched first.

    Raises:
        ValueError: the import fails, or the module has no such function; the message is one line.
    """
    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    with _PATH_LOCK:
        sys.path.insert(0, here)
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise ValueError(
                f"importing '{module_name}' failed: {type(error).__name__}: {error} "
                f"(searched the current folder {here} and the Python path)"
            ) from error
        finally:
            if here in sys.path:
                sys.path.remove(here)
    function = getattr(module, function_name, None)
    if function is None:
        raise ValueError(
            f"module '{module_name}' has no '{function_name}'{nearest(function_name, dir(module))}"
        )
    if not callable(function):
        raise ValueError(f"'{function_name}' is not a function: its type is {type(function).__name__}")
    return function  # type: ignore[no-any-return]
