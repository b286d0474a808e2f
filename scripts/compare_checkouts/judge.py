"""Judges each command: exit codes, tracebacks, standard output, and the final state of the files it wrote."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.compare_checkouts import compare
from scripts.compare_checkouts.commands import Command, Stdout
from scripts.compare_checkouts.compare import Difference
from scripts.compare_checkouts.run import Outcome, Side

TRACEBACK = "Traceback (most recent call last)"

Pair = tuple[Outcome, Outcome]
Sides = tuple[Side, Side]


@dataclass(frozen=True)
class Verdict:
    """A command compared.

    Attributes:
        compared: what was compared, as the table shows it.
        contents: files compared by content.
        presences: files compared by presence alone.
        differences: all that were found; one for each file.
    """

    command: Command
    compared: str
    contents: int
    presences: int
    differences: list[Difference]


def judge_all(commands: Sequence[Command], outcomes: Mapping[str, Pair], sides: Sides) -> list[Verdict]:
    """Return a verdict for each command.

    Files are compared as they are after the last command. A file that several commands wrote counts for the last.
    """
    judged: set[str] = set()
    verdicts = []
    for command in reversed(commands):
        pair = outcomes[command.name]
        paths = sorted((pair[0].written | pair[1].written) - judged)
        judged.update(paths)
        verdicts.append(judge(command, pair, paths, sides))
    return verdicts[::-1]


def judge(command: Command, pair: Pair, paths: Sequence[str], sides: Sides) -> Verdict:
    """Compare one command and the files in `paths`, relative to each side's folder."""
    parts = ["exit code"]
    differences = [*_exit_differences(command, pair)]
    if not command.writes:
        parts.append("no files written")
    if command.stdout is not Stdout.NONE:
        parts.append("stdout")
        differences += _output_differences(command, pair)
    # Artifacts lie in folders with random names; the comparer of the MLflow store lists them.
    named = [path for path in paths if compare.MLFLOW_ARTIFACTS not in path.split("/")]
    plain = (sides[0].plain, sides[1].plain)
    presences = 0
    for path in named:
        old, new = (side.work / path for side in sides)
        presences += compare.presence_only(old)
        found = compare.compare_files(old, new, plain)
        if found is not None:
            differences.append(Difference(f"{path}: {found.where}", found.old, found.new))
    if command.writes:
        parts.append(f"{len(named)} files")
    return Verdict(command, ", ".join(parts), len(named) - presences, presences, differences)


def _exit_differences(command: Command, pair: Pair) -> Iterator[Difference]:
    old, new = pair
    if (old.code, new.code) != (command.code, command.code):
        last = next(
            (line for item in pair for line in item.stderr.splitlines()[-1:] if item.code != command.code), ""
        )
        yield Difference(f"exit code (expected {command.code}; {last[:150]})", old.code, new.code)
    shows = [TRACEBACK in item.stdout + item.stderr for item in pair]
    if any(shows):
        yield Difference("shows a traceback", *shows)
    # A command that refuses to resume a run has held the lock of the run.
    files = [sorted(path for path in item.written if not path.endswith(".lock")) for item in pair]
    if not command.writes and any(files):
        yield Difference("writes files", *(file[:3] for file in files))


def _output_differences(command: Command, pair: Pair) -> Iterator[Difference]:
    """Yield the first difference of standard output."""
    try:
        old, new = (_output_values(command.stdout, outcome.stdout) for outcome in pair)
        difference = compare.first_difference(old, new, "stdout")
    except ValueError as error:
        difference = Difference(f"stdout cannot be read ({error})", *(outcome.stdout for outcome in pair))
    if difference is not None:
        yield difference


def _output_values(stdout: Stdout, text: str) -> Any:
    if stdout is Stdout.JSON:
        return compare.without_keys(json.loads(text), compare.ignored_keys("stdout"))
    if stdout is Stdout.NUMBERS:
        return compare.numbers_in(text)
    if stdout is Stdout.SETTINGS:
        return compare.settings_in(text)
    return text.splitlines() if stdout is Stdout.BYTES else None
