"""Run the same commands in two checkouts of this repository and compare everything that they compute.

    python -m scripts.compare_checkouts OLD NEW [--only NAME ...] [--keep DIR]

OLD and NEW are folders or git revisions. A revision is checked out by `git worktree add` into a temporary folder, which
is removed at the end. Both sides run at the same time, with one thread each, in folders with the same inputs.

The script compares exit codes, the output of commands that print JSON, CSV or tables of numbers, and every file that a
command wrote: values exactly, tensors bit for bit. `compare.py` lists the keys and files that are left out, with the
reasons. Exit code 0: all is equal. 1: there are differences; the table shows the first one of each command. 2: the
comparison could not run.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from scripts.compare_checkouts.commands import Command, choose
from scripts.compare_checkouts.inputs import write_inputs
from scripts.compare_checkouts.judge import Pair, Sides, Verdict, judge_all
from scripts.compare_checkouts.run import Runner, Side, check_import

REPOSITORY = Path(__file__).resolve().parents[2]


def main() -> int:
    """Compare two checkouts and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare_checkouts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", metavar="OLD", help="a folder or a git revision")
    parser.add_argument("new", metavar="NEW", help="another one; . is the working tree")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="commands, by the start of their names"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all outputs here; a new folder")
    options = parser.parse_args()
    start = time.monotonic()
    try:
        commands = choose(options.only)
        with ExitStack() as stack:
            temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compare-"))).resolve()
            place = options.keep.resolve() if options.keep else temporary
            old, new = (
                Side(name, stack.enter_context(checkout(text, temporary / f"{name}-checkout")), place / name)
                for name, text in (("old", options.old), ("new", options.new))
            )
            verdicts, outcomes = compare_sides((old, new), commands)
    except (ValueError, RuntimeError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return show(verdicts, outcomes, time.monotonic() - start)


@contextmanager
def checkout(text: str, folder: Path) -> Iterator[Path]:
    """Yield the folder that `text` names, or a worktree of the revision that it names, removed at the end.

    Raises ValueError where it is neither, or has no package `bandpo_cli`.
    """
    given = Path(text)
    if given.is_dir():
        if not (given / "bandpo_cli" / "__init__.py").is_file():
            raise ValueError(f"{text}: the folder has no package bandpo_cli")
        yield given.resolve()
        return
    found = _git("rev-parse", "--verify", "--quiet", f"{text}^{{commit}}")
    if found.returncode:
        raise ValueError(f"{text}: neither a folder nor a git revision")
    added = _git("worktree", "add", "--detach", str(folder), found.stdout.strip())
    if added.returncode:
        raise RuntimeError(f"git worktree add: {added.stderr.strip()}")
    try:
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


def compare_sides(sides: Sides, commands: Sequence[Command]) -> tuple[list[Verdict], dict[str, Pair]]:
    """Run the commands on both sides at the same time, and compare the outcomes."""
    for side in sides:
        side.work.mkdir(parents=True)
        check_import(side)
    write_inputs(sides[0].work)
    shutil.copytree(sides[0].work, sides[1].work, dirs_exist_ok=True)
    # The stack is closed first: after Ctrl-C the threads end because their runners have been closed.
    with ThreadPoolExecutor(2) as threads, ExitStack() as stack:
        runners = [stack.enter_context(Runner(side)) for side in sides]
        old, new = threads.map(lambda runner: runner.run_all(commands), runners)
    outcomes = {name: (old[name], new[name]) for name in old}
    return judge_all(commands, outcomes, sides), outcomes


def show(verdicts: Sequence[Verdict], outcomes: dict[str, Pair], seconds: float) -> int:
    """Print the table and the totals; return 1 where anything differs, else 0."""
    print(f"\n{'command':<20} {'old':>6} {'new':>6}  {'compared':<34} result")
    for verdict in verdicts:
        old, new = outcomes[verdict.command.name]
        result = str(verdict.differences[0]) if verdict.differences else "equal"
        more = f" (and {len(verdict.differences) - 1} more)" if len(verdict.differences) > 1 else ""
        mark = "DIFFERENT " if verdict.differences else ""
        print(
            f"{verdict.command.name:<20} {old.seconds:5.1f}s {new.seconds:5.1f}s  {verdict.compared:<34} "
            f"{mark}{result}{more}"
        )
        if verdict.differences:
            print(f"{'':<20} bandpo {' '.join(verdict.command.words)}")
    different = sum(bool(verdict.differences) for verdict in verdicts)
    contents, presences = (sum(getattr(item, key) for item in verdicts) for key in ("contents", "presences"))
    print(
        f"\n{len(verdicts)} commands, {contents} files compared by content and {presences} by presence, "
        f"{seconds:.0f} s: " + (f"{different} commands DIFFER" if different else "all equal")
    )
    return 1 if different else 0


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
