"""What a run may be called: one plain folder in the runs folder."""

from __future__ import annotations

import re
from pathlib import Path

from bandpo_cli.errors import UserError
from bandpo_cli.paths import is_there
from bandpo_cli.tracking.files import sync_folder

RESERVED = ("mlartifacts", "mlflow.db", "mlruns")
"""What MLflow may keep beside the runs."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=,@-]{0,199}")
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def is_name(name: str) -> bool:
    """Tell whether `name` is one plain folder name, the same on every system that a runs folder may be copied to."""
    return _NAME.fullmatch(name) is not None and not _DEVICE.fullmatch(name) and not name.endswith(".")


def check_name(name: str, runs_dir: Path) -> str:
    """Return `name` if it is one plain folder name, else raise UserError with a name that would do.

    Refused: the empty name, what leads out of or deeper into the runs folder, blanks and characters that a
    shell or a file system takes for something else, and the names that MLflow uses there.
    """
    if is_name(name) and name not in RESERVED:
        return name
    if name in RESERVED:
        why = f"MLflow keeps its files under that name in {runs_dir}"
    elif "/" in name or "\\" in name or name in (".", ".."):
        why = f"a run is one folder directly in {runs_dir}; give another place with --runs-dir"
    elif _NAME.fullmatch(name):
        why = "Windows has no folder of that name, and runs are copied"
    else:
        why = "a name is letters, digits and . _ - + = , @, at most 200, the first a letter or digit"
    raise UserError(f"--name {name!r} cannot be used: {why}. Try: --name {fresh_name(plain(name), runs_dir)}")


def make_folder(runs_dir: Path, name: str) -> Path:
    """Make the folder `name` in `runs_dir`. Raises UserError for a name that is taken or not plain."""
    path = runs_dir / check_name(name, runs_dir)
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        path.mkdir()
    except FileExistsError:
        raise UserError(
            f"there is a run {name!r} in {runs_dir} already: start another by --name {fresh_name(name, runs_dir)}"
        ) from None
    except OSError as error:
        raise UserError(f"--runs-dir {runs_dir}: no folder can be made there: {error.strerror}") from None
    sync_folder(runs_dir)
    return path


def fresh_name(stem: str, runs_dir: Path) -> str:
    """Return `stem`, or `stem-2`, `stem-3`, ...: the first that no entry of `runs_dir` has."""
    name, count = stem, 1
    while is_there(runs_dir / name) or name in RESERVED:
        count += 1
        name = f"{stem}-{count}"
    return name


def plain(name: str) -> str:
    """Return the nearest usable name: the last path part, with other characters as dashes."""
    last = re.split(r"[/\\]", name.rstrip("/\\"))[-1]
    near = re.sub(r"[^A-Za-z0-9_.+=,@-]+", "-", last).lstrip(".+=,@-")[:190].rstrip(".-") or "run"
    return near if is_name(near) else f"run-{near}"
