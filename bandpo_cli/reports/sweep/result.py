"""What a report holds. Every table, page and JSON is made from this alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bandpo_cli.reports.sweep.runs import LeftOut
from bandpo_cli.reports.sweep.statistics import Estimate, Paired


@dataclass(frozen=True)
class Figure:
    """Something that is measured of every run.

    Attributes:
        key: its column in leaderboard.csv.
        name: as tables head it.
        about: what exactly, with its unit.
        compared: whether arms are compared by it, so that tables show its interval.
        pattern: how a value is written.
        percent: whether it is written in hundredths.
    """

    key: str
    name: str
    about: str
    compared: bool = True
    pattern: str = ".3f"
    percent: bool = False

    def text(self, value: float, sign: bool = False) -> str:
        """Return a value as tables have it."""
        words = format(100 * value if self.percent else value, ("+" if sign else "") + self.pattern)
        return f"{words}%" if self.percent else words


@dataclass(frozen=True)
class Arm:
    """The runs that differ in their seed alone.

    Attributes:
        name: of the arm.
        seeds: of the runs that are counted.
        steps: their last steps, the least and the greatest.
        settings: those in which the arms differ, as typed.
        figures: by key of `Report.figures`; those that the runs have.
    """

    name: str
    seeds: tuple[int, ...]
    steps: tuple[int, int]
    settings: Mapping[str, str]
    figures: Mapping[str, Estimate]


@dataclass(frozen=True)
class Difference:
    """An arm against the baseline in one figure, by common seeds.

    Attributes:
        arm, figure: names of the arm and key of the figure.
        paired: None without common seeds.
        p_holm: the p-value adjusted for the arms that are compared in this figure.
        verdict: what may be said, in words.
    """

    arm: str
    figure: str
    paired: Paired | None
    p_holm: float | None
    verdict: str


@dataclass(frozen=True)
class Report:
    """Arms compared.

    Attributes:
        title, finding: what was compared, and what came out, in a sentence.
        about: arms, seeds and steps in a line.
        baseline: the arm that others are compared with; None where there is none.
        sets: the evaluation sets that all runs have; of several, figures without a set's name are the plain mean.
        figures: what was measured, accuracy first.
        arms: the most accurate first.
        differences: by figure, then arm.
        notes: what a reader must know to read the figures right.
        left_out: runs that no figure is of.
        files: what was written, by name.
    """

    title: str
    about: str
    finding: str
    baseline: str | None
    sets: tuple[str, ...]
    figures: tuple[Figure, ...]
    arms: tuple[Arm, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    files: Mapping[str, Path]

    def figure(self, key: str) -> Figure:
        """Return the figure of a key."""
        return next(figure for figure in self.figures if figure.key == key)

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        plain = asdict(self)
        plain["files"] = {name: str(path) for name, path in self.files.items()}
        return plain
