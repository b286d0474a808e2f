"""Mutation check: apply deliberate one-line errors to copies of the repository and run the tests that should fail.

    python scripts/mutants.py                     # every mutant, two at a time
    python scripts/mutants.py training/ratio      # mutants whose name contains one of the given texts

The mutants are listed in `scripts/mutants/*.toml`. Each names a file, the text to replace, the replacement, the reason
and the tests of the packages concerned. A mutant is caught if these tests fail; a mutant that survives needs a test.
Exit code 1: a mutant survived, or a listed text is not in its file exactly once.

Every mutant runs in a forked process of a parent that has imported the heavy libraries already, because importing torch
and transformers takes longer than most of the tests.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).resolve().with_suffix("")
PRELOADED = [
    "torch",
    "transformers",
    "transformers.models.qwen2",
    "transformers.models.llama",
    "pandas",
    "pyarrow",
    "scipy.optimize",
    "matplotlib.pyplot",
    "hypothesis",
    "pytest",
    "typer.testing",
    "mpmath",
    "rich.live",
]
LIMIT_S = 300.0
"""Seconds after which the tests of a mutant count as failed: an endless loop is caught as well."""
PYTEST = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--no-header", "--tb=line"]


@dataclass(frozen=True)
class Mutant:
    """One deliberate error.

    Attributes:
        name: `<list>/<index>: <reason>`, unique.
        file: relative to the repository.
        old, new: text that occurs exactly once in the file, and its replacement.
        tests: pytest arguments, relative to the repository: those that are expected to fail.
        survives: reason why no test can catch it; empty for all others.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of one mutant; `log` holds the output of pytest."""

    mutant: Mutant
    verdict: str
    seconds: float
    log: str


def load(folder: Path) -> list[Mutant]:
    """Read all mutants of the TOML files in `folder`; a mutant without `tests` has those of its file's head."""
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        document = tomllib.loads(path.read_text())
        for index, entry in enumerate(document["mutant"], start=1):
            mutants.append(
                Mutant(
                    name=f"{path.stem}/{index}: {entry['reason']}",
                    file=entry["file"],
                    old=entry["old"],
                    new=entry["new"],
                    tests=tuple(entry.get("tests", document["tests"])),
                    survives=entry.get("survives", ""),
                )
            )
    return mutants


def misplaced(mutants: Sequence[Mutant], root: Path) -> Iterator[str]:
    """Yield a line for each mutant whose text is not in its file exactly once, or whose tests do not exist."""
    for mutant in mutants:
        path = root / mutant.file
        count = path.read_text().count(mutant.old) if path.is_file() else 0
        if count != 1:
            yield f"{mutant.name}: {mutant.old!r} occurs {count} times in {mutant.file}"
        for test in mutant.tests:
            if not (root / test.partition("::")[0]).exists():
                yield f"{mutant.name}: there is no {test}"


def run(mutant: Mutant, workplace: Path) -> Outcome:
    """Apply the mutant to a copy of the repository below `workplace` and run its tests in a forked process."""
    start = time.perf_counter()
    copy = Path(tempfile.mkdtemp(dir=workplace))
    for name in ("bandpo_cli", "tests", "configs", "scripts", "examples"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "Makefile", "docs"):
        os.symlink(ROOT / name, copy / name)
    # Public problem sets, which tests read when present.
    if (ROOT.parent / "shared").exists() and not (workplace / "shared").exists():
        os.symlink(ROOT.parent / "shared", workplace / "shared")
    path = copy / mutant.file
    path.write_text(path.read_text().replace(mutant.old, mutant.new))
    log = copy / "pytest.log"
    process = multiprocessing.get_context("fork").Process(target=_run_tests, args=(copy, mutant.tests, log))
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        verdict = "caught (time limit)"
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    else:
        # 1: tests failed; 2: collection stopped with errors, such as an import that fails.
        verdict = {0: "SURVIVED", 1: "caught", 2: "caught"}.get(
            process.exitcode or 0, f"pytest: {process.exitcode}"
        )
    output = log.read_text(errors="replace")
    shutil.rmtree(copy, ignore_errors=True)
    return Outcome(mutant, verdict, time.perf_counter() - start, output)


def _run_tests(copy: Path, tests: Sequence[str], log: Path) -> None:
    """Run pytest in the copy, with all its output in `log`; also processes that tests start import the copy."""
    os.setpgrp()
    os.chdir(copy)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path.insert(0, str(copy))
    import pytest

    os._exit(pytest.main([*PYTEST, *tests]))


def _preload() -> None:
    """Import what the tests import, the package itself excepted."""
    import torch

    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    assert not any(name.partition(".")[0] == "bandpo_cli" for name in sys.modules)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected mutants and print survivors; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("select", nargs="*", help="texts of which one must occur in the name of a mutant")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="mutants at a time")
    parser.add_argument("--logs", type=Path, help="folder for the output of pytest per mutant")
    parser.add_argument(
        "--check", action="store_true", help="only check that every listed text is still there"
    )
    options = parser.parse_args(arguments)

    mutants = [m for m in load(LIST) if not options.select or any(s in m.name for s in options.select)]
    problems = list(misplaced(mutants, ROOT))
    print("\n".join(problems), file=sys.stderr)
    if problems or options.check:
        return 1 if problems else 0

    os.environ["OMP_NUM_THREADS"] = "1"
    _preload()
    start = time.perf_counter()
    outcomes = []
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as workplace,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        for outcome in pool.map(lambda mutant: run(mutant, Path(workplace)), mutants):
            outcomes.append(outcome)
            print(f"{outcome.verdict:20} {outcome.seconds:5.0f} s  {outcome.mutant.name}", flush=True)
            if options.logs:
                options.logs.mkdir(parents=True, exist_ok=True)
                (options.logs / f"{outcome.mutant.name.partition(':')[0].replace('/', '-')}.log").write_text(
                    outcome.log
                )
    caught = [outcome for outcome in outcomes if outcome.verdict.startswith("caught")]
    expected = [o for o in outcomes if o.verdict == "SURVIVED" and o.mutant.survives]
    print(f"\n{len(caught)} of {len(outcomes)} mutants caught in {time.perf_counter() - start:,.0f} s")
    for outcome in outcomes:
        if outcome in expected:
            print(f"survives, as documented: {outcome.mutant.name} ({outcome.mutant.survives})")
        elif outcome not in caught:
            print(f"{outcome.verdict}: {outcome.mutant.name}: {outcome.mutant.file}, {outcome.mutant.new!r}")
    return 0 if len(caught) + len(expected) == len(outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
