"""Fixtures of the comparisons with other packages."""

import importlib
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def band():
    """Return `bandpo_cli.integrations.trl`."""
    pytest.importorskip("trl")
    return importlib.import_module("bandpo_cli.integrations.trl")


@pytest.fixture(scope="session")
def verl_package():
    """Return verl's modules, with the loss of this package registered; skip where only parts of verl can be imported.

    `make test-integrations` runs these tests in an environment of its own (constraints-verl.txt): all of verl needs
    other versions of transformers and of ANTLR than the other comparisons.
    """
    pytest.importorskip("hydra")
    pytest.importorskip("ray")
    pytest.importorskip("verl.workers.config")
    algos = importlib.import_module("verl.trainer.ppo.core_algos")
    return SimpleNamespace(
        registered_by_verl="band" in algos.POLICY_LOSS_REGISTRY,
        algos=algos,
        config=importlib.import_module("verl.workers.config"),
        band=importlib.import_module("bandpo_cli.integrations.verl"),
    )
