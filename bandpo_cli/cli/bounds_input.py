"""What `bandpo bounds` reads: probabilities and radii from words, files, standard input. A mistake is one line."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bandpo_cli.errors import UserError, nearest
from bandpo_cli.paths import read_text

_MOST_TEXT = 2**28  # bytes, some ten million probabilities


def probabilities(words: Sequence[str], file: Path | None) -> list[float]:
    """Numbers in (0, 1] from the arguments (`-` stands for standard input) and then from `file`, in that order."""
    found: list[float] = []
    for word in words:
        found += (
            _from_text(sys.stdin.read(), "standard input") if word == "-" else [_probability(word, "PROB")]
        )
    if file is not None:
        found += _from_text(read_text(file, f"--file {file}", _MOST_TEXT), f"--file {file}")
    return found


def _from_text(text: str, source: str) -> list[float]:
    """Numbers apart by white space or commas; `#` begins a comment."""
    lines = [line.partition("#")[0].replace(",", " ").split() for line in text.splitlines()]
    found = [
        _probability(word, f"{source}, line {number}")
        for number, words in enumerate(lines, 1)
        for word in words
    ]
    if not found:
        raise UserError(
            f"{source}: no probability in it; give numbers in (0, 1] apart by spaces, commas or lines"
        )
    return found


def _probability(word: str, source: str) -> float:
    value = _number(word, source, "a probability in (0, 1]")
    if not 0.0 < value <= 1.0:
        raise UserError(f"{source}: '{word}' is not a probability; allowed: 0 < p ≤ 1")
    return value


def radii(words: Iterable[str]) -> list[float]:
    """Numbers > 0 from `--delta`, which may be repeated or hold several apart by commas."""
    found = [_number(word, "--delta", "a number > 0") for text in words for word in text.split(",")]
    for value in found:
        if not (value > 0.0 and math.isfinite(value)):
            raise UserError(f"--delta: {value:g} is no radius; allowed: a finite number > 0, such as 0.05")
    return found


def _number(word: str, source: str, wanted: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise UserError(f"{source}: '{word}' is not a number; expected {wanted}") from None


def names(option: str, texts: Iterable[str], allowed: Sequence[str]) -> list[str]:
    """Names apart by commas, each one of `allowed`."""
    found = [name.strip() for text in texts for name in text.split(",")]
    for name in found:
        if name not in allowed:
            raise UserError(
                f"{option}: '{name}' is not known{nearest(name, allowed)}; allowed: {', '.join(allowed)}"
            )
    return found


PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot_file(file: Path) -> None:
    """Refuse a picture that could not be written, before anything is computed."""
    if file.suffix.lower() not in PLOT_SUFFIXES:
        raise UserError(
            f"--plot {file}: no picture format{nearest(file.suffix, PLOT_SUFFIXES)}; "
            f"allowed endings: {', '.join(PLOT_SUFFIXES)}"
        )
    if not file.parent.is_dir():
        raise UserError(f"--plot {file}: there is no folder '{file.parent}'")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError(
            f"--plot {file}: cannot be written: {'it is a folder' if file.is_dir() else 'no permission'}"
        )
