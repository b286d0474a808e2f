"""Choice of the sampling engine, without importing any engine."""

from __future__ import annotations

import os
from importlib.util import find_spec

from bandpo_cli.config.section import check_known
from bandpo_cli.errors import ConfigError
from bandpo_cli.registries import ENGINES

AUTO_ENGINE = "auto"


def check_engine_name(name: object) -> str:
    """Return `auto` or the name of an engine; raise pydantic's error with the nearest name otherwise."""
    return check_known(name, [AUTO_ENGINE, *ENGINES])


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return find_spec(package) is not None


def check_engine(engine: str, device: str, max_lag: int = 0) -> None:
    """Raise an error if the package of an engine is not installed, or the engine cannot use the policy's GPU.

    vLLM in the trainer's process always runs on the first visible GPU. A process of its own (`max_lag`) chooses one.

    Args:
        engine: `sampling.engine`.
        device: `model.device`.
        max_lag: `sampling.max_lag`.

    Raises:
        ConfigError: with the command that installs the package, or makes the GPU the first one.
    """
    kind, _, card = device.partition(":")
    name = resolve_engine(engine, on_gpu=kind == "cuda")
    if not ENGINES[name].shares_weights and card.isdecimal() and int(card) > 0 and not max_lag:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        chosen = visible[int(card)] if int(card) < len(visible) else card
        raise ConfigError(
            f"model.device = '{device}': the {name} engine runs on the first visible GPU; type "
            f"CUDA_VISIBLE_DEVICES={chosen} before the command, and leave model.device out"
        )
    package = None if engine == AUTO_ENGINE else ENGINES[engine].package
    if package is not None and not is_installed(package):
        raise ConfigError(
            f"sampling.engine = '{engine}': the package {package} is not installed; {ENGINES[engine].install}, "
            f"or use --sampler {_default_engine()}"
        )


def check_tensor_parallel(tensor_parallel: int, ranks: int) -> None:
    """Raise ConfigError for an engine that is spread over GPUs if there is an engine per process as well.

    Args:
        tensor_parallel: `sampling.vllm.tensor_parallel`.
        ranks: number of processes of the run.
    """
    if ranks > 1 and tensor_parallel > 1:
        raise ConfigError(
            f"sampling.vllm.tensor_parallel = {tensor_parallel}: each of {ranks} ranks has an engine on its own GPU; "
            "set it to 1, or start one rank"
        )


def resolve_engine(engine: str, on_gpu: bool) -> str:
    """Return `engine`, and for `auto` vllm where it is installed and the policy is on a GPU, else transformers."""
    if engine != AUTO_ENGINE:
        return engine
    for name, entry in ENGINES.items():
        if on_gpu and entry.preferred_on_gpu and (entry.package is None or is_installed(entry.package)):
            return name
    return _default_engine()


def _default_engine() -> str:
    """Return the first engine that needs no optional package."""
    return next(name for name, entry in ENGINES.items() if entry.package is None)
