"""The repository: links in docs/architecture.md, constraint files, and no code that executes data."""

import ast
import re
import tomllib
from collections.abc import Iterator
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


PACKAGE = Path(__file__).parents[1] / "bandpo_cli"
SAFE_LOADERS = {"_StrictLoader"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
MODULES = {
    "pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "code", "codeop", "runpy",
}  # fmt: skip
CALLS = {
    "torch.load", "torch.hub.load", "torch.jit.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all",
    "os.system", "os.popen", "os.execv", "os.execvp", "os.spawnl", "subprocess.getoutput",
    "subprocess.getstatusoutput", "pandas.read_pickle", "numpy.fromfile",
}  # fmt: skip
SAFE_KEYWORDS = {
    "shell": ["False"],
    "allow_pickle": ["False"],
    "trust_remote_code": ["False", "config.trust_remote_code"],
}

LAST_NAMES = {"load", *(name.rpartition(".")[2] for name in BUILTINS | CALLS)}

SUSPECT = re.compile(
    rf"\b({'|'.join(BUILTINS | LAST_NAMES)})\(|\b({'|'.join(SAFE_KEYWORDS)})="
    rf"|\b(import|from)\b.*\b({'|'.join(MODULES)})\b"
)


def findings(source: str) -> Iterator[str]:
    """Yield the imports and calls of a module that could execute data."""
    for node in ast.walk(ast.parse(source if SUSPECT.search(source) else "")):
        if isinstance(node, ast.ImportFrom):
            yield from {(node.module or "").split(".")[0]} & MODULES
        elif isinstance(node, ast.Import):
            yield from {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
            last = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if last not in LAST_NAMES and not SAFE_KEYWORDS.keys() & keywords:
                continue
            name = ast.unparse(node.func)
            if name in BUILTINS or re.sub("^np", "numpy", re.sub("^pd", "pandas", name)) in CALLS:
                yield name
            if name == "yaml.load" and ast.unparse(keywords.get("Loader", node)) not in SAFE_LOADERS:
                yield name
            for keyword, values in SAFE_KEYWORDS.items():
                if keyword in keywords and ast.unparse(keywords[keyword]) not in values:
                    yield f"{name}, {keyword}"


def test_no_module_executes_data():
    modules = sorted(PACKAGE.rglob("*.py"))
    assert len(modules) > 100
    assert {path: names for path in modules if (names := list(findings(path.read_text("utf-8"))))} == {}


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
    assert list(findings(line))
    assert not list(findings("model.eval(); re.compile('x'); np.load(path); yaml.safe_load(text)"))
