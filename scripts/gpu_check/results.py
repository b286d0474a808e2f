"""Results of the checks: measured values, limits, the table and the JSON report."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "failed", "skipped"]


class Skipped(Exception):
    """A check does not apply on this machine; the message is the reason."""


@dataclass
class Measured:
    """What a check measured.

    Attributes:
        values: by name, with the unit in the name.
        limits: the conditions that were required, as text.
        shortfalls: those that do not hold, with the value.
    """

    values: dict[str, Any] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)
    shortfalls: list[str] = field(default_factory=list)

    def add(self, other: "Measured") -> None:
        """Add the values, limits and shortfalls of other measurements."""
        self.values |= other.values
        self.limits += other.limits
        self.shortfalls += other.shortfalls

    def at_most(self, name: str, limit: float) -> None:
        """Require the value `name` to be at most `limit`; NaN is not."""
        self._require(
            f"{name} ≤ {limit:g}", name, not math.isnan(self.values[name]) and self.values[name] <= limit
        )

    def at_least(self, name: str, limit: float) -> None:
        """Require the value `name` to be at least `limit`; NaN is not."""
        self._require(f"{name} ≥ {limit:g}", name, self.values[name] >= limit)

    def equal(self, name: str, expected: Any) -> None:
        """Require the value `name` to be `expected`."""
        self._require(f"{name} = {expected}", name, self.values[name] == expected)

    def _require(self, limit: str, name: str, holds: bool) -> None:
        self.limits.append(limit)
        if not holds:
            self.shortfalls.append(f"{name} is {_text(self.values[name])}, required: {limit}")


@dataclass(frozen=True)
class Line:
    """One line of the report.

    Attributes:
        reason: why the check failed or was skipped; '' where it is ok.
        seconds: wall time of the check.
    """

    name: str
    status: Status
    seconds: float
    values: Mapping[str, Any] = field(default_factory=dict)
    limits: Sequence[str] = ()
    reason: str = ""


def write_json(path: Path, machine: Mapping[str, Any], lines: Sequence[Line]) -> None:
    """Write the report."""
    report = {"machine": machine, "passed": passed(lines), "lines": [asdict(line) for line in lines]}
    path.write_text(json.dumps(_finite(report), indent=2) + "\n", encoding="utf-8")


def passed(lines: Sequence[Line]) -> bool:
    """Return whether no line failed."""
    return all(line.status != "failed" for line in lines)


def table(lines: Sequence[Line]) -> str:
    """Return the report as text: a line per check, its values below it."""
    width = max(len(line.name) for line in lines)
    rows = []
    for line in lines:
        rows.append(f"{line.name:<{width}}  {line.status:<7}  {line.seconds:6.1f} s  {line.reason}".rstrip())
        names = max(map(len, line.values), default=0)
        rows += [f"{'':<{width}}    {name:<{names}}  {_text(value)}" for name, value in line.values.items()]
        if line.limits:
            rows.append(f"{'':<{width}}    required: {', '.join(line.limits)}")
    return "\n".join(rows)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _finite(value: Any) -> Any:
    """Return `value` with null for numbers that JSON cannot have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
