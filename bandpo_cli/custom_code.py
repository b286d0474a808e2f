"""Custom code: `module:name` in place of a name in the settings, such as a policy loss, a grader or a divergence.

A module is searched in the current folder, the folders of the config files, and on the Python path. A run folder has
copies of the files, so that a resume, an evaluation and further runs find them. A resume searches the run folder first.
"""

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from bandpo_cli.errors import ConfigError, nearest, raised_by_signal, user_code_location

FOLDERS_VARIABLE = "BANDPO_CODE_FOLDERS"
"""Environment variable with the folders that are searched before the Python path, separated as in PATH; an empty one is
the current folder. Child processes inherit it: graders, ranks, and the runs of a sweep."""

_PATH_LOCK = threading.Lock()  # held while `load_function` has changed `sys.path`
_loaded: set[str] = set()  # modules that `load_function` has imported


def is_function_path(text: str) -> bool:
    """Return whether `text` has the form `package.module:function`."""
    module, colon, function = text.partition(":")
    parts = module.split(".")
    return bool(colon) and function.isidentifier() and all(map(str.isidentifier, parts)) and parts[-1] != "py"


def code_folders() -> list[str]:
    """Return the folders that are searched for modules before the Python path."""
    folders = os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep)
    return [folder or str(Path.cwd()) for folder in folders]


def add_code_folder(folder: Path) -> None:
    """Search `folder` too, after the folders that are searched already."""
    if (added := str(folder.absolute())) not in code_folders():
        os.environ[FOLDERS_VARIABLE] = os.pathsep.join([os.environ.get(FOLDERS_VARIABLE, ""), added])


def code_first_in(folder: Path) -> dict[str, str]:
    """Return the environment variable with which a process searches `folder` before all other folders."""
    others = os.environ.get(FOLDERS_VARIABLE, "")
    return {FOLDERS_VARIABLE: os.pathsep.join([str(folder.absolute()), others])}


@contextmanager
def code_from(folder: Path) -> Iterator[None]:
    """Search `folder` before all other folders within the block."""
    before = os.environ.get(FOLDERS_VARIABLE, "")
    os.environ.update(code_first_in(folder))
    try:
        yield
    finally:
        os.environ[FOLDERS_VARIABLE] = before


def load_function(name: str) -> Callable[..., Any]:
    """Import and return a user's `module:function`, which may be a class.

    Raises:
        ValueError: the import fails, or the module has no such function; the message is one line.
    """
    module_name, _, function_name = name.partition(":")
    folders, here = code_folders(), str(Path.cwd())
    with _PATH_LOCK:
        sys.path[:0] = folders
        try:
            # Another run in this process may have imported a file of this name from another folder.
            file, known = module_file(folders, module_name), sys.modules.get(module_name)
            if module_name in _loaded and known is not None and file not in (None, known.__file__):
                del sys.modules[module_name]
            module = importlib.import_module(module_name)
            _loaded.add(module_name)
        except BaseException as error:
            if raised_by_signal(error):
                raise
            places = ", ".join({here: f"the current folder {here}"}.get(folder, folder) for folder in folders)
            raise ValueError(
                f"importing '{module_name}' failed: {type(error).__name__}: {error}"
                f"{user_code_location(error)} (searched {places} and the Python path)"
            ) from error
        finally:
            for folder in folders:
                if folder in sys.path:
                    sys.path.remove(folder)
    function = getattr(module, function_name, None)
    if not callable(function):
        near = nearest(function_name, (name for name, value in vars(module).items() if callable(value)))
        raise ValueError(f"module '{module_name}' has no function '{function_name}'{near}")
    return function  # type: ignore[no-any-return]


def load_setting(key: str, name: str) -> Callable[..., Any]:
    """Return `load_function(name)`; an error is a ConfigError that begins with the setting."""
    if not is_function_path(name):
        raise ConfigError(f"{key} = '{name}': write it as module:name")
    try:
        return load_function(name)
    except ValueError as error:
        raise ConfigError(f"{key} = '{name}': {error}") from error


def module_file(folders: Sequence[str], module_name: str) -> str | None:
    """Return the file of a module in the first of `folders` that has it; None for a package or a module elsewhere."""
    spec = None if "." in module_name else PathFinder.find_spec(module_name, folders)
    return None if spec is None or spec.submodule_search_locations is not None else spec.origin
