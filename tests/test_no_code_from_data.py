"""Data and settings are never executed: the package has no eval, no pickle and no shell."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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
