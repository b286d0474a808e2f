"""Stand-ins for prime-rl, which is on no package index, and for what parts of verl and SkyRL import."""

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from types import ModuleType
from typing import Any

import pytest
import torch

import bandpo_cli.integrations


@contextmanager
def integration(name: str, modules: dict[str, dict[str, Any]]) -> Iterator[ModuleType]:
    """Import `bandpo_cli.integrations.<name>` afresh with `modules` (attributes by name) in `sys.modules`."""
    path = f"bandpo_cli.integrations.{name}"
    with pytest.MonkeyPatch.context() as patch:
        for module_name, attributes in modules.items():
            module = ModuleType(module_name)
            vars(module).update(attributes)
            patch.setitem(sys.modules, module_name, module)
        patch.delitem(sys.modules, path, raising=False)
        patch.delattr(bandpo_cli.integrations, name, raising=False)
        module = importlib.import_module(path)
        try:
            yield module
        finally:
            del sys.modules[path]
            delattr(bandpo_cli.integrations, name)


@contextmanager
def partial_package(
    package: str, folders: Sequence[str], modules: Mapping[str, dict[str, Any]] | None = None
) -> Iterator[None]:
    """Make the modules of an installed package importable one by one; skip the test where it is not installed.

    `import verl` needs ray and more, and single modules of it need little.

    Args:
        folders: packages that become empty modules with the packages' folders, so that no `__init__.py` runs.
        modules: modules that are replaced, with the attributes that are taken from them.
    """
    try:
        installed = distribution(package)
    except PackageNotFoundError:
        pytest.skip(f"needs {package}")
    empty = {name: {"__path__": [str(installed.locate_file(name.replace(".", "/")))]} for name in folders}
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for name, attributes in (empty | dict(modules or {})).items():
            module = ModuleType(name)
            vars(module).update(attributes)
            patch.setitem(sys.modules, name, module)
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                if name.partition(".")[0] == package:
                    del sys.modules[name]


def with_parents(modules: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the modules and all packages above them, which are empty."""
    parts = [name.split(".") for name in modules]
    parents = {".".join(names[:end]) for names in parts for end in range(1, len(names))}
    return {name: {"__path__": []} for name in parents} | modules


BANDS = [{"divergence": "kl", "delta": 0.05}, {"divergence": "tv", "delta": 0.1, "max_ratio": None}]
"""Settings of the Band for the comparisons of losses."""

# ---- prime-rl: src/prime_rl/trainer/rl/loss.py, August 2026 ----------------------------------------------------------


@dataclass
class LossInputs:
    """One sequence, [seq] each."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = field(default=None)


@dataclass
class LossOutputs:
    """The loss of a sequence and its metrics, scalars."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


PRIME_RL = with_parents({"prime_rl.trainer.rl.loss": {"LossInputs": LossInputs, "LossOutputs": LossOutputs}})
