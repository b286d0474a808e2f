"""Mutation check: apply deliberate errors to copies of the repository and run the tests that should fail.

    python scripts/mutants.py                       # the listed errors, two at a time
    python scripts/mutants.py interval.py "rank"    # those whose file or description contains one of the texts
    python scripts/mutants.py --random 60 --seed 1  # random mutations by cosmic-ray instead of the list

`scripts/mutants.toml` lists the errors that no mutation tool makes. In pyproject.toml, `[tool.mutants]` names the
modules of the random mutations and the tests of every module. An error is caught if these tests fail; an error that
survives needs a test. The tests run without an error first. Exit code 1: an error survived, tests failed without an
error, or a listed text is not in the modules exactly once.

Every copy is tested in a forked process of a parent that has imported the heavy libraries already, because importing
torch and transformers takes longer than most of the tests.
"""

import argparse
import ast
import difflib
import importlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = [
    "torch",
    "transformers.models.qwen2",
    "transformers.models.llama",
    "pandas",
    "pyarrow",
    "scipy.optimize",
]
PRELOADED += ["matplotlib.pyplot", "hypothesis", "pytest", "typer.testing", "mpmath", "rich.live"]
COPIED = ("bandpo_cli", "tests", "configs", "scripts", "examples", "benchmarks")
LIMIT_S = 60.0
"""Seconds beyond the time of all tests after which an error counts as caught: an endless loop is caught as well."""
SURVIVED = "SURVIVED"
PYTEST = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line"]


@dataclass(frozen=True)
class Mutant:
    """A deliberate error: the file with the error in it, a description, and the tests that should fail."""

    file: str
    description: str
    text: str
    tests: tuple[str, ...]


def settings() -> dict[str, Any]:
    """Return the table `[tool.mutants]` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutants"]
    return table


@cache
def modules() -> dict[str, tuple[str, list[str]]]:
    """Return the text and the tests of each module in which errors are made, by its path."""
    found = {}
    for place, tests in settings()["tests"].items():
        for path in sorted((ROOT / place).rglob("*.py")) if place.endswith("/") else [ROOT / place]:
            found[str(path.relative_to(ROOT))] = path.read_text(), tests
    return {file: (text, tests) for file, (text, tests) in found.items() if tests}


def listed() -> tuple[list[Mutant], list[str]]:
    """Return the errors of mutants.toml, and a line for every error that does not fit the code."""
    mutants, problems = [], []
    for errors in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).values():
        for description, old, new, *tests in errors:
            places = [file for file, (text, _) in modules().items() for _ in range(text.count(old))]
            problems += [f"{description}: no {test}" for test in tests if not (ROOT / test).exists()]
            if len(places) != 1:
                problems.append(
                    f"{description}: {old!r} occurs {len(places)} times, in {sorted(set(places))}"
                )
                continue
            text, usual = modules()[places[0]]
            changed = text.replace(old, new)
            try:
                ast.parse(changed)
            except SyntaxError as error:
                problems.append(f"{description}: {error}")
            mutants.append(Mutant(places[0], description, changed, tuple(tests or usual)))
    return mutants, problems


def random_mutants(number: int, seed: int) -> list[Mutant]:
    """Return `number` mutations by cosmic-ray: places with equal probability, and one operator per place."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    excluded = settings()["exclude-operators"]
    operators = [name for name in sorted(operator_names()) if not re.search(excluded, name)]
    places: dict[tuple[str, tuple[int, int]], list[tuple[str, int]]] = {}
    for file, (text, _) in modules().items():
        nodes = list(ast_nodes(get_ast(text)))
        for name in operators:
            operator = get_operator(name)()
            starts = [start for node in nodes for start, _ in operator.mutation_positions(node)]
            for occurrence, start in enumerate(starts):
                places.setdefault((file, start), []).append((name, occurrence))
    generator = random.Random(seed)
    mutants = []
    for file, start in generator.sample(sorted(places), len(places)):
        name, occurrence = generator.choice(places[file, start])
        source, tests = modules()[file]
        try:
            text = mutate_code(source, get_operator(name)(), occurrence)
            assert text is not None
            ast.parse(text)
        except (AttributeError, SyntaxError):  # from `except module.Error`, and from `**options` in a call
            continue
        changed = [line for line in difflib.ndiff(source.splitlines(), text.splitlines()) if line[0] in "-+"]
        description = f"{name.removeprefix('core/')}, line {start[0]}: " + " ".join(
            " ".join(line.split()) for line in changed
        )
        mutants.append(Mutant(file, description, text, tuple(tests)))
        if len(mutants) == number:
            break
    return mutants


