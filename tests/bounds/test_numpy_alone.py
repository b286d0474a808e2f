"""`bandpo_cli.bounds` and `bandpo_cli.integrations` beside other trainers: imports of numpy and the trainer alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest

from bandpo_cli.bounds import band_bounds
from bandpo_cli.registries import DIVERGENCES

ROOT = Path(__file__).resolve().parents[2]
LOGPROBS = np.concatenate([-np.logspace(-9, 1.9, 40), [0.0, -np.inf, np.nan]])

NO_OTHER_PACKAGES = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package not in sys.stdlib_module_names | {"numpy", "bandpo_cli"}:
            raise ModuleNotFoundError(f"blocked: {name}", name=package)

sys.meta_path.insert(0, Refuse())
"""
"""Code that makes every import of a package other than numpy and bandpo_cli fail."""

COMPUTE_ALL = """
import json
import numpy as np
from bandpo_cli.bounds import band_bounds, ratio_bounds
from bandpo_cli.registries import DIVERGENCES
logprobs = np.array(json.loads(input()))
bounds = {name: np.stack(band_bounds(logprobs, name, 0.05, 10.0)).tolist() for name in DIVERGENCES}
print(json.dumps(bounds))
"""


def run(python: str | Path, code: str, text: str = "", folder: Path = ROOT) -> str:
    """Return what the code prints in a fresh process of `python`."""
    done = subprocess.run(
        [python, "-c", code], input=text, capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_bounds_are_those_here(printed: str) -> None:
    found = json.loads(printed)
    assert list(found) == list(DIVERGENCES)
    for name in DIVERGENCES:
        np.testing.assert_allclose(found[name], np.stack(band_bounds(LOGPROBS, name, 0.05, 10.0)), rtol=1e-12)


def test_bounds_need_numpy_alone() -> None:
    assert_bounds_are_those_here(
        run(sys.executable, NO_OTHER_PACKAGES + COMPUTE_ALL, json.dumps(LOGPROBS.tolist()))
    )


def test_every_function_of_the_bounds_can_be_loaded_with_numpy_alone() -> None:
    """The registries name functions as "module:attribute"; those of the methods take settings as arguments only."""
    code = """
import bandpo_cli.bounds.intervals
from bandpo_cli.registries import METHODS, load_attribute
print([load_attribute(entry.bounds).__name__ for entry in METHODS.values() if entry.bounds])
"""
    assert "band" in run(sys.executable, NO_OTHER_PACKAGES + code)


@pytest.mark.parametrize("name", ["trl", "prime_rl", "skyrl", "verl"])
def test_an_integration_needs_numpy_and_its_trainer_alone(name: str) -> None:
    """Empty classes stand for what it imports from torch and the trainer."""
    code = f"""
from types import ModuleType

class Anything(ModuleType):
    __version__, __path__ = "1.16.0", []
    def __getattr__(self, name):
        accept = lambda self, *arguments, **settings: None
        return type(name, (), {{"__init__": accept, "__call__": accept}})

for module in (
    "torch", "trl", "prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl", "prime_rl.trainer.rl.loss", "skyrl",
    "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.utils",
    "skyrl.backends.skyrl_train.utils.off_policy_correction_utils",
    "skyrl.backends.skyrl_train.utils.ppo_utils", "skyrl.backends.skyrl_train.utils.torch_utils",
    "skyrl.train", "skyrl.train.config", "verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.core_algos",
    "verl.utils", "verl.utils.torch_functional", "verl.workers", "verl.workers.config",
):
    sys.modules[module] = Anything(module)
import bandpo_cli.integrations.{name}
print(sorted(name for name in sys.modules if name.startswith("bandpo_cli.config")))
"""
    assert run(sys.executable, NO_OTHER_PACKAGES + code) == "[]\n"


@pytest.mark.slow
def test_an_environment_with_numpy_alone_computes_the_same_bounds(tmp_path: Path) -> None:
    """`pip install --no-deps bandpo` beside numpy, as docs/integrations.md has it; needs a package index."""
    source = tmp_path / "source"  # a copy, since the build writes into it
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "bandpo_cli", source / "bandpo_cli", ignore=shutil.ignore_patterns("__pycache__"))
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", source, f"numpy=={np.__version__}"], check=True)
    listed = subprocess.run(
        [*pip, "list", "--format=json"], check=True, capture_output=True, text=True
    ).stdout
    assert {package["name"] for package in json.loads(listed)} <= {"bandpo", "numpy", "pip", "setuptools"}
    assert_bounds_are_those_here(run(python, COMPUTE_ALL, json.dumps(LOGPROBS.tolist()), folder=tmp_path))
