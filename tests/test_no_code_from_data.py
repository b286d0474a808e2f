"""Data and settings are never executed: the package has no eval, no pickle and no shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "bandpo_cli"
BUILTINS = {"eval", "exec", "compile", "__import__"}
MODULES = {
    "pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "code",
    "codeop",
    "runpy",
}
CALLS = {
    "torch.load", "torch.hub.load", "torch.jit.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all",
    "os.system", "os.popen", "os.execv", "os.execvp", "os.spawnl", "subprocess.getoutput",
    "subprocess.getstatusoutput", "pandas.read_pickle", "numpy.fromfile",
}  # fmt: skip
SAFE_LOADERS = {"_StrictLoader", "_FastLoader"}


def findings(source: str) -> Iterator[str]:
    """Yield the imports and calls of a module that could execute data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            yield from (name for name in names if name.split(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        short = name.replace("np.", "numpy.").replace("pd.", "pandas.")
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if isinstance(node.func, ast.Name) and name in BUILTINS:
            yield name
        if short in CALLS or name.split(".")[0] in MODULES:
            yield name
        if name == "yaml.load" and keywords.get("Loader") not in SAFE_LOADERS:
            yield name
        if keywords.get("shell", "False") != "False" or keywords.get("allow_pickle", "False") != "False":
            yield f"{name} with a shell or pickles"
        if keywords.get("trust_remote_code", "False") not in ("False", "config.trust_remote_code"):
            yield f"{name} with trust"


def test_no_module_executes_data() -> None:
    modules = sorted(PACKAGE.rglob("*.py"))
    assert len(modules) > 100
    found = {str(path.relative_to(PACKAGE)): list(findings(path.read_text("utf-8"))) for path in modules}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    [
        "eval(text)",
        "exec(text)",
        "compile(text, '', 'eval')",
        "import pickle",
        "from marshal import loads",
        "import torch; torch.load(path)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.full_load(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "np.load(path, allow_pickle=True)",
        "pd.read_pickle(path)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_each_unsafe_call_is_detected(line: str) -> None:
    assert list(findings(line))
    assert not list(findings("model.eval(); re.compile('x'); np.load(path); yaml.safe_load(text)"))