def run(mutant: Mutant, workplace: Path, limit: float | None) -> tuple[str, float, str]:
    """Test a copy of the repository with the error; return the verdict, the seconds and the output of pytest."""
    start = time.perf_counter()
    copy = Path(tempfile.mkdtemp(dir=workplace))
    for name in COPIED:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (ROOT / "docs", *filter(Path.is_file, ROOT.iterdir())):
        os.symlink(path, copy / path.name)
    (copy / mutant.file).write_text(mutant.text)
    log = copy / "pytest.log"
    process = multiprocessing.get_context("fork").Process(target=_run_tests, args=(copy, mutant.tests, log))
    process.start()
    process.join(limit)
    if process.is_alive():
        verdict = "caught (time limit)"
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    else:
        # 1: tests failed; 2 and 4: an import failed, in a file of tests or in conftest.py.
        verdicts = {0: SURVIVED, 1: "caught", 2: "caught", 4: "caught"}
        verdict = verdicts.get(process.exitcode or 0, f"pytest: {process.exitcode}")
    output = log.read_text(errors="replace")
    shutil.rmtree(copy, ignore_errors=True)
    return verdict, time.perf_counter() - start, output


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

    class FastTestsOfFolders:
        """The slow tests of a named file run, because some errors show only there; those of a folder are left out."""

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            files = {copy / test for test in tests}
            items[:] = [item for item in items if item.path in files or not item.get_closest_marker("slow")]

    os._exit(pytest.main([*PYTEST, *tests], [FastTestsOfFolders()]))


def _preload() -> None:
    """Import what the tests import, the package itself excepted."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in PRELOADED:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    assert "bandpo_cli" not in sys.modules


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the selected errors and print the survivors; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("select", nargs="*", help="texts, one of which the file or the description contains")
    parser.add_argument(
        "--random", type=int, metavar="N", help="N mutations by cosmic-ray instead of the list"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random mutations")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="errors at a time")
    parser.add_argument("--logs", type=Path, help="folder for the output of pytest per error")
    parser.add_argument(
        "--check", action="store_true", help="only check that every listed text is still there"
    )
    options = parser.parse_args(arguments)

    mutants, problems = (random_mutants(options.random, options.seed), []) if options.random else listed()
    print("\n".join(problems), file=sys.stderr)
    if problems or options.check:
        return 1 if problems else 0
    names = {f"{mutant.file}: {mutant.description}": mutant for mutant in mutants}
    selected = [name for name in names if not options.select or any(text in name for text in options.select)]

    _preload()
    start = time.perf_counter()
    survivors = []
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as workplace,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        # Tests that fail in a copy without an error would catch every error.
        tests = dict.fromkeys(chain.from_iterable(names[name].tests for name in selected))
        file, (text, _) = next(iter(modules().items()))
        verdict, limit, output = run(Mutant(file, "", text, tuple(tests)), Path(workplace), limit=None)
        print(
            f"{'tests passed' if verdict == SURVIVED else verdict:20} {limit:5.0f} s  without an error",
            flush=True,
        )
        if verdict != SURVIVED:
            print(output, file=sys.stderr)
            return 1
        test = partial(run, workplace=Path(workplace), limit=LIMIT_S + limit)
        results = pool.map(test, [names[name] for name in selected])
        for number, (name, (verdict, seconds, output)) in enumerate(zip(selected, results, strict=True), 1):
            print(f"{verdict:20} {seconds:5.0f} s  {name}", flush=True)
            if not verdict.startswith("caught"):
                survivors.append(f"{verdict}: {name}")
            if options.logs:
                options.logs.mkdir(parents=True, exist_ok=True)
                (options.logs / f"{number}.log").write_text(f"{name}\n\n{output}")
    caught = len(selected) - len(survivors)
    print(
        f"\n{caught} of {len(selected)} errors caught in {time.perf_counter() - start:,.0f} s",
        *survivors,
        sep="\n",
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
