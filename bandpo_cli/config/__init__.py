"""Settings of a run, and the configuration files of the package by name, which shell completion lists.

This module needs the standard library only.
"""

from itertools import takewhile
from pathlib import Path

SHIPPED = Path(__file__).parents[1] / "configs"
"""The folder `configs` of the repository, which is part of the installed package too."""


def shipped_configs() -> dict[str, Path]:
    """Return the configuration files of the package by name: `gsm8k`, `methods/clip`, `paper/base`."""
    paths = sorted(SHIPPED.rglob("*.yaml"))
    return {path.relative_to(SHIPPED).with_suffix("").as_posix(): path for path in paths}


def describe_config(path: Path) -> str:
    """Return the first sentence of the comment at the head of a configuration file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.removeprefix("#").strip() for line in comment).split(". ")[0].rstrip(".")
