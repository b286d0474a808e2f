"""`bandpo_cli.bounds` and `bandpo_cli.integrations` beside other trainers: imports of numpy and the trainer alone."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from bandpo_cli.bounds import band_bounds
from bandpo_cli.registries import DIVERGENCES

ROOT = Path(__file__).resolve().parents[2]
LOGPROBS = np.concatenate([-np.logspace(-9, 1.9, 40), [0.0, -np.inf, np.nan]])

CODE = """
import json
import sys
from types import ModuleType

class Refuse:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package not in sys.stdlib_module_names | {"numpy", "bandpo_cli"}:
            raise ModuleNotFoundError(f"blocked: {name}", name=package)

sys.meta_path.insert(0, Refuse())  # every import of another package fails

import numpy as np
from bandpo_cli.bounds import band_bounds
from bandpo_cli.registries import DIVERGENCES

logprobs = np.array(json.loads(input()))
bounds = {name: np.stack(band_bounds(logprobs, name, 0.05, 10.0)).tolist() for name in DIVERGENCES}

class Anything(ModuleType):
    __version__, __path__ = "1.16.0", []
    def __getattr__(self, name):
        accept = lambda self, *arguments, **settings: None
        return type(name, (), {"__init__": accept, "__call__": accept})

for module in (
    "torch", "trl", "prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl", "prime_rl.trainer.rl.loss", "skyrl",
    "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.utils",
    "skyrl.backends.skyrl_train.utils.off_policy_correction_utils",
    "skyrl.backends.skyrl_train.utils.ppo_utils", "skyrl.backends.skyrl_train.utils.torch_utils",
    "skyrl.train", "skyrl.train.config", "verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.core_algos",
    "verl.utils", "verl.utils.torch_functional", "verl.workers", "verl.workers.config",
):
    sys.modules[module] = Anything(module)
import bandpo_cli.integrations.prime_rl, bandpo_cli.integrations.skyrl
import bandpo_cli.integrations.trl, bandpo_cli.integrations.verl
config = [name for name in sys.modules if name.startswith("bandpo_cli.config")]
print(json.dumps([bounds, config]))
"""


def test_bounds_and_integrations_need_numpy_alone():
    """A process that refuses all other packages. Empty classes stand for what integrations import from trainers."""
    done = subprocess.run(
        [sys.executable, "-c", CODE], input=json.dumps(LOGPROBS.tolist()), capture_output=True, text=True, cwd=ROOT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    bounds, config = json.loads(done.stdout)
    assert list(bounds) == list(DIVERGENCES)
    for name in DIVERGENCES:
        expected = np.stack(band_bounds(LOGPROBS, name, 0.05, 10.0))
        np.testing.assert_allclose(bounds[name], expected, rtol=1e-12)
    assert config == []
