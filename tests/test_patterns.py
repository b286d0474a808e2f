"""Regular expressions of the package: each takes time linear in its text, for the methods that it is used with."""

from __future__ import annotations

import ast
import inspect
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.regex_attack import MAX_ATTACKS, CountingMatcher, attacks, weakness

PACKAGE = Path(__file__).parents[1] / "bandpo_cli"
METHODS = {
    "match": "match",
    "fullmatch": "fullmatch",
    "search": "search",
    "findall": "finditer",
    "finditer": "finditer",
    "split": "finditer",
    "sub": "finditer",
    "subn": "finditer",
}
"""Method of `re` and of a pattern → the method of `CountingMatcher` that visits the same positions."""
ANY_METHOD = frozenset({"match", "fullmatch", "finditer"})


@dataclass(frozen=True)
class Used:
    """A regular expression in the source of the package, with the methods that it is used with."""

    place: str
    pattern: str
    flags: int
    methods: frozenset[str]


def patterns_in(source: str, place: str) -> Iterator[Used]:
    """Yield the pattern of each call of `re` in a module.

    A compiled pattern that has a name is used with the methods called on that name. If the module uses the name in
    any other way (as an argument, in a tuple), or the pattern has no name, it is attacked with all methods.

    Raises:
        ValueError: A pattern is not a constant of the module, or `re` is imported under another name.
    """
    tree = ast.parse(source)
    constants = _constants(tree)
    names = {
        id(node.value): target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "re":
            raise ValueError(f"{place}: write 'import re', so that this test finds the patterns")
        if isinstance(node, ast.Import) and any(
            alias.name == "regex" or (alias.name == "re" and alias.asname) for alias in node.names
        ):
            raise ValueError(f"{place}: write 'import re', so that this test finds the patterns")
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        method = node.func.attr
        if ast.unparse(node.func.value) != "re" or method not in {*METHODS, "compile", "template"}:
            continue
        where = f"{place}:{node.lineno}"
        arguments = inspect.signature(getattr(re, method)).bind(
            *node.args, **{str(keyword.arg): keyword.value for keyword in node.keywords}
        )
        pattern = _evaluate(arguments.arguments["pattern"], constants, where)
        flags = arguments.arguments.get("flags")
        methods = frozenset({METHODS[method]}) if method in METHODS else _methods(tree, names.get(id(node)))
        yield Used(where, pattern, int(_evaluate(flags, constants, where)) if flags else 0, methods)


def _methods(tree: ast.Module, name: str | None) -> frozenset[str]:
    """Return the methods that a module calls on a name; all of them if the name is used otherwise or not at all."""
    calls = {
        id(node.value): node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
    }
    uses = [
        calls.get(id(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
    ]
    known = {METHODS[method] for method in uses if method in METHODS}
    return frozenset(known) if known and all(use in METHODS for use in uses) else ANY_METHOD


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the values of the module's constants that are made of literals and other such constants."""
    constants: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                constants[node.targets[0].id] = _evaluate(node.value, constants, "")
            except ValueError:
                continue
    return constants


def _evaluate(node: ast.expr, constants: Mapping[str, Any], where: str) -> Any:
    code = compile(ast.Expression(node), where, "eval")
    try:
        return eval(code, {"__builtins__": {}, "re": re, **constants})
    except (NameError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise ValueError(f"{where}: the pattern is not a constant of the module ({error})") from None


@cache
def patterns() -> list[Used]:
    """Return the regular expressions of the package."""
    return [
        used
        for path in sorted(PACKAGE.rglob("*.py"))
        if "re." in (text := path.read_text("utf-8"))
        for used in patterns_in(text, str(path.relative_to(PACKAGE)))
    ]


def test_patterns_are_found() -> None:
    assert len(patterns()) > 50
    modules = {used.place.partition(":")[0] for used in patterns()}
    assert modules >= {"extract.py", "grading/numbers.py", "grading/answers.py"}


@pytest.mark.parametrize("most", [MAX_ATTACKS, pytest.param(1000, marks=pytest.mark.slow)])
def test_patterns_take_linear_time(most: int) -> None:
    found = {
        used.place: weakness(used.pattern, used.flags, sorted(used.methods), most) for used in patterns()
    }
    assert {place: attack for place, attack in found.items() if attack is not None} == {}


@pytest.mark.slow
def test_patterns_take_seconds_on_long_attacks_in_pythons_engine() -> None:
    """CPU time, not wall time: on 100,000 characters a quadratic pattern takes minutes."""
    jobs = [(used.pattern, used.flags, sorted(used.methods)) for used in patterns()]
    texts = [
        [attack.text(100_000 // len(attack.piece)) for attack in attacks(used.pattern, used.flags)[:4]]
        for used in patterns()
    ]
    code = (
        "import json, re, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (60, 60))\n"
        "for (pattern, flags, methods), texts in zip(*json.load(sys.stdin), strict=True):\n"
        "    print(pattern, file=sys.stderr, flush=True)\n"
        "    for method in methods:\n"
        "        for text in texts:\n"
        "            found = getattr(re.compile(pattern, flags), method)(text)\n"
        "            found if method != 'finditer' else list(found)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps([jobs, texts]), text=True, stderr=subprocess.PIPE
    )
    assert done.returncode == 0, f"the last pattern is slow: {done.stderr.splitlines()[-1]}"


BAD = [
    ("match", r"(a+)+b"),
    ("match", r"(a|a)*b"),
    ("match", r"(?:a|b|ab)*c"),
    ("match", r"(\w+\s?)*$"),
    ("match", r"a.*b.*c"),
    ("match", r'(?:[^"\\]|\\.|\\)*"'),
    ("fullmatch", r"(?:a*?)*?b"),
    ("fullmatch", r"(?:[A-Za-z]+|[ ./()'*²³-]|\^ ?(?:\{ ?-?[1-4] ?\}|-?[1-4]))*"),
    ("search", r"\s*\s*x"),
    ("search", r"\s*x"),
    ("search", r"\s+$"),
    ("search", r".*foo"),
    ("search", r"(\d+)-(\d+)\.parquet"),
    ("search", r"://[^/@]*:[^/@]*@"),
    ("finditer", r"a*b|a"),
    ("finditer", r"(?=a*b)a|a"),
    ("finditer", r"(?<![0-9 ]) +| +(?![0-9 ])"),
    ("finditer", r"_\s*\{?\s*\\odot\s*\}?"),
    ("finditer", r"\.?0*e([+-])0*"),
]
"""Patterns with super-linear time, some of them from earlier versions of the package."""

GOOD = [
    ("fullmatch", r"(\d+)-(\d+)\.parquet"),
    ("fullmatch", r"(?:[A-Za-z]|[ .-])*"),
    ("match", r"(?>a+)b"),
    ("match", r"(?:a++)+b"),
    ("search", r"x\s*x"),
    ("finditer", r"[a-z]+"),
    ("finditer", r"(?<!\s)\s++x"),
    ("finditer", r"a{1,3}b"),
]


@pytest.mark.parametrize(("method", "pattern"), BAD)
def test_known_super_linear_patterns_are_detected(method: str, pattern: str) -> None:
    assert str(weakness(pattern, 0, [method])).startswith(f"{method} on ")


@pytest.mark.parametrize(("method", "pattern"), GOOD)
def test_known_linear_patterns_pass(method: str, pattern: str) -> None:
    assert weakness(pattern, 0, [method]) is None


@pytest.mark.parametrize("method", ["match", "fullmatch", "search", "finditer"])
def test_counting_matcher_finds_what_the_engine_finds(method: str) -> None:
    """The steps are those of Python's engine only if both try the same alternatives in the same order."""
    rng = random.Random(1)
    matches = 0
    for pattern, flags in {(used.pattern, used.flags) for used in patterns()} | {
        (p, 0) for _, p in BAD + GOOD
    }:
        matcher = CountingMatcher(pattern, flags)
        words = ["", *matcher.words(), *matcher.alphabet]
        for _ in range(12):
            text = "".join(rng.choices(words, k=rng.randrange(1, 4)))[:30]
            found = getattr(re.compile(pattern, flags), method)(text)
            found = list(found) if method == "finditer" else [found] if found else []
            assert matcher.spans(method, text) == [match.span() for match in found], (pattern, text)
            matches += bool(found)
    assert matches > 100
