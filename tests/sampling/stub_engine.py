"""Engines with weights of their own, and engine processes that are forks of the tests, without an import of torch."""

import logging
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bandpo_cli.config.batch_and_sampling import SamplingConfig
from bandpo_cli.errors import ConfigError, RunError, UserError
from bandpo_cli.processes import watch
from bandpo_cli.registries import ENGINES, EngineEntry
from bandpo_cli.sampling.sampler import (
    EngineModel,
    SamplingParams,
    StaleEngineError,
    TokenIds,
    TransformersSampler,
)
from bandpo_cli.types import Completion
from tests.commands import ForkedChild
from tests.sequential_sampler import SequentialSampler

CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB"


def wrapped_out_of_memory() -> Exception:
    """Return an error of an engine that a failed allocation has caused."""
    error = RunError("the engine failed")
    error.__cause__ = torch.OutOfMemoryError(CUDA_TEXT)
    return error


ERRORS: dict[int, Exception] = {
    1: UserError("a prompt is too long"),
    2: ConfigError("not installed"),
    3: RunError("vLLM failed"),
    4: StaleEngineError("old weights"),
    5: torch.OutOfMemoryError(CUDA_TEXT),
    6: wrapped_out_of_memory(),
    7: ValueError("no such token\nwith more lines"),
    8: MemoryError(),
}
WARNING_SEED = 21
WRONG_VERSION = 66
"""Version of the weights that `CopySampler` loads wrongly."""
FLOATS = (0.1, -1e-310, float("-inf"), 1 / 3)
"""Numbers that float32 does not hold."""


class StubSampler(SequentialSampler):
    """Raises the error of the seed of the request; otherwise returns the token ids of the prompt in reverse order."""

    def __init__(self, config: SamplingConfig, policy: Any) -> None:
        self._config = config
        self._version = 0

    def sample(
        self, prompts_P: Sequence[TokenIds], params: SamplingParams, seed: int
    ) -> list[list[Completion]]:
        if seed in ERRORS:
            raise ERRORS[seed]
        if seed == WARNING_SEED:
            logging.getLogger("bandpo_cli").warning("a %s of the engine", "warning")
            logging.getLogger("bandpo_cli").info("not for the user")
        return [
            [
                Completion((*prompt[::-1], number), FLOATS, "stop" if number else "length", self._version)
                for number in range(params.samples)
            ]
            for prompt in prompts_P
        ]

    def sync(self, model: PreTrainedModel, version: int) -> None: ...

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        assert all(tensor.isfinite().all() for _, tensor in weights)
        if version == 666:
            raise StaleEngineError("the engine's check failed")
        self._version = version

    def describe(self) -> dict[str, str]:
        return {
            "engine": self._config.engine,
            "max_lag": str(self._config.max_lag),
            "sleep": str(self._config.vllm.sleep),
            "rank": os.environ.get("RANK", "none"),
            "threads": str(torch.get_num_threads()),
        }


class CopySampler(TransformersSampler):
    """The transformers engine on a model of its own. Like vLLM, it keeps received tensors for a while."""

    shares_weights = False

    def __init__(self, config: SamplingConfig, model: EngineModel) -> None:
        own = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
        super().__init__(own.eval(), pad_id=0)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        kept = dict(weights)
        if version == WRONG_VERSION:
            kept["model.norm.weight"] = -kept["model.norm.weight"]
        self.model.load_state_dict(kept, strict=False)
        self.version = version


@contextmanager
def forked_engines() -> Iterator[pytest.MonkeyPatch]:
    """Fork engine processes within the block, in which the engines `stub` and `copy` exist."""
    ENGINES.register(EngineEntry("stub", "a stub", f"{__name__}:StubSampler"))
    ENGINES.register(EngineEntry("copy", "a copy", f"{__name__}:CopySampler"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(watch, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": ForkedChild}))
            yield patch
    finally:
        del ENGINES["stub"]
        del ENGINES["copy"]
